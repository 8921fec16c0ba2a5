"""Autoscaling on bandwidth: how many cache nodes the bytes served call for, and whether to act on it now. Pure.

Up is quick, because readers feel a lack at once; down is slow, because a node that leaves takes its memory with it.
What must outlive the operator is a handful of numbers (:class:`Memory`), kept in the status of the cluster.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from polarkv_operator.reconcile.plan.world import show_time


@dataclass(frozen=True)
class Pace:
    """How fast to follow the target in one direction."""

    window_s: int
    most_nodes: int
    period_s: int


@dataclass(frozen=True)
class Policy:
    """What the spec says."""

    fewest: int
    most: int
    target_bytes_per_s: float  # of one cache node
    up: Pace
    down: Pace
    tolerance: float = 0.1
    metrics_timeout_s: int = 60


class Counter(NamedTuple):
    """Whose counter it is: a cache node's, in one life of the manager. It goes on when the node registers again."""

    epoch: int
    node: str


@dataclass(frozen=True)
class Sample:
    """What the manager counted: bytes served by each cache node in this life of the manager, at a time in seconds."""

    at_s: float
    served_bytes: Mapping[Counter, int]


@dataclass(frozen=True)
class Memory:
    """What is remembered between decisions.

    ``pending`` is the number of nodes that a change would end at if its window were over; ``pending_since_s`` is when
    the need for it began. ``sampled_s`` is when figures were last seen: a gap starts the window anew.
    """

    desired: int
    scaled_s: int | None = None
    pending: int | None = None
    pending_since_s: int | None = None
    sampled_s: int | None = None


@dataclass(frozen=True)
class Decision:
    """How many cache nodes there should be, and why, for people."""

    memory: Memory
    reason: str
    message: str

    @property
    def replicas(self) -> int:
        """The number of cache nodes to aim for."""
        return self.memory.desired


def rate_bytes_per_s(earlier: Sample | None, later: Sample | None, timeout_s: float) -> float | None:
    """Bytes per second that were served between two samples. None: they do not tell.

    A node that came in between has served what its counter says. A manager that began a new life has forgotten.
    """
    if earlier is None or later is None:
        return None
    passed_s = later.at_s - earlier.at_s
    epochs = {counter.epoch for counter in (*earlier.served_bytes, *later.served_bytes)}
    if not 0 < passed_s <= timeout_s or len(epochs) > 1 or not later.served_bytes:
        return None
    grown = (count - earlier.served_bytes.get(counter, 0) for counter, count in later.served_bytes.items())
    return sum(max(0, more) for more in grown) / passed_s


def decide(policy: Policy, memory: Memory, rate: float | None, active: int, now_s: int) -> Decision:
    """Decide on the bytes per second served by ``active`` cache nodes together; None: it is not known."""
    within = max(policy.fewest, min(policy.most, memory.desired))
    if within != memory.desired:
        text = f"{memory.desired} cache nodes are outside of {policy.fewest} to {policy.most}: {within} it is"
        return Decision(Memory(within, now_s), "WithinLimits", text)
    if rate is None or active == 0:
        # No figures, no decision. What is pending stays: whether it does for long is for the gap to say.
        return Decision(memory, "MetricsMissing", f"no figures from the manager: {within} cache nodes stay as they are")
    gap = memory.sampled_s is not None and now_s - memory.sampled_s > _longest_gap_s(policy)
    if gap:
        memory = replace(memory, pending=None, pending_since_s=None)
    needed = needed_nodes(policy, rate, within)
    figures = (
        f"{show_rate(rate)} served by {active} cache nodes, target {show_rate(policy.target_bytes_per_s)} each: "
        f"{needed} needed"
    )
    if needed == within:
        return Decision(_calm(policy, memory, now_s), "AsNeeded", figures)
    pace = policy.up if needed > within else policy.down
    memory = _await(policy, memory, needed, now_s)
    assert memory.pending is not None and memory.pending_since_s is not None
    waited_s = now_s - memory.pending_since_s
    word = "up" if needed > within else "down"
    if waited_s < pace.window_s:
        text = f"{figures}; {word} if it stays so until {show_time(memory.pending_since_s + pace.window_s)}"
        return Decision(memory, f"Scale{word.capitalize()}Pending", text)
    if memory.scaled_s is not None and now_s - memory.scaled_s < pace.period_s:
        text = f"{figures}; next step {word} at {show_time(memory.scaled_s + pace.period_s)}"
        return Decision(memory, f"Scale{word.capitalize()}Pending", text)
    step = max(-pace.most_nodes, min(pace.most_nodes, memory.pending - within))
    target = within + step
    since = memory.pending_since_s if target != memory.pending else None
    pending = memory.pending if since is not None else None
    text = f"{figures}; {word} from {within} to {target}"
    return Decision(Memory(target, now_s, pending, since, now_s), f"Scaled{word.capitalize()}", text)


def needed_nodes(policy: Policy, rate: float, present: int) -> int:
    """How many cache nodes a rate calls for; as many as there are while that is within the tolerance."""
    exact = rate / policy.target_bytes_per_s
    if present > 0 and abs(exact / present - 1) <= policy.tolerance:
        return present
    return max(policy.fewest, min(policy.most, math.ceil(exact - 1e-9)))


def _longest_gap_s(policy: Policy) -> int:
    return max(2 * policy.metrics_timeout_s, 2 * _note_every_s(policy))


def _note_every_s(policy: Policy) -> int:
    """How often the time of the last figures is noted while something is pending: each note is a write."""
    return max(policy.metrics_timeout_s, policy.down.window_s // 10)


def _calm(policy: Policy, memory: Memory, now_s: int) -> Memory:
    """Nothing is needed: nothing is pending, and nothing has to be noted again and again."""
    return replace(memory, pending=None, pending_since_s=None, sampled_s=None)


def _await(policy: Policy, memory: Memory, needed: int, now_s: int) -> Memory:
    """Remember since when a change is needed, and the least of it that was needed all the time."""
    present, pending = memory.desired, memory.pending
    noted = memory.sampled_s
    if noted is None or now_s - noted >= _note_every_s(policy):
        noted = now_s
    if pending is None or (pending > present) != (needed > present) or pending == present:
        return replace(memory, pending=needed, pending_since_s=now_s, sampled_s=noted)
    bound = min(pending, needed) if needed > present else max(pending, needed)
    return replace(memory, pending=bound, sampled_s=noted)


def show_rate(rate: float) -> str:
    """A rate for people: ``1.2GB/s``."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if rate >= size:
            return f"{rate / size:.3g}{unit}/s"
    return f"{rate:.0f}B/s"
