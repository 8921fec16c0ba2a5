"""Every entry and every node; the one function that changes an entry's state, and keeps all the books with it."""

from __future__ import annotations

from collections.abc import Iterable

from polarkv_client.states import EntryState as S
from polarkv_dataplane.manager.core.table import ABSENT, TABLE, Event, IllegalTransition
from polarkv_dataplane.manager.records.books import BOOKS, Step, step
from polarkv_dataplane.manager.records.effects import Carved, Changed, DiskWork, Effect, Wake, Work
from polarkv_dataplane.manager.records.model import CacheNode, Entry, LruList, Operation, Settings, Stats, Tenant
from polarkv_dataplane.manager.records.pins import Pins

_STEPS = {(before, event): step(before, after) for (before, event), after in TABLE.items()}


def next_step(state: S | None, event: Event) -> Step:
    """What ``event`` changes. Raises IllegalTransition when the table has none for this state."""
    try:
        return _STEPS[state, event]
    except KeyError:
        raise IllegalTransition(state, event) from None


class Ledger:
    """Shared state of the core's parts."""

    def __init__(self, settings: Settings, first_number: int) -> None:
        self.settings = settings
        self.entries: dict[bytes, Entry] = {}
        self.nodes: dict[int, CacheNode] = {}
        self.tenants: dict[int, Tenant] = {}
        self.effects: list[Effect] = []
        self.stats = Stats()
        self.pins = Pins()
        self.counts: dict[S | None, int] = dict.fromkeys([ABSENT, *S], 0)  # entries by state
        self._last_number = first_number  # no two lives of the manager share a number

    def next_number(self) -> int:
        """A number that no ticket, lease or operation had before."""
        self._last_number += 1
        return self._last_number

    def take_effects(self) -> list[Effect]:
        """The effects since the last call."""
        effects, self.effects = self.effects, []
        return effects

    def change(self, entry: Entry, event: Event, now: int, offset_bytes: int = -1) -> None:
        """Apply ``event``: the state, its extent, its disk space, its place in the LRU lists, its tenant's bytes.

        ``offset_bytes`` is the slot taken for an entry that gets a memory copy. Raises IllegalTransition.
        """
        before = entry.state
        after, memory, disk, purging, dirty, writing, leaves, enters, committed = next_step(before, event)
        node, stride = entry.node, entry.stride_bytes
        entry.state = after
        entry.operation = 0
        self.counts[before] -= 1
        self.counts[after] += 1
        if memory > 0:
            entry.offset_bytes = offset_bytes
            node.pool.put(offset_bytes, entry)
        elif memory < 0:
            node.pool.give_back(entry.offset_bytes, max(entry.fence_ms, node.fence_ms), now)
            entry.offset_bytes, entry.fence_ms = -1, 0
        if disk or purging:
            node.disk_used_bytes += disk * stride
            node.purging_bytes += purging * stride
        node.dirty_bytes += dirty * stride
        node.holds += writing
        if leaves:
            _list(node, leaves).remove(entry)
        if enters:
            _list(node, enters).push(entry)
        if before is ABSENT:
            self.entries[entry.key] = entry
            entry.tenant.used_bytes += stride
        elif after is ABSENT:
            del self.entries[entry.key]
            entry.tenant.used_bytes -= stride
            self.pins.drop(entry)
        if after is S.MEMORY:
            node.queue_dirty(entry)
        if before is S.LOADING:
            self.effects.append(Wake(entry.key))
        if committed:
            self.effects.append(Changed(entry.key))
        if node.pool.carved:
            for base, carved_stride in node.pool.carved:
                self.effects.append(Carved(node.number, node.incarnation, base, carved_stride))
            node.pool.carved.clear()

    def ask_disk(self, entry: Entry, work: Work, now: int) -> None:
        """Send the entry's node a command; only its answer may finish the entry's present state."""
        node = entry.node
        entry.operation = self.next_number()
        node.operations[entry.operation] = Operation(work, entry, now + self.settings.operation_timeout_ms)
        self.effects.append(
            DiskWork(node.number, node.incarnation, work, entry.operation, entry.key, entry.offset_bytes,
                     entry.length_bytes, entry.checksum, entry.tenant.number)
        )  # fmt: skip

    def tenant(self, number: int, name: str = "") -> Tenant:
        """The tenant's record, made when it is new."""
        tenant = self.tenants.get(number)
        if tenant is None:
            tenant = self.tenants[number] = Tenant(name or f"{number:08x}", number)
        elif name:
            tenant.name = name
        return tenant

    def make_recent(self, keys: Iterable[bytes]) -> None:
        """Move these entries to the recent ends of their LRU lists, the last key last."""
        for key in keys:
            entry = self.entries.get(key)
            name = BOOKS[entry.state or 0].lru if entry is not None else ""
            if entry is not None and name:
                _list(entry.node, name).touch(entry)


def _list(node: CacheNode, name: str) -> LruList:
    return node.disk if name == "disk" else node.memory
