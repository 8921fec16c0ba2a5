"""Tiering within one cache node: make room in memory, offload, load, evict, purge, and what disk servers answer."""

from __future__ import annotations

from polarkv_client.protocol.messages import OperationResult
from polarkv_client.states import READABLE
from polarkv_client.states import EntryState as S
from polarkv_dataplane.manager.core.ledger import Ledger
from polarkv_dataplane.manager.core.table import Event
from polarkv_dataplane.manager.records.effects import DiskWork, Work
from polarkv_dataplane.manager.records.model import CacheNode, Entry


class Tiering:
    """Policies of one ledger's nodes."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.settings = ledger.settings

    def take_slot(self, node: CacheNode, stride: int, now: int) -> int | None:
        """Offset of a slot on ``node``, made free by eviction if need be; None when there is none to be had now."""
        if now < node.fence_ms:
            return None
        node.pool.release_due(now)
        offset = node.pool.take(stride)
        if offset is not None:
            return offset
        patient = node.offloads_all(now)  # then only what disk has can go, and that is quick to see
        for _, victim in zip(range(self.settings.victim_scan), node.memory, strict=False):
            if patient and victim.state is not S.MEMORY_AND_DISK and victim.pinned_until_ms <= now:
                continue
            if victim.stride_bytes == stride and victim.fence_ms <= now and self.evict(victim, now):
                offset = node.pool.take(stride)
                if offset is not None:
                    return offset
        self._reclaim_slab(node, stride, now)
        offset = node.pool.take(stride)
        if offset is None:
            node.short_until_ms = now + self.settings.offload_retry_ms
        return offset

    def evict(self, entry: Entry, now: int, *, forced: bool = False) -> bool:
        """Drop a memory copy if the rules allow it. ``forced`` drops also what only memory has, and what is pinned."""
        pinned = entry.pinned_until_ms > now and not forced
        if pinned and entry.state in READABLE:
            entry.node.memory.touch(entry)  # away from the old end: the next victim scans see what is behind it
        dropped = entry.state is S.MEMORY and (forced or not entry.node.can_offload(entry, now))
        if not (pinned or entry.holds) and (dropped or entry.state is S.MEMORY_AND_DISK):
            self.ledger.stats.add("evicted_memory" if entry.state is S.MEMORY else "demoted")
            self.ledger.change(entry, Event.EVICT, now)
            return True
        return False

    def load(self, entry: Entry, now: int) -> None:
        """Bring a Disk entry to memory, if there is a slot for it now; who waits asks again."""
        node = entry.node
        if node.is_busy(self.settings, entry.stride_bytes, loading=True):
            return
        offset = self.take_slot(node, entry.stride_bytes, now)
        if offset is not None:
            self.ledger.change(entry, Event.LOAD, now, offset)
            self.ledger.ask_disk(entry, Work.LOAD, now)

    def purge(self, entry: Entry, now: int) -> None:
        """Delete the file of a Disk entry."""
        self.ledger.stats.add("purged")
        self.ledger.change(entry, Event.EVICT, now)
        self.ledger.ask_disk(entry, Work.PURGE, now)

    def pump(self, node: CacheNode, now: int) -> None:
        """Start offloads that are due, in the order of commits; for a drain all are."""
        while node.has_disk and (entry := node.offloads.next(now)) is not None:
            if node.is_busy(self.settings, entry.stride_bytes, loading=False):
                return
            if node.serving and not self._offload_is_due(node, entry.stride_bytes, now):
                return
            if not self._make_disk_room(node, entry.stride_bytes, now):
                return
            self.ledger.change(entry, Event.OFFLOAD, now)
            self.ledger.ask_disk(entry, Work.OFFLOAD, now)

    def complete(self, node: CacheNode, operation: int, result: OperationResult, now: int) -> bool:
        """The answer of ``node``'s present disk server. False, and nothing changes, when no such operation is open."""
        open_operation = node.operations.pop(operation, None)
        if open_operation is None or open_operation.entry.operation != operation:
            return False
        work, entry, _ = open_operation
        if work is Work.PURGE:
            self.ledger.change(entry, Event.PURGED, now)
        elif work is Work.LOAD:
            self._loaded(entry, result, now)
        else:
            self._offloaded(entry, result, now)
        self.pump(node, now)
        return True

    def forget_file(self, node: CacheNode, key: bytes) -> None:
        """Have a file deleted that no entry stands for. No answer is awaited: a disk server keeps one key's order."""
        self.ledger.effects.append(DiskWork(node.number, node.incarnation, Work.PURGE, 0, key, -1, 0, 0, 0))

    def shed(self, node: CacheNode, count: int, now: int) -> None:
        """Let the oldest ``count`` entries of a node go for good: there are too many keys."""
        for _, entry in zip(range(count), node.disk, strict=False):
            if entry.pinned_until_ms <= now:
                self.purge(entry, now)
                count -= 1
        for _, entry in zip(range(count), node.memory, strict=False):
            self.evict(entry, now)

    def _loaded(self, entry: Entry, result: OperationResult, now: int) -> None:
        if result is OperationResult.OK:
            self.ledger.change(entry, Event.LOADED, now)
            return
        self.ledger.stats.add("load_failed")
        self.ledger.change(entry, Event.LOAD_FAILED, now)
        self.ledger.ask_disk(entry, Work.PURGE, now)

    def _offloaded(self, entry: Entry, result: OperationResult, now: int) -> None:
        if result is OperationResult.OK:
            self.ledger.change(entry, Event.OFFLOADED, now)
            return
        self.ledger.stats.add("offload_failed")
        self.ledger.change(entry, Event.OFFLOAD_FAILED, now)  # back in the queue of dirty entries
        self.forget_file(entry.node, entry.key)  # an older file of this key, of which no entry knew
        if result is OperationResult.DAMAGED and self.evict(entry, now, forced=True):
            return
        node = entry.node
        node.offloads.leave_alone(now + self.settings.offload_retry_ms, entry)
        if result is OperationResult.NO_SPACE:  # others use this disk too, or the books differ: believe the disk
            self._purge_oldest(node, 2 * entry.stride_bytes, now, node.offloads.volume(entry))

    def _offload_is_due(self, node: CacheNode, stride: int, now: int) -> bool:
        """Ahead of pressure while that costs no other chunk its file; else when memory runs out of free victims.

        So a full disk holds what memory does not, rather than a second copy of it.
        """
        if self.settings.offload_ahead and node.disk_used_bytes + stride <= self._disk_high_bytes(node):
            return True
        high = node.pool.usable_bytes * self.settings.memory_high_percent // 100
        return node.dirty_bytes > high or now < node.short_until_ms

    def _disk_high_bytes(self, node: CacheNode) -> int:
        return node.disk_bytes * self.settings.disk_high_percent // 100

    def _make_disk_room(self, node: CacheNode, stride: int, now: int) -> bool:
        """True when a file of ``stride`` fits now; otherwise the oldest files are being purged, or nothing can be."""
        missing = node.disk_used_bytes - node.purging_bytes + stride - self._disk_high_bytes(node)
        if missing > 0:
            self._purge_oldest(node, missing, now)
        fits = node.disk_used_bytes + stride <= node.disk_bytes
        if not fits and not node.purging_bytes:  # nothing may be purged: a full disk must not stop stores
            node.offloads.leave_alone(now + self.settings.offload_retry_ms)
        return fits

    def _purge_oldest(self, node: CacheNode, wanted_bytes: int, now: int, volume: int | None = None) -> None:
        """Purge by LRU until ``wanted_bytes`` will be free (on one volume, or all); what is in both tiers goes last."""
        for lru in (node.disk, node.memory):
            for _, entry in zip(range(self.settings.victim_scan), lru, strict=False):
                if wanted_bytes <= 0 or len(node.operations) >= 2 * self.settings.operations_per_node:
                    return
                if volume not in (None, node.offloads.volume(entry)):
                    continue
                if entry.state is S.MEMORY_AND_DISK:
                    self.evict(entry, now)
                if entry.state is S.DISK and entry.pinned_until_ms > now:
                    node.disk.touch(entry)
                elif entry.state is S.DISK:
                    self.purge(entry, now)
                    wanted_bytes -= entry.stride_bytes

    def _reclaim_slab(self, node: CacheNode, stride: int, now: int) -> None:
        """Empty the slab of another class that holds the coldest entry, so that this class can have it."""
        slabs = node.pool.reclaimable(stride)
        homes = (node.pool.slab_of(entry.offset_bytes) for entry in (node.memory if slabs else ()))
        slab = next((home for home in homes if home in slabs), None)
        if slab is not None:
            node.pool.close_slab(slab)  # first: the slab is gone with its last entry
            for entry in [entry for entry in slab.holders if entry is not None]:
                self.evict(entry, now)
