"""Shared memory on the same host: the slab server hands out its memory, and the client copies by itself.

One-sided: ``preadv``/``pwritev`` on the descriptor, one copy, no work on the server. A mapping would copy under
Python's global lock and turn a truncated file into a signal; the system calls do neither. Only hugetlbfs, which has no
``write``, is mapped for writes.
"""

from __future__ import annotations

import array
import mmap
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import xxhash

from polarkv_client import errors, layout
from polarkv_client.buffers import pieces
from polarkv_client.keys import short
from polarkv_client.protocol import wire
from polarkv_client.protocol.messages import NodeInfo, Op, SlabAttach, SlabAttached
from polarkv_client.transport.base import HeldGrant, Pick, Scope, Transport, verify

Part = bytes | bytearray | memoryview
PIECE_BYTES = 1 << 20  # hashed right after it was copied, from the last-level cache; less costs calls and gains nothing


class ShmTransport(Transport):
    """See :class:`Transport`. The descriptor is of one incarnation; another one gets another transport."""

    name = "shm"
    parts_a_thread = 4

    def __init__(self, node: NodeInfo, copy_threads: int, connect_timeout_s: float) -> None:
        super().__init__(node, copy_threads)
        self._connect_timeout_s = connect_timeout_s
        self._lock = threading.Lock()
        self._descriptor = -1
        self._memory_bytes = 0
        self._mapping: mmap.mmap | None = None  # where the file system has no write
        self._connection: wire.Connection | None = None  # stays open: its end is the slab server's
        self._users = 0
        self._closed = False

    def reach(self, grant: HeldGrant, scope: Scope) -> None:
        self.expect_life(grant)
        if self._descriptor >= 0:
            return
        deadline = min(scope.deadline, time.monotonic() + self._connect_timeout_s)
        with ExitStack() as undo:
            connection = wire.Connection.open(self.node.shm, deadline)
            undo.callback(connection.close)
            descriptor, attached = _attach(connection, grant.signed, deadline)
            undo.callback(os.close, descriptor)
            if attached.incarnation != grant.body.incarnation:
                raise errors.Refused(
                    f"{self.node.name} is in incarnation {attached.incarnation}, not {grant.body.incarnation}"
                )
            mapping = None if _can_write(descriptor) else _map(descriptor, attached.memory_bytes)
            if mapping is not None:
                undo.callback(mapping.close)
            with self._lock:
                if self._closed:
                    raise errors.Unavailable(f"the transport to {self.node.name} is closed")
                if self._descriptor < 0:  # else another thread was faster
                    self._connection, self._mapping = connection, mapping
                    self._memory_bytes = attached.memory_bytes
                    self._descriptor = descriptor
                    undo.pop_all()

    def read(self, grant: HeldGrant, picks: Sequence[Pick], scope: Scope) -> list[errors.PolarKVError | None]:
        self._expect_within(grant, picks)
        results: list[errors.PolarKVError | None] = []
        header = bytearray(layout.HEADER_BYTES)
        try:
            with self._use() as descriptor:
                for pick in picks:
                    digest = _read_one(descriptor, pick, header, scope)
                    results.append(verify(pick.extent, header, digest))
        except errors.PolarKVError as error:
            results += [error] * (len(picks) - len(results))
        return results

    def write(self, grant: HeldGrant, picks: Sequence[Pick], scope: Scope) -> list[int]:
        self._expect_within(grant, picks)
        with self._use() as descriptor:
            put = partial(os.pwritev, descriptor) if self._mapping is None else partial(_put_mapped, self._mapping)
            return [_write_one(put, pick, grant.body.tenant, scope) for pick in picks]

    def _expect_within(self, grant: HeldGrant, picks: Sequence[Pick]) -> None:
        """Nobody checks what this side does: a write beyond the end would make the node's memory grow."""
        self.expect_life(grant)
        for pick in picks:
            extent = pick.extent
            end = extent.offset_bytes + layout.stride_bytes(extent.length_bytes)
            if extent.offset_bytes < 0 or end > self._memory_bytes:
                raise errors.Refused(f"an extent at {extent.offset_bytes} lies outside the memory of {self.node.name}")

    def peer_gone(self) -> bool:
        with self._lock:
            if self._connection is None:
                return False
            poll = select.poll()
            poll.register(self._connection.sock, select.POLLIN | select.POLLRDHUP)
            return bool(poll.poll(0))  # it says nothing unasked: whatever there is to read is the end

    def ended_cleanly(self, error: BaseException) -> bool:
        return True  # this side makes the copies: when the call returns, they are over

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._close_unused()

    @contextmanager
    def _use(self) -> Iterator[int]:
        """The descriptor, which stays open (and so its number another file's) until the last user has left."""
        with self._lock:
            if self._closed or self._descriptor < 0:
                raise errors.Unavailable(f"the memory of {self.node.name} is not attached")
            self._users += 1
        try:
            yield self._descriptor
        except OSError as error:
            raise errors.Unavailable(f"the memory of {self.node.name}: {error}") from error
        finally:
            with self._lock:
                self._users -= 1
                if self._closed:
                    self._close_unused()

    def _close_unused(self) -> None:
        if not self._users and self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            if self._mapping is not None:
                self._mapping.close()
            if self._connection is not None:
                self._connection.close()
                self._connection = None


