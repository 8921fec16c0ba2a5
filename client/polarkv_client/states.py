"""The words for what happens to entries and cache nodes; the rules between them are in the manager's core."""

from __future__ import annotations

from enum import IntEnum, StrEnum


class EntryState(IntEnum):
    """State of an entry; :data:`HAS_MEMORY`, :data:`HAS_DISK` and :data:`READABLE` say what each holds."""

    WRITING = 1
    MEMORY = 2
    OFFLOADING = 3
    MEMORY_AND_DISK = 4
    DISK = 5
    LOADING = 6
    PURGING = 7

    __hash__ = int.__hash__  # an enum's own is written in Python, and states are looked up many times a key

    @property
    def word(self) -> str:
        """The state as users meet it, in the API, in metrics, in the command and in the docs: ``MemoryAndDisk``."""
        return "".join(part.capitalize() for part in self.name.split("_"))


HAS_MEMORY = frozenset(EntryState) - {EntryState.DISK, EntryState.PURGING}
HAS_DISK = frozenset({EntryState.MEMORY_AND_DISK, EntryState.DISK, EntryState.LOADING})
READABLE = frozenset({EntryState.MEMORY, EntryState.OFFLOADING, EntryState.MEMORY_AND_DISK})


class NodeState(StrEnum):
    """State of a cache node."""

    JOINING = "Joining"
    ACTIVE = "Active"
    DRAINING = "Draining"
    DRAINED = "Drained"
    DOWN = "Down"


class DrainMode(StrEnum):
    """What a drain does with memory copies: keep them on disk, or drop them."""

    FLUSH = "Flush"
    DISCARD = "Discard"


class Tier(IntEnum):
    """Where a lookup found a chunk; the value travels in messages."""

    NONE = 0
    MEMORY = 1
    DISK = 2


class StoreOutcome(IntEnum):
    """Answer to ``begin_store`` for one key."""

    GRANTED = 0
    EXISTS = 1
    IN_PROGRESS = 2
    NO_SPACE = 3
    QUOTA_EXCEEDED = 4
    OVERSIZED = 5


class CommitOutcome(IntEnum):
    """Answer to ``commit_store`` for one key."""

    COMMITTED = 0
    EXPIRED = 1


class ReadOutcome(IntEnum):
    """Answer to ``acquire_read`` for one key."""

    GRANTED = 0
    LOADING = 1
    MISS = 2
