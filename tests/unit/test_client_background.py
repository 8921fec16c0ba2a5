"""What a client tells its manager in the background: bounded, told once, and over when the client is closed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from polarkv_client import engine
from polarkv_client.channel import Channel
from polarkv_client.engine import Background, Counters
from tests.support.waiting import wait_until

CHANNEL = cast(Channel, "the manager")


class Told:
    """A background, and the leases that it told the manager of."""

    def __init__(self) -> None:
        self.leases: list[int] = []
        self.counters = Counters()
        self.background = Background(self.counters, lambda _, lease, __: self.leases.append(lease))

    @property
    def thread(self) -> threading.Thread:
        return self.background._thread


@pytest.fixture
def told() -> Iterator[Told]:
    made = Told()
    yield made
    made.background.close(30)
    assert not made.thread.is_alive()


def test_ended_leases_that_no_call_takes_are_told(told: Told) -> None:
    told.background.ended(CHANNEL, 1, 2)
    told.background.ended(CHANNEL, 3)
    wait_until(lambda: told.leases == [1, 2, 3], "the leases to be told")
    assert told.background.take_ended(CHANNEL) == []


def test_what_a_call_has_taken_and_could_not_send_is_told_after_all(
    told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "_LINGER_S", 0.2)
    told.background.ended(CHANNEL, 1)
    told.background.ended(CHANNEL, *told.background.take_ended(CHANNEL))
    wait_until(lambda: told.leases == [1], "the lease to be told")


def test_ended_leases_are_bounded(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_LINGER_S", 60)
    monkeypatch.setattr(engine, "_BACKGROUND_CALLS", 3)
    told.background.ended(CHANNEL, 1, 2)
    told.background.ended(CHANNEL, 3, 4, 5)
    assert told.background.take_ended(CHANNEL) == [1, 2, 3]
    assert told.counters.totals() == {"background_dropped": 2}


@pytest.mark.parametrize("queued", [0, 1, 1024])
def test_closing_ends_the_thread_however_much_is_queued(told: Told, queued: int) -> None:
    started, go_on = threading.Event(), threading.Event()

    def slow(_: float) -> None:
        started.set()
        go_on.wait(30)

    told.background.put(slow)
    assert started.wait(30)
    ran: list[float] = []
    for _ in range(queued):
        told.background.put(ran.append)
    told.background.close(0.05)
    assert told.thread.is_alive()  # in a call: it has a deadline of its own
    go_on.set()
    told.thread.join(30)
    assert not told.thread.is_alive()
    assert ran == []


def test_closing_runs_what_is_queued_while_there_is_time(told: Told) -> None:
    ran: list[float] = []
    call: Callable[[float], Any] = ran.append
    for _ in range(100):
        told.background.put(call)
    told.background.ended(CHANNEL, 7)
    told.background.close(30)
    assert len(ran) == 100
    assert told.leases == [7]
