"""How a same-host client copies between its buffers and a node's memory, of which it holds a descriptor.

``Calls``: ``preadv``/``pwritev`` on the descriptor. They cannot fail in other ways than by an error.
``Mapped``: through a mapping, with the compiled half of this package, which copies and checks in one pass and writes
past the caches. Touching a mapping where the file has no memory could kill the process where a system call would
return an error, so it is used only where memory is known to be; the rest, and short chunks, go by ``Calls``.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import xxhash

from polarkv_client import errors, layout, native
from polarkv_client.buffers import pieces
from polarkv_client.keys import short
from polarkv_client.transport.base import PIECE_BYTES, Pick, Scope

CALL_BYTES = 4 * PIECE_BYTES  # half a millisecond: a deadline or cancellation is not looked at in between
Part = bytes | bytearray | memoryview
Put = Callable[[Sequence[Part], int], int]


class Copies(ABC):
    """Copies of whole chunks. Several threads may call at once. The caller has checked that extents lie inside."""

    @abstractmethod
    def read(self, pick: Pick, header: bytearray, scope: Scope) -> int:
        """Header and payload of one extent into ``header`` and the pick's views; the checksum of what was copied.

        Raises:
            Damaged: the memory ends before the extent. DeadlineExceeded, LeaseEnded, Cancelled, OSError.
        """

    @abstractmethod
    def write(self, pick: Pick, tenant: int, scope: Scope) -> int:
        """Erase the header, write the payload, then the header: nobody ever meets half a chunk under a valid one.

        Returns the payload's checksum.

        Raises:
            Unavailable: the memory took only a part. DeadlineExceeded, LeaseEnded, Cancelled, OSError.
        """

    def read_each(self, picks: Sequence[Pick], scope: Scope) -> Iterator[tuple[bytearray, int]]:
        """As :meth:`read` for one after the other: header and checksum of each. Raises where it cannot go on."""
        for pick in picks:
            header = bytearray(layout.HEADER_BYTES)
            yield header, self.read(pick, header, scope)

    def write_all(self, picks: Sequence[Pick], tenant: int, scope: Scope) -> list[int]:
        """As :meth:`write` for one after the other: their checksums."""
        return [self.write(pick, tenant, scope) for pick in picks]

    @abstractmethod
    def close(self) -> None:
        """Give up what it holds beside the descriptor. Nobody copies any more."""


def choose(descriptor: int, memory_bytes: int, how: str) -> Copies:
    """The fastest way that there is for this memory; by system calls when ``how`` is "calls".

    Raises:
        Unavailable: the descriptor is not of so much memory, or cannot be mapped.
    """
    size_bytes = os.fstat(descriptor).st_size
    if size_bytes < memory_bytes:
        raise errors.Unavailable(f"the slab server handed out {size_bytes} bytes of memory, not {memory_bytes}")
    try:
        calls = Calls(descriptor, memory_bytes)
        return calls if how == "calls" or native.compiled is None else Mapped(descriptor, memory_bytes, calls)
    except OSError as error:
        raise errors.Unavailable(f"the slab server's memory cannot be mapped: {error}") from error


class Calls(Copies):
    """By system calls, one copy. Only hugetlbfs, which has no ``write``, is mapped for writes."""

    def __init__(self, descriptor: int, memory_bytes: int) -> None:
        self._descriptor = descriptor
        self._mapping: mmap.mmap | None = None
        if not _can_write(descriptor):
            self._mapping = mmap.mmap(descriptor, memory_bytes)

    def read(self, pick: Pick, header: bytearray, scope: Scope) -> int:
        digest = xxhash.xxh3_64()
        offset = pick.extent.offset_bytes
        first: list[Part] = [header]  # the header comes with the first piece, in one call
        for piece in pieces(pick.views, PIECE_BYTES):
            scope.check()
            vector = [*first, *piece]
            size = sum(map(len, vector))
            if os.preadv(self._descriptor, vector, offset) != size:
                raise errors.Damaged(f"{short(pick.extent.key)}: lies beyond the end of the node's memory")
            offset += size
            first = []
            for part in piece:
                digest.update(part)
        return digest.intdigest()

    def write(self, pick: Pick, tenant: int, scope: Scope) -> int:
        put: Put = (
            partial(os.pwritev, self._descriptor) if self._mapping is None else partial(_put_mapped, self._mapping)
        )
        digest = xxhash.xxh3_64()
        extent = pick.extent
        offset = extent.offset_bytes
        first: list[Part] = [layout.ERASED]  # a vector is copied in order
        for piece in pieces(pick.views, PIECE_BYTES):
            scope.check()
            vector = [*first, *piece]
            size = sum(map(len, vector))
            if put(vector, offset) != size:
                raise errors.Unavailable(f"{short(extent.key)}: the node's memory took only a part")
            for part in piece:
                digest.update(part)
            offset += size
            first = []
        checksum = digest.intdigest()
        scope.check()
        _finish(put, pick, checksum, tenant)
        return checksum

    def close(self) -> None:
        if self._mapping is not None:
            self._mapping.close()


class Mapped(Copies):
    """Through a mapping, where the file has memory; by ``calls`` elsewhere.

    Chunks of up to :data:`CALL_BYTES` go whole, and so many to a call: copying threads take turns at the interpreter's
    lock between their calls, and each turn is a wake-up. Longer ones go by themselves, a piece to a call.
    """

    def __init__(self, descriptor: int, memory_bytes: int, calls: Calls) -> None:
        self._descriptor = descriptor
        self._calls = calls
        self._memory_bytes = memory_bytes
        self._mapping = mmap.mmap(descriptor, memory_bytes)
        self._view = memoryview(self._mapping)
        anchor = ctypes.c_char.from_buffer(self._mapping)
        self._address = ctypes.addressof(anchor)
        self._put: Put = partial(_put_mapped, self._mapping)
        self._lock = threading.Lock()
        self._backed_bytes = 0  # up to here the file was seen to have memory; it is never taken away again

    def read(self, pick: Pick, header: bytearray, scope: Scope) -> int:
        if not self._mapped(pick):
            return self._calls.read(pick, header, scope)
        offset = pick.extent.offset_bytes
        header[:] = self._view[offset : offset + layout.HEADER_BYTES]
        offset += layout.HEADER_BYTES
        move = native.Move(pick.extent.length_bytes)
        for piece in pieces(pick.views, PIECE_BYTES):
            scope.check()
            move.scatter(self._address + offset, piece)
            offset += sum(map(len, piece))
        return move.checksum()

    def write(self, pick: Pick, tenant: int, scope: Scope) -> int:
        if not self._mapped(pick):
            return self._calls.write(pick, tenant, scope)
        offset = pick.extent.offset_bytes
        scope.check()
        self._put([layout.ERASED], offset)
        offset += layout.HEADER_BYTES
        move = native.Move(pick.extent.length_bytes)
        for piece in pieces(pick.views, PIECE_BYTES):
            scope.check()
            move.gather(piece, self._address + offset)
            offset += sum(map(len, piece))
        checksum = move.checksum()
        scope.check()
        _finish(self._put, pick, checksum, tenant)
        return checksum

    def read_each(self, picks: Sequence[Pick], scope: Scope) -> Iterator[tuple[bytearray, int]]:
        for whole, run in self._runs(picks):
            if not whole:
                yield from super().read_each(run, scope)
                continue
            scope.check()
            headers = []
            for pick in run:
                offset = pick.extent.offset_bytes
                headers.append(bytearray(self._view[offset : offset + layout.HEADER_BYTES]))
            yield from zip(headers, native.scatter_all(self._payloads(run)), strict=True)

    def write_all(self, picks: Sequence[Pick], tenant: int, scope: Scope) -> list[int]:
        checksums: list[int] = []
        for whole, run in self._runs(picks):
            if not whole:
                checksums += super().write_all(run, tenant, scope)
                continue
            scope.check()
            for pick in run:
                self._put([layout.ERASED], pick.extent.offset_bytes)
            found = native.gather_all(self._payloads(run))
            for pick, checksum in zip(run, found, strict=True):
                scope.check()
                _finish(self._put, pick, checksum, tenant)
            checksums += found
        return checksums

    def _runs(self, picks: Sequence[Pick]) -> Iterator[tuple[bool, list[Pick]]]:
        """The picks in order: (True, those that go whole in one call), or (False, one that does not)."""
        run: list[Pick] = []
        room = CALL_BYTES
        for pick in picks:
            length = pick.extent.length_bytes
            whole = length <= CALL_BYTES and self._mapped(pick)
            if run and (not whole or length > room):
                yield True, run
                run, room = [], CALL_BYTES
            if whole:
                run.append(pick)
                room -= length
            else:
                yield False, [pick]
        if run:
            yield True, run

    def _payloads(self, run: Sequence[Pick]) -> list[native.Payload]:
        start = self._address + layout.HEADER_BYTES
        return [(start + pick.extent.offset_bytes, pick.extent.length_bytes, pick.views) for pick in run]

    def close(self) -> None:
        self._calls.close()
        self._view.release()
        self._mapping.close()

    def _mapped(self, pick: Pick) -> bool:
        """Whether to go through the mapping. The node gives its memory pages from the start on, in the background."""
        if pick.extent.length_bytes < native.LEAST_BYTES:
            return False
        end = pick.extent.offset_bytes + layout.stride_bytes(pick.extent.length_bytes)
        if end <= self._backed_bytes:
            return True
        with self._lock:
            if self._backed_bytes < self._memory_bytes:
                # Where the file system knows of no holes (hugetlbfs, reserved when mapped) this is the file's end.
                self._backed_bytes = os.lseek(self._descriptor, self._backed_bytes, os.SEEK_HOLE)
            return end <= self._backed_bytes


def _finish(put: Put, pick: Pick, checksum: int, tenant: int) -> None:
    """Zeros behind the payload, then the header."""
    extent = pick.extent
    end = extent.offset_bytes + layout.HEADER_BYTES + extent.length_bytes
    # The slot's last bytes go to disk with it: they must not be those of its previous owner.
    rest = extent.offset_bytes + layout.stride_bytes(extent.length_bytes) - end
    if rest:
        put([bytes(rest)], end)
    header = layout.Header(extent.key, extent.length_bytes, checksum, tenant)
    put([layout.pack_header(header)], extent.offset_bytes)


def _can_write(descriptor: int) -> bool:
    try:
        os.pwritev(descriptor, [b""], 0)
    except OSError:
        return False
    return True


def _put_mapped(mapping: mmap.mmap, vector: Sequence[Part], offset: int) -> int:
    """As ``pwritev``, on a mapping."""
    start = offset
    for part in vector:
        mapping[offset : offset + len(part)] = part
        offset += len(part)
    return offset - start
