"""What planners decide on, and the steps that they may ask for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import TypeAlias

from polarkv_client.states import DrainMode, NodeState

TIME_FORMAT = "%Y-%m-%dT%H:%M:%SZ"
# A manager that has just started, or lost a connection, hears from a living cache node well within this time. Until
# then the node may still prove what its memory holds.
RETURN_S = 30


class Purpose(StrEnum):
    """Why the operator drains a cache node. What people drain has none, and is theirs to take back."""

    ROLLOUT = "rollout"
    SCALE_DOWN = "scale-down"


@dataclass(frozen=True)
class Drain:
    """A drain of the operator's, as an annotation of the pod keeps it: it ends with the pod, and outlives the operator.

    ``since_s`` is in seconds since the epoch.
    """

    purpose: Purpose
    mode: DrainMode
    since_s: int

    def written(self) -> str:
        """As the annotation has it: ``rollout Flush 2026-01-31T12:00:00Z``."""
        return f"{self.purpose} {self.mode} {show_time(self.since_s)}"


def read_drain(text: str) -> Drain | None:
    """A drain from its annotation; None where there is none that can be read."""
    purpose, _, rest = text.partition(" ")
    mode, _, since = rest.partition(" ")
    try:
        return Drain(Purpose(purpose), DrainMode(mode), read_time(since))
    except ValueError:
        return None


def show_time(at_s: float) -> str:
    """A time as Kubernetes writes it."""
    return datetime.fromtimestamp(int(at_s), UTC).strftime(TIME_FORMAT)


def read_time(text: str) -> int:
    """Seconds since the epoch of a time as Kubernetes writes it.

    Raises:
        ValueError: it is none.
    """
    return int(datetime.strptime(text, TIME_FORMAT).replace(tzinfo=UTC).timestamp())


@dataclass(frozen=True)
class CacheNode:
    """One place of the StatefulSet: its pod as the API server has it, its node as the manager knows it."""

    ordinal: int
    name: str
    uid: str = ""  # of the pod; empty: there is none
    ready: bool = False
    terminating: bool = False
    outdated: bool = False  # made from an earlier template
    state: NodeState | None = None  # None: the manager does not know it
    absent_s: int = 0  # how long the manager has been without it, at least
    proved: bool = False  # the manager has all of what its memory and its files hold
    drain: Drain | None = None

    @property
    def there(self) -> bool:
        """It has a pod that is not on its way out."""
        return bool(self.uid) and not self.terminating

    @property
    def serving(self) -> bool:
        """Nothing is missing."""
        return self.there and self.ready and self.state is NodeState.ACTIVE and self.proved

    @property
    def absent(self) -> bool:
        """The manager serves nothing from it at the moment."""
        return self.state in (None, NodeState.DOWN)

    @property
    def gone(self) -> bool:
        """The manager serves nothing from it, and it has nothing that it could still prove."""
        return self.absent and (not self.uid or self.absent_s >= RETURN_S)

    def drained_for(self, purpose: Purpose) -> bool:
        """The operator drains it for this purpose."""
        return self.drain is not None and self.drain.purpose is purpose

    def overdue(self, timeout_s: int, now_s: int) -> bool:
        """Its drain has taken longer than it may."""
        return self.drain is not None and now_s - self.drain.since_s >= timeout_s


@dataclass(frozen=True)
class World:
    """A cluster's cache nodes. ``current`` is the StatefulSet's ``replicas``, ``now_s`` seconds since the epoch."""

    nodes: tuple[CacheNode, ...]
    current: int
    now_s: int
    manager_answers: bool = True
    revision_known: bool = True  # the StatefulSet's controller has seen the present template

    def at(self, ordinal: int) -> CacheNode | None:
        """The node at a place, if there is anything at all."""
        return next((node for node in self.nodes if node.ordinal == ordinal), None)


@dataclass(frozen=True)
class StartDrain:
    """Note the drain at the pod, then ask the manager for it; asking again is harmless."""

    node: str
    uid: str
    drain: Drain


@dataclass(frozen=True)
class CancelDrain:
    """Have the manager take the node back, then remove the note."""

    node: str
    uid: str


@dataclass(frozen=True)
class DeletePod:
    """Delete this very pod; the StatefulSet makes its successor."""

    node: str
    uid: str


@dataclass(frozen=True)
class Notice:
    """What the user should read: an Event. ``warning`` is for what needs somebody's attention."""

    reason: str
    message: str
    warning: bool = False


Step: TypeAlias = StartDrain | CancelDrain | DeletePod


def names(nodes: Iterable[CacheNode]) -> str:
    """Names for a message."""
    return ", ".join(node.name for node in nodes)
