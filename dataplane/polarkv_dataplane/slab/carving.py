"""How the manager has carved this node's memory, and what valid headers lie at the slots' starts."""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Iterator

from polarkv_client.layout import ALIGNMENT_BYTES, HEADER_BYTES, unpack_header
from polarkv_client.protocol.messages import Carve, InventoryItem

# Slots looked at for one message: empty ones are cheap, so a message may be built from many.
_SLOTS_A_BATCH = 4096


class Carving:
    """Stride of every slab that has one, by the slab's base."""

    def __init__(self, pool_bytes: int, slab_bytes: int) -> None:
        self._pool_bytes = pool_bytes
        self._slab_bytes = slab_bytes
        self._lock = threading.Lock()
        self._strides: dict[int, int] = {}

    def carve(self, command: Carve) -> bool:
        """Take the manager's word; return False, and change nothing, when it cannot be meant for this memory."""
        base, stride = command.base_bytes, command.stride_bytes
        if base % self._slab_bytes or not 0 <= base <= self._pool_bytes - self._slab_bytes:
            return False
        if stride and (stride % ALIGNMENT_BYTES or not ALIGNMENT_BYTES <= stride <= self._slab_bytes):
            return False
        with self._lock:
            if stride:
                self._strides[base] = stride
            else:
                self._strides.pop(base, None)
        return True

    def clear(self) -> None:
        """Forget all of it: a new incarnation starts with uncarved memory."""
        with self._lock:
            self._strides.clear()

    def slabs(self) -> dict[int, int]:
        """Stride by base, now."""
        with self._lock:
            return dict(self._strides)

    def slots(self) -> Iterator[tuple[int, int]]:
        """(offset, stride) of every slot, as carved at the time of this call."""
        return _slots(sorted(self.slabs().items()), self._slab_bytes)


def _slots(slabs: list[tuple[int, int]], slab_bytes: int) -> Iterator[tuple[int, int]]:
    for base, stride in slabs:
        for offset in range(base, base + slab_bytes - stride + 1, stride):
            yield offset, stride


def inventory(slots: Iterator[tuple[int, int]], view: memoryview) -> Iterator[Callable[[], list[InventoryItem]]]:
    """Yield what builds each batch of valid headers, at the time that the batch is sent."""
    while batch := list(itertools.islice(slots, _SLOTS_A_BATCH)):
        yield functools.partial(_items, view, batch)


def _items(view: memoryview, slots: list[tuple[int, int]]) -> list[InventoryItem]:
    return [item for offset, stride in slots if (item := _item(view, offset, stride))]


def _item(view: memoryview, offset: int, stride: int) -> InventoryItem | None:
    header = unpack_header(view[offset : offset + HEADER_BYTES])
    if header is None or HEADER_BYTES + header.length_bytes > stride:
        return None
    return InventoryItem(header.key, header.length_bytes, header.checksum, header.tenant, offset)
