"""Memory of one cache node, carved: equal slabs, each with slots of one size class until it is empty again."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from polarkv_dataplane.manager.records.model import Entry


class Slab:
    """A run of memory with slots of one stride. ``holders[i]`` is the entry in slot i."""

    __slots__ = ("base_bytes", "closing", "free", "holders", "pins", "stride_bytes")

    def __init__(self, base_bytes: int, slab_bytes: int, stride_bytes: int) -> None:
        self.base_bytes = base_bytes
        self.stride_bytes = stride_bytes
        count = slab_bytes // stride_bytes
        self.holders: list[Entry | None] = [None] * count
        self.free = dict.fromkeys(range(count - 1, -1, -1))  # last in, first out; a claim finds its slot at once
        self.pins = 0  # how many of its entries are pinned
        self.closing = False  # gives no slots any more: it is to take another class


class SlotPool:
    """Slots of one node. Used + free + quarantined = all, for every slab."""

    def __init__(self, memory_bytes: int, slab_bytes: int) -> None:
        self.slab_bytes = slab_bytes
        self.memory_bytes = memory_bytes // slab_bytes * slab_bytes
        self.slabs: dict[int, Slab] = {}  # by base
        self.bare = list(range(self.memory_bytes - slab_bytes, -1, -slab_bytes))
        self.open: dict[int, dict[int, Slab]] = {}  # by stride, then base: slabs with a free slot
        self.quarantined: list[tuple[int, int]] = []  # (free from ms, offset), a heap
        self.used_bytes = 0
        self.usable_bytes = self.memory_bytes  # less what the carved slabs' slots leave over
        self.carved: list[tuple[int, int]] = []  # (base, stride) since last drained: the slab server is told

    def take(self, stride_bytes: int) -> int | None:
        """Offset of a free slot for :meth:`put`, or None."""
        slabs = self.open.get(stride_bytes)
        if not slabs:
            if not self.bare or stride_bytes > self.slab_bytes:
                return None
            self._carve(self.bare.pop(), stride_bytes)
            slabs = self.open[stride_bytes]
        slab = next(iter(slabs.values()))
        index = slab.free.popitem()[0]
        if not slab.free:
            slab.free.clear()  # an emptied dict keeps its size: 36 bytes a slot
            del slabs[slab.base_bytes]
        return slab.base_bytes + index * stride_bytes

    def claim(self, offset_bytes: int, stride_bytes: int) -> bool:
        """Take the very slot at ``offset_bytes``; False when it is not a free slot of this class."""
        base = offset_bytes // self.slab_bytes * self.slab_bytes
        index, rest = divmod(offset_bytes - base, stride_bytes)
        if rest or index >= self.slab_bytes // stride_bytes:
            return False
        if base not in self.slabs and base in self.bare:
            self.bare.remove(base)
            self._carve(base, stride_bytes)
        slab = self.slabs.get(base)
        if slab is None or slab.stride_bytes != stride_bytes or index not in slab.free:
            return False
        del slab.free[index]
        if not slab.free:
            slab.free.clear()
            self.open[stride_bytes].pop(base, None)
        return True

    def put(self, offset_bytes: int, entry: Entry) -> None:
        """Record who holds a slot that was taken."""
        slab, index = self._find(offset_bytes)
        assert slab.holders[index] is None, "a slot is held twice"
        slab.holders[index] = entry
        slab.pins += entry.pinned_until_ms > 0
        self.used_bytes += slab.stride_bytes

    def give_back(self, offset_bytes: int, from_ms: int, now: int) -> None:
        """The holder is gone; the slot is free at once, or after its quarantine."""
        slab, index = self._find(offset_bytes)
        entry = slab.holders[index]
        assert entry is not None, "a free slot was freed"
        slab.holders[index] = None
        slab.pins -= entry.pinned_until_ms > 0
        self.used_bytes -= slab.stride_bytes
        if from_ms > now:
            heappush(self.quarantined, (from_ms, offset_bytes))
        else:
            self._free(slab, index)

    def release_due(self, now: int) -> bool:
        """End quarantines; True when a slot became free."""
        due = False
        while self.quarantined and self.quarantined[0][0] <= now:
            self._free(*self._find(heappop(self.quarantined)[1]))
            due = True
        return due

    def pinned(self, offset_bytes: int, change: int) -> None:
        """The entry there was pinned (1), or its pin ended (-1). A slab that was to empty opens again."""
        slab = self.slab_of(offset_bytes)
        slab.pins += change
        if slab.closing and slab.pins:
            slab.closing = False
            if slab.free:
                self.open.setdefault(slab.stride_bytes, {})[slab.base_bytes] = slab

    def reclaimable(self, stride_bytes: int) -> set[Slab]:
        """Slabs of which one may be emptied for this class: the one that is closing, else all of other classes.

        None that holds what is pinned: until the pin ends it would give slots to nobody.
        """
        if stride_bytes > self.slab_bytes:
            return set()
        closing = {slab for slab in self.slabs.values() if slab.closing}
        return closing or {slab for slab in self.slabs.values() if slab.stride_bytes != stride_bytes and not slab.pins}

    def close_slab(self, slab: Slab) -> None:
        """Give no slots of this slab any more, so that it empties and can be carved anew."""
        slab.closing = True
        self.open.get(slab.stride_bytes, {}).pop(slab.base_bytes, None)
        self._bare_if_empty(slab)

    def free_bytes(self) -> int:
        """Bytes of free slots and of slabs that have none yet."""
        slots = sum(len(slab.free) * slab.stride_bytes for slab in self.slabs.values())
        return slots + len(self.bare) * self.slab_bytes

    def quarantined_bytes(self) -> int:
        """Bytes of slots that rest. With used and free ones: all usable bytes."""
        return sum(self.slab_of(offset_bytes).stride_bytes for _, offset_bytes in self.quarantined)

    def entries(self) -> Iterator[Entry]:
        """Every entry with an extent here."""
        for slab in self.slabs.values():
            yield from [entry for entry in slab.holders if entry is not None]

    def slab_of(self, offset_bytes: int) -> Slab:
        return self.slabs[offset_bytes // self.slab_bytes * self.slab_bytes]

    def _carve(self, base: int, stride_bytes: int) -> Slab:
        slab = self.slabs[base] = Slab(base, self.slab_bytes, stride_bytes)
        self.open.setdefault(stride_bytes, {})[base] = slab
        self.carved.append((base, stride_bytes))
        self.usable_bytes -= self.slab_bytes % stride_bytes
        return slab

    def _find(self, offset_bytes: int) -> tuple[Slab, int]:
        slab = self.slab_of(offset_bytes)
        return slab, (offset_bytes - slab.base_bytes) // slab.stride_bytes

    def _free(self, slab: Slab, index: int) -> None:
        slab.free[index] = None
        if not slab.closing:
            self.open.setdefault(slab.stride_bytes, {})[slab.base_bytes] = slab
        self._bare_if_empty(slab)

    def _bare_if_empty(self, slab: Slab) -> None:
        if len(slab.free) == len(slab.holders):
            self.open.get(slab.stride_bytes, {}).pop(slab.base_bytes, None)
            del self.slabs[slab.base_bytes]
            self.usable_bytes += self.slab_bytes % slab.stride_bytes
            self.bare.append(slab.base_bytes)
