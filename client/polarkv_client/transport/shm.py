"""Shared memory on the same host: the slab server hands out its memory, and the client copies by itself.

One-sided: one copy, no work on the server. How it copies is said in ``copies.py``.
"""

from __future__ import annotations

import array
import os
import select
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from polarkv_client import errors
from polarkv_client.protocol import wire
from polarkv_client.protocol.messages import NodeInfo, Op, SlabAttach, SlabAttached
from polarkv_client.transport import copies
from polarkv_client.transport.base import HeldGrant, Pick, Scope, Transport, verify


class ShmTransport(Transport):
    """See :class:`Transport`. The descriptor is of one incarnation; another one gets another transport."""

    name = "shm"
    parts_a_thread = 4

    def __init__(self, node: NodeInfo, copy_threads: int, connect_timeout_s: float, how: str = "auto") -> None:
        super().__init__(node, copy_threads)
        self._how = how
        self._connect_timeout_s = connect_timeout_s
        self._lock = threading.Lock()
        self._descriptor = -1
        self._memory_bytes = 0
        self._copies: copies.Copies | None = None
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
            ways = copies.choose(descriptor, attached.memory_bytes, self._how)
            undo.callback(ways.close)
            with self._lock:
                if self._closed:
                    raise errors.Unavailable(f"the transport to {self.node.name} is closed")
                if self._descriptor < 0:  # else another thread was faster
                    self._connection, self._copies = connection, ways
                    self._memory_bytes = attached.memory_bytes
                    self._descriptor = descriptor
                    undo.pop_all()

    def read(self, grant: HeldGrant, picks: Sequence[Pick], scope: Scope) -> list[errors.PolarKVError | None]:
        self._check(grant, picks)
        results: list[errors.PolarKVError | None] = []
        try:
            with self._use() as ways:
                for pick, (header, checksum) in zip(picks, ways.read_each(picks, scope), strict=True):
                    results.append(verify(pick.extent, header, checksum))
        except errors.PolarKVError as error:
            results += [error] * (len(picks) - len(results))
        return results

    def write(self, grant: HeldGrant, picks: Sequence[Pick], scope: Scope) -> list[int]:
        self._check(grant, picks)
        with self._use() as ways:
            return ways.write_all(picks, grant.body.tenant, scope)

    def _check(self, grant: HeldGrant, picks: Sequence[Pick]) -> None:
        self.expect_life(grant)
        self.expect_within(picks, self._memory_bytes)  # a write beyond the end would make the node's memory grow

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
    def _use(self) -> Iterator[copies.Copies]:
        """The memory, which stays open (its descriptor's number would be another file's) until the last user left."""
        with self._lock:
            if self._closed or self._copies is None:
                raise errors.Unavailable(f"the memory of {self.node.name} is not attached")
            self._users += 1
            ways = self._copies
        try:
            yield ways
        except OSError as error:
            raise errors.Unavailable(f"the memory of {self.node.name}: {error}") from error
        finally:
            with self._lock:
                self._users -= 1
                if self._closed:
                    self._close_unused()

    def _close_unused(self) -> None:
        if not self._users and self._copies is not None:
            self._copies.close()
            self._copies = None
            os.close(self._descriptor)
            self._descriptor = -1
            if self._connection is not None:
                self._connection.close()
                self._connection = None


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
