"""Reads and writes of whole chunks over a lane, as a pipeline of bounded depth.

A read: the header into the lane's memory, the payload into the caller's buffers where those are registered, else
through blocks of the lane's. The bytes are hashed as they come, while the next ones are under way.

A write: zeros over the old header and over the rest of the slot's last 4 KiB, then the payload, in this order on one
queue pair, which the other device keeps; when the last of that has completed, the new header. At the end of a call the
last header is read back. A read is answered after everything that was written before it on its queue pair lies in the
node's memory, also by devices that complete a write when they have sent it.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from typing import ClassVar

import xxhash

from polarkv_client import errors, layout
from polarkv_client.buffers import Views, address_of
from polarkv_client.keys import short
from polarkv_client.transport.base import Pick, Scope, verify
from polarkv_client.transport.verbs.lane import BLOCK_BYTES, HEADERS, NEVER, Lane
from polarkv_client.transport.verbs.registrations import Registered
from polarkv_client.transport.verbs.seam import Opcode, Work

PIECE_BYTES = 1 << 20


class Chunk:
    """A chunk under way."""

    __slots__ = ("digest", "pick", "registered", "slot")

    def __init__(self, pick: Pick, slot: int) -> None:
        self.pick = pick
        self.slot = slot
        self.digest = xxhash.xxh3_64()
        self.registered: list[Registered] = []


class Piece:
    """A part of a chunk's payload, or (without views) its header. ``at_bytes`` counts from the payload's start."""

    __slots__ = ("at_bytes", "block", "chunk", "first", "last", "lkey", "size_bytes", "views", "works")

    def __init__(self, chunk: Chunk, at_bytes: int, views: Views, size_bytes: int, lkey: int, first: bool) -> None:
        self.chunk = chunk
        self.at_bytes = at_bytes
        self.views = views
        self.size_bytes = size_bytes
        self.lkey = lkey  # of the caller's registered buffer; 0: through a block
        self.first = first
        self.last = at_bytes + size_bytes == chunk.pick.extent.length_bytes
        self.block = -1
        self.works = 6 if first else 2  # at most, wherever registrations of the node's memory end


class _Move:
    writes_views: ClassVar[bool]

    def __init__(self, lane: Lane[Piece], picks: Sequence[Pick], scope: Scope) -> None:
        self.lane = lane
        self.scope = scope
        self._open: set[Chunk] = set()
        self._slots = list(range(HEADERS))
        self._pieces = self._cut(picks)

    def _cut(self, picks: Sequence[Pick]) -> Generator[Piece | None, None, None]:
        """All pieces, in order; None when no more chunk may be begun before another one ends."""
        for pick in picks:
            while not self._slots:
                yield None
            chunk = Chunk(pick, self._slots.pop())
            self._open.add(chunk)
            copied: Views = []  # a run of parts that go through one block
            at_bytes = copied_bytes = 0
            for view in pick.views:
                registered = self.lane.device.registrations.use(view, writable=self.writes_views)
                if registered is not None:
                    chunk.registered.append(registered)
                    if copied:
                        yield Piece(chunk, at_bytes, copied, copied_bytes, 0, not at_bytes)
                        at_bytes, copied, copied_bytes = at_bytes + copied_bytes, [], 0
                step = PIECE_BYTES if registered is not None else BLOCK_BYTES
                start = 0
                while start < view.nbytes:
                    part = view[start : start + step - copied_bytes]
                    start += part.nbytes
                    if registered is not None:
                        yield Piece(chunk, at_bytes, [part], part.nbytes, registered.region.lkey, not at_bytes)
                        at_bytes += part.nbytes
                        continue
                    copied.append(part)
                    copied_bytes += part.nbytes
                    if copied_bytes == BLOCK_BYTES:
                        yield Piece(chunk, at_bytes, copied, copied_bytes, 0, not at_bytes)
                        at_bytes, copied, copied_bytes = at_bytes + copied_bytes, [], 0
            if copied:
                yield Piece(chunk, at_bytes, copied, copied_bytes, 0, not at_bytes)

    def _fits(self, piece: Piece) -> bool:
        return self.lane.has_room(piece) and bool(piece.lkey or self.lane.free_blocks)

    def _local(self, piece: Piece) -> int:
        """Where the piece's bytes are, or come to lie, in registered memory."""
        if piece.lkey:
            return address_of(piece.views[0])
        piece.block = self.lane.free_blocks.pop()
        return self.lane.block_address(piece.block)

    def _ended(self, chunk: Chunk) -> None:
        self._open.discard(chunk)
        self._slots.append(chunk.slot)
        for registered in chunk.registered:
            self.lane.device.registrations.done(registered)

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """While the body runs a cancellation wakes the lane. After an error the lane is closed: nothing moves."""
        lane, wake = self.lane, self.lane.wake
        # The lane may be the device's last user: registrations in use here must be given back before it is closed.
        with lane.device.kept():
            self.scope.on_cancel(wake)
            try:
                yield
            except BaseException:
                lane.close()
                raise
            finally:
                self.scope.forget(wake)
                self._pieces.close()  # its frame and this object hold each other
                for chunk in list(self._open):
                    self._ended(chunk)


