"""How long a request waits for the cache, by how long computing takes."""

from __future__ import annotations

import pytest

from polarkv_client.connectors.patience import Misses, Patience

KEYS = [bytes([number]) * 32 for number in range(4)]


def test_before_anything_was_computed_a_wait_is_short_but_for_the_calibration() -> None:
    assert Patience(0.5).wait_ms(100_000, 5000) == 1000
    assert Patience(0.5).wait_ms(100_000, 200) == 200
    assert Patience(0.5, tokens_per_s=1000).wait_ms(2000, 5000) == 1000


@pytest.mark.parametrize(
    ("tokens", "most_ms", "waits_ms"),
    [(1000, 5000, 500), (200, 5000, 100), (100, 20, 20), (1, 5000, 50), (100_000, 5000, 5000)],
)
def test_a_wait_is_a_part_of_what_computing_takes(tokens: int, most_ms: int, waits_ms: int) -> None:
    patience = Patience(0.5)
    patience.computed(2000, 2.0)
    assert patience.wait_ms(tokens, most_ms) == waits_ms


def test_without_a_share_the_deadlines_alone_count() -> None:
    patience = Patience(0)
    assert patience.wait_ms(10, 5000) == 5000
    patience.computed(2000, 2.0)
    assert patience.wait_ms(10, 5000) == 5000


def test_an_engines_first_steps_and_a_pause_do_not_count_for_long() -> None:
    patience = Patience(1, tokens_per_s=1e6)
    for seconds in (30.0, 1.0, 60.0, 9.0, 1.0):
        patience.computed(1000, seconds)
    assert patience.wait_ms(1000, 60_000) == 1000
    for _ in range(15):
        patience.computed(1000, 2.0)
    assert patience.wait_ms(1000, 60_000) == 2000


@pytest.mark.parametrize(("tokens", "seconds"), [(0, 1.0), (10, 0.0)])
def test_nothing_is_no_measurement(tokens: int, seconds: float) -> None:
    patience = Patience(1)
    patience.computed(tokens, seconds)
    assert patience.wait_ms(10, 5000) == 1000


def test_from_a_miss_to_its_store() -> None:
    now = [0.0]
    patience = Patience(1)
    misses = Misses(patience, lambda: now[0])
    misses.looked_up(KEYS, 1, 100)
    now[0] = 0.6
    misses.stored(KEYS[:1])  # nobody asked for it
    assert patience.wait_ms(100, 5000) == 1000
    misses.stored(KEYS[1:])
    assert patience.wait_ms(100, 5000) == 200
    now[0] = 50.0
    misses.stored(KEYS[1:])  # once
    misses.looked_up(KEYS, 4, 100)  # all there: nothing to compute
    misses.stored(KEYS)
    assert patience.wait_ms(100, 5000) == 200


def test_misses_that_are_never_stored_are_forgotten() -> None:
    now = [0.0]
    patience = Patience(1)
    misses = Misses(patience, lambda: now[0])
    many = [number.to_bytes(32) for number in range(1000)]
    for key in many:
        misses.looked_up([key], 0, 100)
    now[0] = 1.0
    misses.stored(many[:700])
    assert patience.wait_ms(200, 5000) == 1000
    misses.stored(many[-1:])
    assert patience.wait_ms(200, 5000) == 2000
