"""How chunks get from the engine's memory to the client and back: one interface, two ways.

:class:`Direct` gives the client the engine's own memory (a CPU's): nothing is copied twice. :class:`Staged` is for a
GPU: pinned buffers in this host's memory, copies on a stream of their own, and an event that has passed before a byte
is hashed, sent or said to be there. What differs between a GPU and its twin on a CPU is in :class:`Device` alone.
"""

from __future__ import annotations

import ctypes
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from polarkv_client.buffers import Views
from polarkv_client.connectors.vllm.pages import CpuViews, Pages
from polarkv_client.connectors.vllm.plan import SCRATCH
from polarkv_client.errors import DeadlineExceeded

Chunk = Sequence[int]  # the blocks of one chunk, in order


class Copies(ABC):
    """A worker's way between its KV caches and the client. Several threads may call at once."""

    @abstractmethod
    def batch(self, chunks: int) -> int:
        """How many of so many chunks to ask for at once."""

    @abstractmethod
    @contextmanager
    def reading(self, chunks: Sequence[Chunk], deadline: float) -> Iterator[list[Views]]:
        """The bytes of these chunks, complete and unchanging until the context ends.

        Raises:
            DeadlineExceeded: no room for them came free in time.
        """

    @abstractmethod
    @contextmanager
    def writing(self, chunks: Sequence[Chunk], deadline: float) -> Iterator[Arrivals]:
        """Buffers for these chunks. Raises as :meth:`reading`."""


class Arrivals(ABC):
    """Buffers that are being filled."""

    views: list[Views]

    @abstractmethod
    def arrived(self, count: int) -> None:
        """The first ``count`` chunks are whole: when this returns, the engine's memory has them."""


class Direct(Copies):
    """The engine's memory itself."""

    def __init__(self, pages: Pages, blocks_per_chunk: int) -> None:
        self._views = CpuViews(pages)
        self._chunk_bytes = pages.block_bytes * blocks_per_chunk

    def batch(self, chunks: int) -> int:
        return chunks

    @contextmanager
    def reading(self, chunks: Sequence[Chunk], deadline: float) -> Iterator[list[Views]]:
        del deadline
        yield [self._views.chunk(blocks, memoryview(b"")) for blocks in chunks]

    @contextmanager
    def writing(self, chunks: Sequence[Chunk], deadline: float) -> Iterator[Arrivals]:
        del deadline
        # Of one load, only its first and last chunk have parts that go nowhere; several may be written at once.
        yield _InPlace(
            [
                self._views.chunk(blocks, memoryview(bytearray(self._chunk_bytes if SCRATCH in blocks else 0)))
                for blocks in chunks
            ]
        )


class _InPlace(Arrivals):
    def __init__(self, views: list[Views]) -> None:
        self.views = views

    def arrived(self, count: int) -> None:
        """They were written where they belong."""


class Device(Protocol):
    """What a device can do beside copying: memory to stage in, and its order of things."""

    def staging(self, size_bytes: int) -> Any:
        """A tensor of bytes in this host's memory that the device can copy from and to by itself."""

    def after_engine(self) -> Any:
        """A mark behind everything that the engine has asked of the device until now. Called on the engine's thread."""

    def stream(self) -> Any:
        """A context in which copies go to a stream of the calling thread's own, beside the engine's."""

    def wait_for(self, mark: Any) -> None:
        """What is asked for next in this stream begins after ``mark``."""

    def finish(self) -> None:
        """Return when everything asked for in this stream has been done."""


class CpuDevice:
    """The twin: the same steps in memory, each done when it is asked for. For tests of the staged way."""

    def staging(self, size_bytes: int) -> Any:
        import torch

        return torch.empty(size_bytes, dtype=torch.uint8)

    def after_engine(self) -> Any:
        return None

    @contextmanager
    def stream(self) -> Iterator[None]:
        yield

    def wait_for(self, mark: Any) -> None:
        del mark

    def finish(self) -> None:
        return


