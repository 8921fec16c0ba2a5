"""What an entry counts as in each state: in which books the ledger has it."""

from __future__ import annotations

from typing import NamedTuple

from polarkv_client.states import HAS_MEMORY, READABLE
from polarkv_client.states import EntryState as S

# A file exists, is being written, or is being deleted.
USES_DISK = frozenset({S.OFFLOADING, S.MEMORY_AND_DISK, S.DISK, S.LOADING, S.PURGING})
DIRTY = frozenset({S.MEMORY, S.OFFLOADING})
COMMITTED = frozenset(S) - {S.WRITING, S.PURGING}


class Books(NamedTuple):
    """What an entry in one state counts as. ``lru``: the name of its list."""

    memory: bool
    disk: bool
    purging: bool
    dirty: bool
    writing: bool
    committed: bool
    lru: str


def _books(state: S | None) -> Books:
    lru = "disk" if state is S.DISK else "memory" if state in READABLE else ""
    memory, disk, dirty = state in HAS_MEMORY, state in USES_DISK, state in DIRTY
    return Books(memory, disk, state is S.PURGING, dirty, state is S.WRITING, state in COMMITTED, lru)


BOOKS = tuple(map(_books, [None, *S]))  # by state


class Step(NamedTuple):
    """What one transition changes in the books: how much more or less an entry counts, the lists it leaves and enters.

    Made once for each line of the table, because it is looked up for every change of every key.
    """

    after: S | None
    memory: int
    disk: int
    purging: int
    dirty: int
    writing: int
    leaves: str
    enters: str
    committed: bool  # before, or after: the change is one that the metadata store is told of


def step(before: S | None, after: S | None) -> Step:
    """The difference between two states' books."""
    was, becomes = BOOKS[before or 0], BOOKS[after or 0]
    moves = was.lru != becomes.lru
    return Step(
        after=after,
        memory=becomes.memory - was.memory,
        disk=becomes.disk - was.disk,
        purging=becomes.purging - was.purging,
        dirty=becomes.dirty - was.dirty,
        writing=becomes.writing - was.writing,
        leaves=was.lru if moves else "",
        enters=becomes.lru if moves else "",
        committed=was.committed or becomes.committed,
    )
