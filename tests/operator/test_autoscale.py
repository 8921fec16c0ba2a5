"""Autoscaling decides on figures, windows and paces; time is a parameter."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace

from polarkv_operator.reconcile.autoscale import (
    Counter,
    Decision,
    Memory,
    Pace,
    Policy,
    Sample,
    decide,
    needed_nodes,
    rate_bytes_per_s,
    show_rate,
)

MB = 1e6
POLICY = Policy(1, 6, 100 * MB, up=Pace(0, 4, 60), down=Pace(1800, 1, 60))


def drive(memory: Memory, rates: Iterable[float | None], every_s: int = 15, policy: Policy = POLICY) -> list[Decision]:
    """Feed one rate every ``every_s`` seconds, from second 0."""
    made = []
    for turn, rate in enumerate(rates):
        made.append(decide(policy, memory, rate, memory.desired, turn * every_s))
        memory = made[-1].memory
    return made


def scaled(decisions: list[Decision], every_s: int = 15) -> list[tuple[int, int]]:
    """(second, number of cache nodes) of each change."""
    return [
        (turn * every_s, after.replicas)
        for turn, (before, after) in enumerate(itertools.pairwise(decisions), 1)
        if after.replicas != before.replicas
    ]


def test_up_at_once_and_by_no_more_than_a_step() -> None:
    (first,) = drive(Memory(2), [450 * MB])
    assert (first.replicas, first.reason) == (5, "ScaledUp")
    assert first.message == "450MB/s served by 2 cache nodes, target 100MB/s each: 5 needed; up from 2 to 5"
    (capped,) = drive(Memory(1), [10_000 * MB])
    assert capped.replicas == 5
    again = drive(Memory(1), [10_000 * MB] * 6)
    assert scaled(again) == [(60, 6)]


def test_down_after_the_window_and_one_at_a_time() -> None:
    decisions = drive(Memory(4), [50 * MB] * 400)
    assert scaled(decisions) == [(1800, 3), (1860, 2), (1920, 1)]
    assert decisions[0].reason == "ScaleDownPending"
    assert decisions[0].message.endswith("1 needed; down if it stays so until 1970-01-01T00:30:00Z")


def test_a_peak_starts_the_window_anew() -> None:
    low, high = [50 * MB], [390 * MB]
    assert scaled(drive(Memory(4), low * 100 + high + low * 100)) == []
    # A lesser peak does not, but it is the floor of the steps that follow.
    decisions = drive(Memory(4), low * 100 + [250 * MB] + low * 60)
    assert scaled(decisions) == [(1800, 3)]


def test_nothing_is_done_without_figures() -> None:
    decisions = drive(Memory(4), [None] * 500)
    assert {(d.replicas, d.reason) for d in decisions} == {(4, "MetricsMissing")}
    assert decide(POLICY, Memory(4), 0.0, 0, 0).reason == "MetricsMissing"


def test_a_gap_in_the_figures_starts_the_window_anew() -> None:
    before, gap = [10 * MB] * 100, [None] * 60
    assert scaled(drive(Memory(2), [*before, *gap, *[10 * MB] * 119])) == []
    short: list[float | None] = [None] * 4
    assert scaled(drive(Memory(2), [*before, *short, *[10 * MB] * 20])) == [(1800, 1)]


def test_the_window_goes_on_across_a_restart_of_the_operator() -> None:
    """What is kept is :class:`Memory`; it changes seldom while nothing happens, because each change is a write."""
    memories = [decision.memory for decision in drive(Memory(2), [10 * MB] * 119)]
    assert len(set(memories)) <= 11
    restarted = decide(POLICY, memories[-1], 10 * MB, 2, 1800)
    assert restarted.replicas == 1
    assert decide(POLICY, memories[-1], 10 * MB, 2, 9000).reason == "ScaleDownPending"


def test_calm_changes_nothing_that_is_kept() -> None:
    assert len({decision.memory for decision in drive(Memory(3), [300 * MB, 290 * MB, 310 * MB] * 50)}) == 1


def test_the_limits_hold_whatever_the_figures_say() -> None:
    assert decide(POLICY, Memory(9), None, 0, 0).replicas == 6
    assert decide(POLICY, Memory(0), None, 0, 0).replicas == 1
    assert scaled(drive(Memory(1), [0.0] * 300)) == []


def test_a_window_for_up_takes_the_least_that_was_needed() -> None:
    policy = replace(POLICY, up=Pace(60, 4, 60))
    decisions = drive(Memory(1), [500 * MB, 300 * MB, 500 * MB, 500 * MB, 500 * MB], policy=policy)
    assert scaled(decisions) == [(60, 3)]


def test_the_tolerance_keeps_still() -> None:
    assert needed_nodes(POLICY, 329 * MB, 3) == 3
    assert needed_nodes(POLICY, 331 * MB, 3) == 4
    assert needed_nodes(POLICY, 271 * MB, 3) == 3
    assert needed_nodes(POLICY, 190 * MB, 3) == 2


def test_rates_from_counters() -> None:
    a, b = Counter(1, "a"), Counter(1, "b")
    first = Sample(0, {a: 100, b: 100})
    assert rate_bytes_per_s(first, Sample(10, {a: 300, b: 100}), 60) == 20
    assert rate_bytes_per_s(first, Sample(10, {a: 100, b: 100, Counter(1, "new"): 50}), 60) == 5
    assert rate_bytes_per_s(first, Sample(10, {a: 150}), 60) == 5
    for other in (None, first, Sample(61, first.served_bytes), Sample(10, {Counter(2, "a"): 900}), Sample(10, {})):
        assert rate_bytes_per_s(first, other, 60) is None
    assert rate_bytes_per_s(None, first, 60) is None


def test_rates_for_people() -> None:
    assert [show_rate(rate) for rate in (0, 999, 1500, 12_345_678, 1.2e9)] == [
        "0B/s", "999B/s", "1.5kB/s", "12.3MB/s", "1.2GB/s",
    ]  # fmt: skip
