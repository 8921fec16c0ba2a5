"""Copies and fingerprints of the real core, fast enough for exhaustive search.

``copy_of`` knows no field by name: a field that the core gains is copied too, and a type that it does not know raises.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Any

from polarkv_client.states import DrainMode, EntryState, NodeState, Tier
from polarkv_dataplane.manager.core.directory import Directory
from polarkv_dataplane.manager.records.effects import DiskWork, Work
from polarkv_dataplane.manager.records.model import CacheNode, Entry, Settings, Stats

ATOMIC: set[type] = {int, str, bytes, bool, float, type(None)}
ATOMIC |= {EntryState, NodeState, DrainMode, Tier, Work, Settings, Stats, DiskWork}
_SLOTS: dict[type, tuple[str, ...] | None] = {}


def copy_of(thing: Any, memo: dict[int, Any]) -> Any:
    """A deep copy. ``memo`` keeps shared parts shared."""
    done = memo.get(id(thing))
    if done is not None:
        return done
    kind = type(thing)
    if kind is list or kind is deque:
        copy: Any = kind()
        memo[id(thing)] = copy
        copy.extend([item if type(item) in ATOMIC else copy_of(item, memo) for item in thing])
        return copy
    if kind is set:
        copy = memo[id(thing)] = set(thing)
        return copy
    if kind is dict:
        copy = memo[id(thing)] = {}
        for key, item in thing.items():
            copy[key] = item if type(item) in ATOMIC else copy_of(item, memo)
        return copy
    if issubclass(kind, tuple):
        if not thing:
            return thing
        items = [item if type(item) in ATOMIC else copy_of(item, memo) for item in thing]
        return kind(items) if kind is tuple else kind(*items)
    return _copy_object(thing, kind, memo)


def _copy_object(thing: Any, kind: type, memo: dict[int, Any]) -> Any:
    if kind in ATOMIC:
        return thing
    if not kind.__module__.startswith(("polarkv_dataplane.", "tests.model.")) or issubclass(kind, Enum):
        raise TypeError(f"no way to copy a {kind} is known here")
    if kind not in _SLOTS:
        _SLOTS[kind] = getattr(kind, "__slots__", None)
    copy = memo[id(thing)] = kind.__new__(kind)
    slots = _SLOTS[kind]
    if slots is None:
        fields = copy.__dict__
        for name, value in thing.__dict__.items():
            fields[name] = value if type(value) in ATOMIC else copy_of(value, memo)
        return copy
    for name in slots:
        value = getattr(thing, name)
        object.__setattr__(copy, name, value if type(value) in ATOMIC else copy_of(value, memo))
    return copy


def left(time_ms: int, now: int) -> int:
    """Milliseconds until then; whatever has passed is the same past."""
    return time_ms - now if time_ms > now else 0


class Renaming:
    """Numbers by the order in which they are met: two states that differ in names alone are one."""

    def __init__(self) -> None:
        self._names: dict[int, int] = {0: 0}

    def meet(self, number: int) -> int:
        return self._names.setdefault(number, len(self._names))

    def known(self, number: int) -> int:
        """Its name, or -1 for a number that means nothing (any more)."""
        return self._names.get(number, -1)


def fingerprint(
    directory: Directory, now: int, names: Renaming, order: Sequence[int] = range(256)
) -> tuple[Any, ...]:
    """All that can matter later: times relative to ``now``, numbers and keys renamed; counts of the past left out."""
    ledger = directory.ledger
    keys = sorted(ledger.entries, key=lambda key: order[key[0]])
    entries = [_entry(ledger.entries[key], now, names, order) for key in keys]
    tickets = tuple(
        (names.meet(number), left(ticket.deadline_ms, now), _keys(ticket.entries.values(), order))
        for number, ticket in directory.tickets.items()
    )
    leases = tuple(
        (names.meet(number), left(lease.deadline_ms, now), _keys(lease.entries, order))
        for number, lease in directory.leases.items()
    )
    return tuple(entries), tickets, leases, tuple([_node(node, now, names, order) for node in ledger.nodes.values()])


def _keys(entries: Iterable[Entry], order: Sequence[int]) -> tuple[tuple[int, bool], ...]:
    return tuple([(order[entry.key[0]], entry.state is not None) for entry in entries])


def _entry(entry: Entry, now: int, names: Renaming, order: Sequence[int]) -> tuple[int, ...]:
    return (
        order[entry.key[0]], entry.state or 0, entry.offset_bytes, entry.length_bytes, names.meet(entry.operation),
        entry.holds, entry.checksum % 10, left(entry.fence_ms, now), left(entry.pinned_until_ms, now),
    )  # fmt: skip


def _node(node: CacheNode, now: int, names: Renaming, order: Sequence[int]) -> tuple[Any, ...]:
    return (
        node.state, node.has_disk, node.memory_proved, node.drain_mode, node.holds, min(now - node.heard_ms, 9),
        left(node.fence_ms, now), left(node.short_until_ms, now),
        tuple([left(retry_ms, now) for retry_ms in node.offloads.retry_ms]),
        node.disk_used_bytes, node.purging_bytes,
        tuple([order[entry.key[0]] for entry in node.memory]), tuple([order[entry.key[0]] for entry in node.disk]),
        tuple([order[entry.key[0]] for entry in node.offloads.waiting if entry.state is EntryState.MEMORY]),
        tuple([order[entry.key[0]] for entry in node.offloads.parked if entry.state is EntryState.MEMORY]),
        left(node.offloads.parked_until_ms, now) if node.offloads.parked else 0,
        tuple([(names.meet(number), work.value, order[entry.key[0]], left(deadline_ms, now))
               for number, (work, entry, deadline_ms) in node.operations.items()]),
        tuple(sorted([(left(time_ms, now), offset) for time_ms, offset in node.pool.quarantined])),
        tuple(sorted([(slab.base_bytes, slab.stride_bytes, slab.closing, tuple(slab.free))
                      for slab in node.pool.slabs.values()])),
    )  # fmt: skip
