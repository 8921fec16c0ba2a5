"""What the manager remembers: entries, tickets, leases, operations, tenants, cache nodes, settings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from polarkv_client.layout import stride_bytes
from polarkv_client.states import DrainMode, EntryState, NodeState
from polarkv_dataplane.manager.records.effects import Work
from polarkv_dataplane.manager.records.offloads import OffloadQueue

if TYPE_CHECKING:
    from polarkv_dataplane.manager.records.slots import SlotPool


@dataclass(frozen=True, slots=True)
class Settings:
    """Times in milliseconds. ``quarantine_ms`` exceeds the longest late one-sided access."""

    read_lease_ms: int = 5000
    write_ticket_ms: int = 4000
    quarantine_ms: int = 1000
    operation_timeout_ms: int = 10000
    offload_retry_ms: int = 1000
    node_timeout_ms: int = 3000
    offload_ahead: bool = True
    memory_high_percent: int = 90
    disk_high_percent: int = 98
    operations_per_node: int = 32
    operations_bytes: int = 256 << 20  # open at one disk server: what 100 MB/s answer well within the time-out
    victim_scan: int = 128
    max_keys: int = 10_000_000
    pinned_percent: int = 50


class Entry:
    """The manager's record of one ChunkKey. Slots keep a million of them small; see the memory budget test."""

    __slots__ = (
        "checksum", "fence_ms", "holds", "key", "length_bytes", "newer", "node", "offset_bytes", "older", "operation",
        "pinned_until_ms", "state", "tenant",
    )  # fmt: skip

    def __init__(self, key: bytes, node: CacheNode, length_bytes: int, tenant: Tenant, checksum: int = 0) -> None:
        self.key = key
        self.node = node
        self.length_bytes = length_bytes
        self.tenant = tenant
        self.checksum = checksum
        self.state: EntryState | None = None  # only Ledger.change sets it
        self.offset_bytes = -1  # ≥ 0 exactly while the state has a memory copy
        self.operation = 0  # ticket or operation that may finish the present state
        self.holds = 0  # live leases: they pin the extent
        self.fence_ms = 0  # no reuse of the slot before this time
        self.pinned_until_ms = 0
        self.older: Entry | None = None
        self.newer: Entry | None = None

    @property
    def stride_bytes(self) -> int:
        return stride_bytes(self.length_bytes)


class LruList:
    """Entries by recency, linked through the entries themselves."""

    __slots__ = ("count", "newest", "oldest")

    def __init__(self) -> None:
        self.count = 0
        self.oldest: Entry | None = None
        self.newest: Entry | None = None

    def push(self, entry: Entry) -> None:
        """Add as the most recent."""
        entry.older, entry.newer = self.newest, None
        if self.newest is None:
            self.oldest = entry
        else:
            self.newest.newer = entry
        self.newest = entry
        self.count += 1

    def remove(self, entry: Entry) -> None:
        if entry.older is None:
            self.oldest = entry.newer
        else:
            entry.older.newer = entry.newer
        if entry.newer is None:
            self.newest = entry.older
        else:
            entry.newer.older = entry.older
        entry.older = entry.newer = None
        self.count -= 1

    def touch(self, entry: Entry) -> None:
        """Make it the most recent."""
        if entry is not self.newest:
            self.remove(entry)
            self.push(entry)

    def __iter__(self) -> Iterator[Entry]:
        """From the oldest; the entry in hand may be removed meanwhile."""
        entry = self.oldest
        while entry is not None:
            following = entry.newer
            yield entry
            entry = following


@dataclass(slots=True)
class Ticket:
    """The right to write these entries' extents until the deadline."""

    number: int
    deadline_ms: int
    entries: dict[bytes, Entry]


@dataclass(slots=True)
class Lease:
    """The right to read these entries' extents until the deadline."""

    number: int
    deadline_ms: int
    entries: list[Entry]


@dataclass(slots=True)
class Tenant:
    """Who stores. ``quota_bytes`` 0 means no limit; used bytes count each entry once, as stored."""

    name: str
    number: int
    quota_bytes: int = 0
    used_bytes: int = 0


class Operation(NamedTuple):
    """A command that a disk server has not answered yet."""

    work: Work
    entry: Entry
    deadline_ms: int


class CacheNode:
    """One life (incarnation) of one cache node. A node that registers again gets a new record."""

    def __init__(self, name: str, number: int, incarnation: int, pool: SlotPool, now: int, fence_ms: int) -> None:
        self.name, self.number, self.incarnation, self.pool = name, number, incarnation, pool
        self.state = NodeState.JOINING
        self.heard_ms = now
        self.fence_ms = fence_ms  # no slot is granted before: writers of an earlier life may still be at work
        self.memory_proved = False
        self.has_disk = False
        self.disk_bytes = 0
        self.disk_used_bytes = 0
        self.purging_bytes = 0
        self.short_until_ms = 0  # a slot was wanted and there was none: offload whatever the watermark says
        self.memory = LruList()  # Memory, Offloading, MemoryAndDisk
        self.disk = LruList()  # Disk
        self.offloads = OffloadQueue()
        self.dirty_bytes = 0  # Memory and Offloading
        self.holds = 0  # live leases' entries and Writing entries: a drain waits for them
        self.drain_mode = DrainMode.FLUSH
        self.operations: dict[int, Operation] = {}

    def queue_dirty(self, entry: Entry) -> None:
        """Have an entry offloaded when its turn comes. Where nothing is, those that moved on must not pile up."""
        self.offloads.put(entry, 2 * self.memory.count + 64)

    def can_offload(self, entry: Entry, now: int) -> bool:
        """Is it worth waiting for an offload, or is dropping the only way?"""
        return self.has_disk and self.disk_bytes > 0 and self.offloads.may(entry, now)

    def offloads_all(self, now: int) -> bool:
        """Whether :meth:`can_offload` holds for every entry."""
        return self.has_disk and self.disk_bytes > 0 and now >= max(self.offloads.retry_ms, default=0)

    def is_busy(self, settings: Settings, stride: int, *, loading: bool) -> bool:
        """So many commands, or bytes of them, are open that a slow disk might not answer one more in time.

        Offloads leave half of the bytes and three quarters of the commands to loads: readers wait for those.
        """
        count = len(self.operations)
        most, most_bytes = settings.operations_per_node, settings.operations_bytes // 2
        if loading:
            most, most_bytes = 4 * most, settings.operations_bytes
        return count >= most or (count + 1) * stride > max(stride, most_bytes)

    @property
    def serving(self) -> bool:
        return self.state is NodeState.ACTIVE


@dataclass(slots=True)
class Stats:
    """Monotonic counts since the manager's start."""

    counts: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, amount: int = 1) -> None:
        self.counts[name] = self.counts.get(name, 0) + amount