class Read(_Move):
    """Reads picks into their views; ``results`` grows by one a pick, in order: None, or the damage."""

    writes_views = True

    def __init__(self, lane: Lane[Piece], picks: Sequence[Pick], scope: Scope) -> None:
        super().__init__(lane, picks, scope)
        self.results: list[errors.PolarKVError | None] = []

    def run(self) -> None:
        """Move all of them.

        Raises:
            Unavailable, DeadlineExceeded, LeaseEnded, Cancelled: the lane is closed; what has no result has failed.
        """
        lane = self.lane
        with self._guarded():
            self.scope.check()
            piece = next(self._pieces, None)
            while True:
                batch: list[Work] = []
                while piece is not None and self._fits(piece):
                    batch += self._begin(piece)
                    piece = next(self._pieces, None)
                if batch:
                    self.scope.check()
                    lane.post(batch)
                if not lane.busy:
                    return
                for done in lane.finished(self.scope):
                    self._finish(done)
                if piece is None:
                    piece = next(self._pieces, None)

    def _begin(self, piece: Piece) -> list[Work]:
        lane, extent = self.lane, piece.chunk.pick.extent
        works = []
        if piece.first:
            works = lane.works(
                Opcode.READ, lane.header_address(piece.chunk.slot), 0, extent.offset_bytes, layout.HEADER_BYTES
            )
        offset = extent.offset_bytes + layout.HEADER_BYTES + piece.at_bytes
        works += lane.works(Opcode.READ, self._local(piece), piece.lkey, offset, piece.size_bytes)
        return lane.sign(works, piece)

    def _finish(self, piece: Piece) -> None:
        chunk = piece.chunk
        if piece.block >= 0:
            block, start = self.lane.block(piece.block, piece.size_bytes), 0
            for view in piece.views:
                view[:] = block[start : start + view.nbytes]
                start += view.nbytes
            self.lane.free_blocks.append(piece.block)
        for view in piece.views:
            chunk.digest.update(view)
        if piece.last:
            header = bytes(self.lane.header(chunk.slot))
            self.results.append(verify(chunk.pick.extent, header, chunk.digest.intdigest()))
            self._ended(chunk)