class CudaDevice:
    """A CUDA device (or one that torch drives in the same way)."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._streams = threading.local()

    def staging(self, size_bytes: int) -> Any:
        import torch

        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)

    def after_engine(self) -> Any:
        import torch

        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _own(self) -> Any:
        import torch

        if not hasattr(self._streams, "stream"):
            self._streams.stream = torch.cuda.Stream(self._device)
        return self._streams.stream

    def stream(self) -> Any:
        import torch

        return torch.cuda.stream(self._own())

    def wait_for(self, mark: Any) -> None:
        if mark is not None:
            self._own().wait_event(mark)

    def finish(self) -> None:
        import torch

        event = torch.cuda.Event()
        event.record(self._own())
        event.synchronize()


class Staged(Copies):
    """Through pinned memory, ``local_cache_bytes`` of it at most, in slots of one chunk each.

    A batch takes at most a quarter of the slots, so that loads and stores do not keep each other out.
    """

    def __init__(self, pages: Pages, blocks_per_chunk: int, local_cache_bytes: int, device: Device) -> None:
        self._per_chunk = blocks_per_chunk
        self._planes = [_as_rows(plane) for plane in pages.planes]
        self._chunk_bytes = pages.block_bytes * blocks_per_chunk
        self._slots = max(local_cache_bytes // self._chunk_bytes, 1)
        self._device = device
        self._torch_device = pages.device
        self._arena = device.staging(self._slots * self._chunk_bytes).view(self._slots, self._chunk_bytes)
        self._memory = _memory_of(self._arena)
        self._free = list(range(self._slots))
        self._changed = threading.Condition()
        self.mark: Any = None  # behind what the engine last asked for

    def batch(self, chunks: int) -> int:
        return min(chunks, max(self._slots // 4, 1))

    def follow_engine(self) -> None:
        """Copies that begin from now on come after what the engine has asked for."""
        self.mark = self._device.after_engine()

    @contextmanager
    def reading(self, chunks: Sequence[Chunk], deadline: float) -> Iterator[list[Views]]:
        with self._take(len(chunks), deadline) as slots:
            with self._device.stream():
                self._device.wait_for(self.mark)
                for blocks, slot in zip(chunks, slots, strict=True):
                    rows = self._index(blocks)
                    start = 0
                    for plane, size in self._planes:
                        end = start + size * self._per_chunk
                        self._arena[slot, start:end].copy_(plane.index_select(0, rows).view(-1), non_blocking=True)
                        start = end
                self._device.finish()
            yield [self._slot_views(slot) for slot in slots]

    @contextmanager
    def writing(self, chunks: Sequence[Chunk], deadline: float) -> Iterator[Arrivals]:
        with self._take(len(chunks), deadline) as slots:
            yield _Staging(self, chunks, slots)

    def put(self, blocks: Chunk, slot: int) -> None:
        """Copy a slot to the device's blocks; begun when this returns."""
        places = [place for place, block in enumerate(blocks) if block != SCRATCH]
        rows = self._index([blocks[place] for place in places])
        start = 0
        for plane, size in self._planes:
            end = start + size * self._per_chunk
            staged = self._arena[slot, start:end].view(self._per_chunk, size)
            if len(places) < self._per_chunk:
                staged = staged[places[0] : places[-1] + 1]
            plane.index_copy_(0, rows, staged.to(plane.device, non_blocking=True))
            start = end

    def finish(self, chunks: Sequence[Chunk], slots: Sequence[int]) -> None:
        """Copy slots to the device and wait until they are there."""
        with self._device.stream():
            self._device.wait_for(self.mark)
            for blocks, slot in zip(chunks, slots, strict=False):
                self.put(blocks, slot)
            self._device.finish()

    def views_of(self, slots: Sequence[int]) -> list[Views]:
        """The slots' memory."""
        return [self._slot_views(slot) for slot in slots]

    def _slot_views(self, slot: int) -> Views:
        return [self._memory[slot * self._chunk_bytes : (slot + 1) * self._chunk_bytes]]

    def _index(self, blocks: Chunk) -> Any:
        import torch

        return torch.tensor(list(blocks), dtype=torch.int64, device=self._torch_device)

    @contextmanager
    def _take(self, count: int, deadline: float) -> Iterator[list[int]]:
        with self._changed:
            while len(self._free) < count:
                if not self._changed.wait(max(deadline - time.monotonic(), 0)) and time.monotonic() >= deadline:
                    raise DeadlineExceeded("no staging memory came free in time: raise local_cache_bytes")
            slots = [self._free.pop() for _ in range(count)]
        try:
            yield slots
        finally:
            with self._changed:
                self._free += slots
                self._changed.notify_all()


class _Staging(Arrivals):
    def __init__(self, copies: Staged, chunks: Sequence[Chunk], slots: Sequence[int]) -> None:
        self._copies = copies
        self._chunks = chunks
        self._slots = slots
        self.views = copies.views_of(slots)

    def arrived(self, count: int) -> None:
        self._copies.finish(self._chunks[:count], self._slots[:count])


def choose(pages: Pages, blocks_per_chunk: int, local_cache_bytes: int) -> Copies:
    """The way for the device that the KV caches are on."""
    if pages.device.type == "cpu":
        return Direct(pages, blocks_per_chunk)
    return Staged(pages, blocks_per_chunk, local_cache_bytes, CudaDevice(pages.device))


def _as_rows(plane: Any) -> tuple[Any, int]:
    """A plane as rows of bytes, one a block, and the bytes in a row."""
    import torch

    storage = plane.tensor.untyped_storage()
    offset = plane.tensor.data_ptr() - storage.data_ptr() + plane.offset_bytes
    blocks = (storage.nbytes() - offset - plane.size_bytes) // plane.stride_bytes + 1
    rows = torch.empty(0, dtype=torch.uint8, device=plane.tensor.device)
    rows.set_(storage, offset, (blocks, plane.size_bytes), (plane.stride_bytes, 1))
    return rows, plane.size_bytes


def _memory_of(arena: Any) -> memoryview:
    block = (ctypes.c_ubyte * arena.numel()).from_address(arena.data_ptr())
    block.owner = arena
    return memoryview(block).cast("B")
