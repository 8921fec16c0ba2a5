"""The circuit breaker, in virtual time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polarkv_client.breaker import Breaker, BreakerState
from polarkv_client.errors import BreakerOpen


def breaker(failures: int = 3) -> Breaker:
    return Breaker("peer", failures, first_s=1.0, longest_s=8.0)


def opened(now: float = 0.0) -> Breaker:
    made = breaker(1)
    made.failure("gone", now)
    return made


def test_it_opens_after_failures_in_a_row() -> None:
    made = breaker()
    for _ in range(2):
        made.check(0.0)
        made.failure("gone", 0.0)
    made.success()
    for _ in range(2):
        made.failure("gone", 0.0)
    made.check(0.0)
    made.failure("gone", 0.0)
    assert made.state is BreakerState.OPEN
    with pytest.raises(BreakerOpen, match=r"peer.*gone"):
        made.check(0.5)


def test_one_probe_goes_through_and_closes_it() -> None:
    made = opened()
    made.check(1.0)
    assert made.state is BreakerState.PROBING
    with pytest.raises(BreakerOpen):
        made.check(1.0)
    made.success()
    assert made.state is BreakerState.CLOSED
    assert made.why == ""
    made.check(1.0)


def test_a_failed_probe_doubles_the_wait_up_to_a_bound() -> None:
    made = opened()
    now = 0.0
    waits = []
    for _ in range(8):
        waits.append(made.retry_at - now)
        now = made.retry_at
        made.check(now)
        made.failure("still gone", now)
    bounds = [1.0, 2.0, 4.0, 8.0, 8.0, 8.0, 8.0, 8.0]
    assert all(0.8 * bound <= wait <= bound for wait, bound in zip(waits, bounds, strict=True))


def test_a_probe_that_never_reports_does_not_block_for_ever() -> None:
    made = opened()
    made.check(1.0)
    with pytest.raises(BreakerOpen):
        made.check(8.9)
    made.check(9.0)


def test_failures_of_calls_from_before_do_not_lengthen_the_wait() -> None:
    made = opened()
    due = made.retry_at
    made.failure("late news", 0.5)
    assert made.retry_at == due


@given(st.lists(st.tuples(st.sampled_from(["check", "success", "failure"]), st.floats(0, 5)), max_size=60))
def test_it_never_lets_more_than_one_through_while_open(steps: list[tuple[str, float]]) -> None:
    made = breaker(2)
    now = 0.0
    in_a_row = 0
    for step, pause in steps:
        now += pause
        if step == "success":
            made.success()
            in_a_row = 0
        elif step == "failure":
            made.failure("gone", now)
            in_a_row += 1
        else:
            before = made.state
            try:
                made.check(now)
            except BreakerOpen:
                assert in_a_row >= 2
            else:
                assert before is BreakerState.CLOSED or made.state is BreakerState.PROBING
    assert (made.state is BreakerState.CLOSED) == (in_a_row < 2)