class Write(_Move):
    """Writes picks from their views; ``checksums`` of the payloads, in order."""

    writes_views = False

    def __init__(self, lane: Lane[Piece], picks: Sequence[Pick], tenant: int, scope: Scope) -> None:
        super().__init__(lane, picks, scope)
        self.checksums: list[int] = []
        self._tenant = tenant
        self._headers: deque[Piece] = deque()  # of chunks whose payload has arrived
        self._last: Piece | None = None

    def run(self) -> None:
        """Move all of them.

        Raises:
            Unavailable, DeadlineExceeded, LeaseEnded, Cancelled: the lane is closed; no pick counts as written.
        """
        lane = self.lane
        # Before the first look at the time: a renewal of the session that does not see this write was made before it,
        # and this write then sees by itself whether its ticket has ended.
        lane.write_until = self.scope.deadline
        with self._guarded():
            self.scope.check()
            piece = next(self._pieces, None)
            while True:
                batch: list[Work] = []
                begun: list[Piece] = []
                while self._headers and lane.has_room(self._headers[0]):
                    batch += self._begin_header(self._headers.popleft())
                while piece is not None and self._fits(piece):
                    batch += self._begin(piece)
                    begun.append(piece)
                    piece = next(self._pieces, None)
                if batch:
                    self.scope.check()
                    lane.post(batch)
                for started in begun:  # while the device is at work
                    self._hash(started)
                if not lane.busy and not self._headers:
                    break
                for done in lane.finished(self.scope) if lane.busy else ():
                    self._finish(done)
                if piece is None:
                    piece = next(self._pieces, None)
            self._prove()
        lane.write_until = NEVER

    def _begin(self, piece: Piece) -> list[Work]:
        lane, extent = self.lane, piece.chunk.pick.extent
        works = []
        if piece.first:
            works = lane.works(Opcode.WRITE, lane.zeros_address, 0, extent.offset_bytes, layout.HEADER_BYTES)
            end = extent.offset_bytes + layout.HEADER_BYTES + extent.length_bytes
            # The slot's last bytes go to disk with it: they must not be those of its previous owner.
            rest = extent.offset_bytes + layout.stride_bytes(extent.length_bytes) - end
            if rest:
                works += lane.works(Opcode.WRITE, lane.zeros_address, 0, end, rest)
        address = self._local(piece)
        if piece.block >= 0:
            block, start = lane.block(piece.block, piece.size_bytes), 0
            for view in piece.views:
                block[start : start + view.nbytes] = view
                start += view.nbytes
        offset = extent.offset_bytes + layout.HEADER_BYTES + piece.at_bytes
        works += lane.works(Opcode.WRITE, address, piece.lkey, offset, piece.size_bytes)
        return lane.sign(works, piece)

    def _hash(self, piece: Piece) -> None:
        if piece.block >= 0:
            piece.chunk.digest.update(self.lane.block(piece.block, piece.size_bytes))
            return
        for view in piece.views:
            piece.chunk.digest.update(view)

    def _begin_header(self, piece: Piece) -> list[Work]:
        lane, chunk = self.lane, piece.chunk
        extent = chunk.pick.extent
        checksum = chunk.digest.intdigest()
        header = layout.pack_header(layout.Header(extent.key, extent.length_bytes, checksum, self._tenant))
        lane.header(chunk.slot)[:] = header
        self.checksums.append(checksum)
        self._last = piece
        works = lane.works(Opcode.WRITE, lane.header_address(chunk.slot), 0, extent.offset_bytes, layout.HEADER_BYTES)
        return lane.sign(works, piece)

    def _finish(self, piece: Piece) -> None:
        if not piece.views:
            self._ended(piece.chunk)
            return
        if piece.block >= 0:
            self.lane.free_blocks.append(piece.block)
        if piece.last:  # all before it have completed too: they are of one queue pair
            self._headers.append(Piece(piece.chunk, piece.at_bytes, [], layout.HEADER_BYTES, 0, False))

    def _prove(self) -> None:
        """Read the last header back: everything lies in the node's memory, and may be read over any other way."""
        if self._last is None:
            return
        lane, chunk = self.lane, self._last.chunk
        header = bytes(lane.header(chunk.slot))
        lane.header(chunk.slot)[:] = layout.ERASED
        offset = chunk.pick.extent.offset_bytes
        works = lane.works(Opcode.READ, lane.header_address(chunk.slot), 0, offset, layout.HEADER_BYTES)
        self.scope.check()
        lane.post(lane.sign(works, self._last))
        lane.finished(self.scope)
        if lane.header(chunk.slot) != header:
            raise errors.Unavailable(f"{short(chunk.pick.extent.key)}: what was written is not in the node's memory")
