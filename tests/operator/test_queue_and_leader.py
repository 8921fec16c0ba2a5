"""The keyed queue and the election; time is a parameter, the Lease's API a small double with real conflicts."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest

from polarkv_operator.clients.kube import Conflict, Unreachable
from polarkv_operator.reconcile.events import AGAIN_S, BURST, EventFilter
from polarkv_operator.reconcile.leader import DURATION_S, Election
from polarkv_operator.reconcile.plan.world import Notice
from polarkv_operator.reconcile.queue import LONGEST_S, MOST_KEYS, Queue


class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_key_has_one_turn_however_often_it_was_added(clock: Clock) -> None:
    queue = Queue(clock)
    for _ in range(5):
        queue.add("a")
    queue.add("b")
    assert [queue.take(0), queue.take(0), queue.take(0)] == ["a", "b", None]


def test_a_key_is_in_one_hand_at_a_time_and_comes_again_if_it_was_added_meanwhile(clock: Clock) -> None:
    queue = Queue(clock)
    queue.add("a")
    assert queue.take(0) == "a"
    queue.add("a")
    assert queue.take(0) is None
    queue.done("a", None)
    assert queue.take(0) == "a"
    queue.done("a", None)
    assert len(queue) == 0


def test_a_turn_comes_at_the_earliest_of_all_times(clock: Clock) -> None:
    queue = Queue(clock)
    queue.add("a", 30)
    queue.add("a", 10)
    queue.add("a", 20)
    clock.now_s += 9
    assert queue.take(0) is None
    clock.now_s += 1
    assert queue.take(0) == "a"
    queue.done("a", 5)
    clock.now_s += 5
    assert queue.take(0) == "a"


def test_failures_wait_longer_each_time_up_to_a_minute_and_success_forgets(clock: Clock) -> None:
    queue = Queue(clock)
    queue.add("a")
    waits = []
    for _ in range(12):
        assert queue.take(0) == "a"
        queue.add("a")  # what comes meanwhile does not shorten the wait
        waits.append(queue.failed("a"))
        assert queue.take(0) is None
        clock.now_s += waits[-1]
    assert waits[:4] == [0.25, 0.5, 1, 2] and waits[-1] == LONGEST_S
    assert queue.take(0) == "a"
    queue.done("a", 0)
    assert queue.take(0) == "a" and queue.failed("a") == 0.25


def test_the_queue_is_bounded_and_lets_everybody_go_when_closed(clock: Clock) -> None:
    queue = Queue(clock)
    for number in range(MOST_KEYS + 10):
        queue.add(str(number))
    assert len(queue) == MOST_KEYS
    empty = Queue(clock)
    taken: list[str | None] = ["?"]
    waiting = threading.Thread(target=lambda: taken.append(empty.take(3600)))
    waiting.start()
    empty.close()
    waiting.join(30)
    assert taken[-1] is None


class Leases:
    """One Lease with optimistic locking; ``away`` is an API server that does not answer."""

    def __init__(self) -> None:
        self.lease: dict[str, Any] | None = None
        self.away = False

    def get(self, *_: object) -> dict[str, Any] | None:
        self._answer()
        return copy.deepcopy(self.lease)

    def create(self, lease: dict[str, Any]) -> None:
        self._answer()
        if self.lease is not None:
            raise Conflict(409, "it exists")
        self._put(lease, 1)

    def replace(self, lease: dict[str, Any]) -> None:
        self._answer()
        assert self.lease is not None
        if lease["metadata"]["resourceVersion"] != self.lease["metadata"]["resourceVersion"]:
            raise Conflict(409, "it has changed")
        self._put(lease, int(lease["metadata"]["resourceVersion"]) + 1)

    def _answer(self) -> None:
        if self.away:
            raise Unreachable(0, "nobody")

    def _put(self, lease: dict[str, Any], version: int) -> None:
        self.lease = copy.deepcopy(lease)
        self.lease["metadata"]["resourceVersion"] = str(version)


def candidates(clock: Clock) -> tuple[Leases, Election, Election]:
    leases = Leases()
    one, other = (Election(leases, "ns", "lease", name, clock) for name in ("one", "other"))  # type: ignore[arg-type]
    return leases, one, other


def test_one_leads_and_the_other_follows_when_the_lease_runs_out(clock: Clock) -> None:
    _, one, other = candidates(clock)
    assert one.turn() and not other.turn()
    for _ in range(20):
        clock.now_s += 2
        assert one.turn() and not other.turn()
    while not other.turn():  # the first one is silent
        clock.now_s += 1
        assert not (one.leads() and other.leads())
    assert not one.leads() and not one.turn()


def test_a_leader_that_cannot_renew_stops_before_another_may_begin(clock: Clock) -> None:
    leases, one, other = candidates(clock)
    assert one.turn() and not other.turn()
    began_s = clock.now_s
    leases.away = True
    while one.leads():
        clock.now_s += 1
        one.turn()
    stopped_s = clock.now_s
    leases.away = False
    while not other.turn():
        clock.now_s += 1
    assert stopped_s - began_s <= 10 < DURATION_S <= clock.now_s - began_s


def test_a_lease_that_is_given_back_is_taken_at_once(clock: Clock) -> None:
    leases, one, other = candidates(clock)
    assert one.turn() and not other.turn()
    one.release()
    assert not one.leads()
    clock.now_s += 1
    assert other.turn()
    assert leases.lease is not None and leases.lease["spec"]["leaseTransitions"] == 1


def test_events_are_not_repeated_and_no_flood() -> None:
    said = EventFilter()
    notice = Notice("Draining", "a leaves")
    assert [said.admit("u", notice, at) for at in (0, 1, AGAIN_S - 1, AGAIN_S)] == [1, 0, 0, 2]
    admitted = [said.admit("v", Notice("Flood", str(number)), 0) for number in range(100)]
    assert sum(admitted) == BURST
    assert said.admit("v", Notice("Flood", "later"), 10) == 1