def _read_one(descriptor: int, pick: Pick, header: bytearray, scope: Scope) -> xxhash.xxh3_64:
    """Header and payload of one extent; the checksum of the payload."""
    digest = xxhash.xxh3_64()
    offset = pick.extent.offset_bytes
    first: list[Part] = [header]  # the header comes with the first piece, in one call
    for piece in pieces(pick.views, PIECE_BYTES):
        scope.check()
        vector = [*first, *piece]
        size = sum(map(len, vector))
        if os.preadv(descriptor, vector, offset) != size:
            raise errors.Damaged(f"{short(pick.extent.key)}: lies beyond the end of the node's memory")
        offset += size
        first = []
        for part in piece:
            digest.update(part)
    return digest


def _write_one(put: Callable[[Sequence[Part], int], int], pick: Pick, tenant: int, scope: Scope) -> int:
    """Erase the header, write the payload, then the header: nobody ever meets half a chunk under a valid one."""
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
    # The slot's last bytes go to disk with it: they must not be those of its previous owner.
    rest = extent.offset_bytes + layout.stride_bytes(extent.length_bytes) - offset
    if rest:
        put([bytes(rest)], offset)
    header = layout.Header(extent.key, extent.length_bytes, checksum, tenant)
    put([layout.pack_header(header)], extent.offset_bytes)
    return checksum


def _can_write(descriptor: int) -> bool:
    try:
        os.pwritev(descriptor, [b""], 0)
    except OSError:
        return False
    return True


def _map(descriptor: int, size_bytes: int) -> mmap.mmap:
    try:
        return mmap.mmap(descriptor, size_bytes)
    except (OSError, ValueError) as error:
        raise errors.Unavailable(f"the node's memory cannot be mapped: {error}") from error


def _put_mapped(mapping: mmap.mmap, vector: Sequence[Part], offset: int) -> int:
    """As ``pwritev``, on a mapping."""
    start = offset
    for part in vector:
        mapping[offset : offset + len(part)] = part
        offset += len(part)
    return offset - start


def _attach(connection: wire.Connection, signed: bytes, deadline: float) -> tuple[int, SlabAttached]:
    """Show the grant, get the descriptor. It comes with the first byte of the answer."""
    connection.send(wire.encode_frame(Op.SLAB_ATTACH, 1, SlabAttach(grant=signed)), deadline)
    descriptors: list[int] = []
    data = b""
    needed = wire.HEAD.size
    try:
        while len(data) < needed:
            chunk, ancillary = _receive(connection.sock, deadline)
            descriptors += ancillary
            if not chunk:
                raise errors.Unavailable("the slab server closed the connection")
            data += chunk
            if len(data) >= wire.HEAD.size:
                needed = wire.HEAD.size + wire.decode_head(data[: wire.HEAD.size])[2]
        op, request_id, _, status = wire.decode_head(data[: wire.HEAD.size])
        frame = wire.Frame(op, request_id, status, data[wire.HEAD.size :])
        wire.raise_failure(frame)
        attached = wire.decode_body(frame.body, SlabAttached)
        if len(descriptors) != 1:
            raise errors.ProtocolError(f"the slab server sent {len(descriptors)} descriptors, not one")
        return descriptors.pop(), attached
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _receive(sock: socket.socket, deadline: float) -> tuple[bytes, list[int]]:
    left = deadline - time.monotonic()
    if left <= 0:
        raise errors.DeadlineExceeded("the slab server did not hand out its memory in time")
    sock.settimeout(left)
    descriptors = array.array("i")
    try:
        # CLOEXEC by the kernel: between a receive and an fcntl another thread could fork.
        chunk, ancillary, _, _ = sock.recvmsg(
            65536, socket.CMSG_SPACE(4 * descriptors.itemsize), socket.MSG_CMSG_CLOEXEC
        )
    except TimeoutError as error:
        raise errors.DeadlineExceeded("the slab server did not hand out its memory in time") from error
    except OSError as error:
        raise errors.Unavailable(f"the slab server's connection broke: {error}") from error
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(payload[: len(payload) - len(payload) % descriptors.itemsize])
    return chunk, list(descriptors)
