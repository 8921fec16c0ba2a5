"""TCP: blocking sockets to the slab server's data port, payloads straight between socket and the caller's buffers."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence

import xxhash

from polarkv_client import errors, layout
from polarkv_client.buffers import Views, pieces
from polarkv_client.protocol import wire
from polarkv_client.protocol.messages import NodeInfo, Op, SlabRead, SlabWrite
from polarkv_client.transport.base import PIECE_BYTES, POLL_S, HeldGrant, Pick, Scope, Transport, verify

_LEAST_POLL_S = 1e-3  # the kernel takes 0 for no time-out at all
_CHECKSUM = struct.Struct("<Q")
_IDLE_CONNECTIONS = 16


class TcpTransport(Transport):
    """See :class:`Transport`. One request in flight a connection; connections are kept for the next call."""

    name = "tcp"

    def __init__(self, node: NodeInfo, connections: int, connect_timeout_s: float) -> None:
        super().__init__(node, connections)
        self._connect_timeout_s = connect_timeout_s
        self._lock = threading.Lock()
        self._idle: deque[_Stream] = deque()
        self._closed = False

    def reach(self, grant: HeldGrant, scope: Scope) -> None:
        self.expect_life(grant)
        with self._lock:
            if self._idle:
                return
        self._put(self._open(scope))

    def read(self, grant: HeldGrant, picks: Sequence[Pick], scope: Scope) -> list[errors.PolarKVError | None]:
        self.expect_life(grant)
        results: list[errors.PolarKVError | None] = []
        request = SlabRead(grant.signed, [pick.place for pick in picks])
        try:
            with self._stream(Op.SLAB_READ, request, scope) as stream:
                stream.answer(scope)
                header = bytearray(layout.HEADER_BYTES)
                for pick in picks:
                    checksum = stream.receive_chunk(header, pick.views, scope)
                    results.append(verify(pick.extent, header, checksum))
        except (errors.Refused, errors.Unauthorized):
            raise
        except errors.PolarKVError as error:
            results += [error] * (len(picks) - len(results))
        return results

    def write(self, grant: HeldGrant, picks: Sequence[Pick], scope: Scope) -> list[int]:
        self.expect_life(grant)
        request = SlabWrite(grant.signed, [pick.place for pick in picks])
        with self._stream(Op.SLAB_WRITE, request, scope) as stream:
            try:
                checksums = [stream.send_chunk(pick.views, scope) for pick in picks]
            except errors.Unavailable:
                stream.raise_reported(scope)  # a refusal ends the stream before all of it was sent
                raise
            stream.answer(scope)
            return checksums

    def ended_cleanly(self, error: BaseException) -> bool:
        return isinstance(error, (errors.Damaged, errors.Refused, errors.Unauthorized))

    def close(self) -> None:
        with self._lock:
            self._closed = True
            streams, self._idle = self._idle, deque()
        for stream in streams:
            stream.sock.close()

    @contextlib.contextmanager
    def _stream(self, op: Op, request: object, scope: Scope) -> Iterator[_Stream]:
        """A connection on which ``request`` was sent; kept when the body ends well, closed otherwise."""
        frame = wire.encode_frame(op, 1, request)
        stream = self._take(scope)
        try:
            stream.start(frame, scope)
            yield stream
        except BaseException:
            stream.sock.close()
            raise
        self._put(stream)

    def _take(self, scope: Scope) -> _Stream:
        with self._lock:
            if self._closed:
                raise errors.Unavailable(f"the transport to {self.node.name} is closed")
            while self._idle:
                stream = self._idle.pop()
                if stream.alive():
                    return stream
                stream.sock.close()
        return self._open(scope)

    def _open(self, scope: Scope) -> _Stream:
        deadline = time.monotonic() + min(scope.remaining(), self._connect_timeout_s)
        return _Stream(wire.Connection.open(self.node.tcp, deadline).sock, self.node.name)

    def _put(self, stream: _Stream) -> None:
        with self._lock:
            if not self._closed and len(self._idle) < _IDLE_CONNECTIONS:
                self._idle.append(stream)
                return
        stream.sock.close()


class _Stream:
    """One connection. Any error leaves it useless."""

    __slots__ = ("_poll", "_wait_s", "name", "sock")

    def __init__(self, sock: socket.socket, name: str) -> None:
        self.sock = sock
        self.name = name
        # Time-outs by the kernel: Python's own would poll before every call, and could not wait for a whole piece.
        sock.settimeout(None)
        self._wait_s = 0.0
        self._wait(POLL_S)
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN | getattr(select, "POLLRDHUP", 0))
        if sock.family != socket.AF_UNIX:
            with contextlib.suppress(OSError):  # where it is not built in, the system's default must do
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")

    def alive(self) -> bool:
        """False when the peer is known to have closed, or to have sent what nobody asked for."""
        return not self._poll.poll(0)

    def start(self, frame: bytes, scope: Scope) -> None:
        """Send a request's frame."""
        self._wait(min(POLL_S, max(scope.remaining(), _LEAST_POLL_S)))
        self._send([memoryview(frame)], scope)

    def _wait(self, seconds: float) -> None:
        """Look at the scope after so much silence: a deadline sooner than :data:`POLL_S` is not noticed late."""
        if seconds != self._wait_s:
            self._wait_s = seconds
            for direction in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                self.sock.setsockopt(socket.SOL_SOCKET, direction, struct.pack("@ll", 0, int(seconds * 1e6)))

    def answer(self, scope: Scope) -> None:
        """Receive the OK frame. Raises what the peer reports instead."""
        head = bytearray(wire.HEAD.size)
        self._receive([memoryview(head)], scope)
        op, request_id, length_bytes, status = wire.decode_head(head)
        body = bytearray(length_bytes)
        if body:
            self._receive([memoryview(body)], scope)
        wire.raise_failure(wire.Frame(op, request_id, status, bytes(body)))

    def raise_reported(self, scope: Scope) -> None:
        """Raise what the peer sent before it closed, if it did."""
        with contextlib.suppress(errors.Unavailable):
            self.answer(scope)

    def receive_chunk(self, header: bytearray, views: Views, scope: Scope) -> int:
        """Header and payload of one chunk; the checksum of the payload."""
        digest = xxhash.xxh3_64()
        first = [memoryview(header)]
        for piece in pieces(views, PIECE_BYTES):
            self._receive([*first, *piece], scope)
            first = []
            for part in piece:
                digest.update(part)
        return digest.intdigest()

    def send_chunk(self, views: Views, scope: Scope) -> int:
        """The payload of one chunk, then its checksum, which is returned."""
        digest = xxhash.xxh3_64()
        for piece in pieces(views, PIECE_BYTES):
            for part in piece:
                digest.update(part)
            self._send(piece, scope)
        checksum = digest.intdigest()
        self._send([memoryview(_CHECKSUM.pack(checksum))], scope)
        return checksum

    def _receive(self, vector: Views, scope: Scope) -> None:
        while vector:
            scope.check()
            try:
                count = self.sock.recv_into(vector[0]) if len(vector) == 1 else self.sock.recvmsg_into(vector)[0]
            except BlockingIOError:
                self._silent(scope)
                continue
            except OSError as error:
                scope.check()
                raise errors.Unavailable(f"the connection to {self.name} broke: {error}") from error
            if not count:
                scope.check()
                raise errors.Unavailable(f"{self.name} closed the connection")
            vector = _rest(vector, count)

    def _send(self, vector: Views, scope: Scope) -> None:
        while vector:
            scope.check()
            try:
                count = self.sock.sendmsg(vector)
            except BlockingIOError:
                if not self.alive():
                    raise errors.Unavailable(f"{self.name} takes no more, and has answered or gone") from None
                self._silent(scope)
                continue
            except OSError as error:
                scope.check()
                raise errors.Unavailable(f"the connection to {self.name} broke: {error}") from error
            vector = _rest(vector, count)

    @staticmethod
    def _silent(scope: Scope) -> None:
        """Nothing has moved for :data:`POLL_S`. Raises as ``scope.check``; the peer let such a lease end."""
        try:
            scope.check()
        except errors.LeaseEnded as ended:
            ended.peer_silent = True
            raise


def _rest(vector: Views, count: int) -> Views:
    """What of ``vector`` is left after ``count`` bytes of it were moved."""
    for place, view in enumerate(vector):
        if count < view.nbytes:
            return [view[count:], *vector[place + 1 :]]
        count -= view.nbytes
    return []
