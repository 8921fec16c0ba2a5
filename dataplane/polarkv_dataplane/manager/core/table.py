"""What may happen to an entry: a table. Anything that is not in it is a bug, and changes nothing."""

from __future__ import annotations

from enum import IntEnum

from polarkv_client.states import EntryState as S


class Event(IntEnum):
    """What happens to an entry."""

    BEGIN = 1
    COMMIT = 2
    ABORT = 3
    OFFLOAD = 4
    OFFLOADED = 5
    OFFLOAD_FAILED = 6
    EVICT = 7
    LOAD = 8
    LOADED = 9
    LOAD_FAILED = 10
    PURGED = 11
    NODE_LOST = 12
    PROVED_IN_MEMORY = 13
    PROVED_ON_DISK = 14

    __hash__ = int.__hash__  # as EntryState's: much faster


ABSENT = None
TABLE: dict[tuple[S | None, Event], S | None] = {
    (ABSENT, Event.BEGIN): S.WRITING,
    (S.WRITING, Event.COMMIT): S.MEMORY,
    (S.WRITING, Event.ABORT): ABSENT,
    (S.MEMORY, Event.OFFLOAD): S.OFFLOADING,
    (S.MEMORY, Event.EVICT): ABSENT,
    (S.OFFLOADING, Event.OFFLOADED): S.MEMORY_AND_DISK,
    (S.OFFLOADING, Event.OFFLOAD_FAILED): S.MEMORY,
    (S.MEMORY_AND_DISK, Event.EVICT): S.DISK,
    (S.DISK, Event.LOAD): S.LOADING,
    (S.DISK, Event.EVICT): S.PURGING,
    (S.LOADING, Event.LOADED): S.MEMORY_AND_DISK,
    (S.LOADING, Event.LOAD_FAILED): S.PURGING,
    (S.PURGING, Event.PURGED): ABSENT,
    # What a node proves when it registers again (invariant 10).
    (ABSENT, Event.PROVED_IN_MEMORY): S.MEMORY,
    (ABSENT, Event.PROVED_ON_DISK): S.DISK,
    (S.MEMORY, Event.PROVED_ON_DISK): S.MEMORY_AND_DISK,
    **{(state, Event.NODE_LOST): ABSENT for state in S},
}


class IllegalTransition(AssertionError):
    """An event that the table does not have for this state."""

    def __init__(self, state: S | None, event: Event) -> None:
        super().__init__(f"{event.name} in state {state.name if state else 'absent'}")
