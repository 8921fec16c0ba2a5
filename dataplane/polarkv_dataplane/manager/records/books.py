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


BOOKS = tuple(map(_books, [None, *S]))  # by state; looked up for every change of every key
