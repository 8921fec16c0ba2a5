"""The TCP path: bytes between a client's socket and the pool, without a copy in between."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
import time
from collections.abc import Sequence

from polarkv_client.errors import DeadlineExceeded, PolarKVError, ProtocolError, Refused
from polarkv_client.layout import ERASED, HEADER_BYTES, MAX_PAYLOAD_BYTES, Header, pack_header, stride_bytes
from polarkv_client.placement import step_aside
from polarkv_client.protocol.grants import Access, Extent, Grant
from polarkv_client.protocol.messages import Empty, Op, SlabRead, SlabWrite
from polarkv_client.protocol.wire import Frame, decode_body, encode_failure, encode_frame
from polarkv_dataplane.runtime.counters import Counters, labelled
from polarkv_dataplane.runtime.stream import read_frame, receive_into, set_send_timeout, wait_readable
from polarkv_dataplane.slab.life import Gate
from polarkv_dataplane.slab.pool import Pool
from polarkv_dataplane.slab.rdma import RdmaPath

# Larger pieces are slower (they leave the processor's cache before they are sent), and a grant's end is noticed later.
PIECE_BYTES = 256 << 10
MAX_REQUEST_BYTES = 4 << 20
_LINGER_S = 1.0
_IDLE_S = 60.0
_SO_INCOMING_CPU = 49  # asm-generic/socket.h; Python's socket module does not name it
_CHECKSUM = struct.Struct("<Q")
_READ_BYTES, _WRITE_BYTES = "polarkv_slab_tcp_read_bytes_total", "polarkv_slab_tcp_write_bytes_total"
_READS, _WRITES = "polarkv_slab_tcp_read_chunks_total", "polarkv_slab_tcp_write_chunks_total"


class TcpPath:
    """Serves reads and writes on connections; each request carries its own grant."""

    def __init__(
        self, pool: Pool, gate: Gate, counters: Counters, stall_timeout_s: float, rdma: RdmaPath | None = None
    ) -> None:
        self._pool = pool
        self._gate = gate
        self._counters = counters
        self._stall_s = stall_timeout_s
        self._rdma = rdma
        for name in (_READ_BYTES, _WRITE_BYTES, _READS, _WRITES):
            counters.add(name, 0)

    def serve(self, sock: socket.socket) -> None:
        """Serve one connection until it ends.

        Raises:
            EOFError: it ended between requests. PolarKVError, OSError: it cannot go on.
        """
        _tune(sock)
        set_send_timeout(sock, self._stall_s)
        while True:
            # Connections are few: a silent one must not keep others out. Clients look before they use one again.
            if not wait_readable(sock, _IDLE_S):
                raise EOFError("idle")
            try:
                frame = read_frame(sock, time.monotonic() + self._stall_s, MAX_REQUEST_BYTES)
            except ProtocolError as error:
                say_and_close(sock, encode_failure(0, 0, error))
                raise
            if frame.op == Op.SLAB_RDMA_CONNECT and self._rdma is not None:
                self._rdma.serve(sock, frame)
                return
            # Over loopback the client itself works on the processor its bytes come in on; both ends at work need two.
            with contextlib.suppress(OSError):
                step_aside(sock.getsockopt(socket.SOL_SOCKET, _SO_INCOMING_CPU))
            self._answer(sock, frame)

    def _answer(self, sock: socket.socket, frame: Frame) -> None:
        try:
            if self._rdma is not None and self._rdma.alone and frame.op in (Op.SLAB_READ, Op.SLAB_WRITE):
                raise Refused("this cache node serves RDMA alone (rdma = only)")
            if frame.op == Op.SLAB_READ:
                request = decode_body(frame.body, SlabRead)
                grant = self._gate.admit(request.grant, Access.READ)
                extents = self._extents(grant, request.picks)
            elif frame.op == Op.SLAB_WRITE:
                write = decode_body(frame.body, SlabWrite)
                grant = self._gate.admit(write.grant, Access.WRITE)
                extents = self._extents(grant, write.picks)
            else:
                raise ProtocolError(f"op {frame.op} is not served here: this is a slab server's TCP port")
        except PolarKVError as error:
            self._count_error(error)
            failure = encode_failure(frame.op, frame.request_id, error)
            if frame.op == Op.SLAB_READ:
                sock.sendall(failure)  # nothing follows a read's request, so the stream is still in step
                return
            say_and_close(sock, failure)
            raise
        if frame.op == Op.SLAB_READ:
            self._read(sock, frame, grant, extents)
        else:
            self._write(sock, frame, grant, extents)

    def _extents(self, grant: Grant, picks: Sequence[int]) -> list[Extent]:
        """The extents picked, each within the pool: a manager's fault must not become a slab server's."""
        extents = []
        for pick in picks:
            if not 0 <= pick < len(grant.extents):
                raise ProtocolError(f"pick {pick} of a grant with {len(grant.extents)} extents")
            extent = grant.extents[pick]
            if not 0 <= extent.length_bytes <= MAX_PAYLOAD_BYTES:
                raise Refused(f"an extent's length of {extent.length_bytes} bytes is out of range")
            end_bytes = extent.offset_bytes + stride_bytes(extent.length_bytes)
            if extent.offset_bytes < 0 or end_bytes > self._pool.size_bytes:
                raise Refused(f"an extent at {extent.offset_bytes} lies outside this node's memory")
            extents.append(extent)
        return extents

    def _read(self, sock: socket.socket, frame: Frame, grant: Grant, extents: list[Extent]) -> None:
        sock.sendall(encode_frame(frame.op, frame.request_id, Empty()), socket.MSG_MORE if extents else 0)
        gate, moved_bytes = self._gate, 0
        try:
            for extent in extents:
                offset, left = extent.offset_bytes, HEADER_BYTES + extent.length_bytes
                while left:
                    gate.still(grant)
                    sent = self._send(sock, offset, min(left, PIECE_BYTES))
                    offset += sent
                    left -= sent
                    moved_bytes += sent
        except BlockingIOError as error:
            raise DeadlineExceeded(f"the client took no bytes for {self._stall_s:g} s") from error
        finally:
            self._counters.add(_READ_BYTES, moved_bytes)
        self._counters.add(_READS, len(extents))

    def _send(self, sock: socket.socket, offset: int, size_bytes: int) -> int:
        if self._pool.can_sendfile:
            return os.sendfile(sock.fileno(), self._pool.fd, offset, size_bytes)
        return sock.send(self._pool.view[offset : offset + size_bytes])

    def _write(self, sock: socket.socket, frame: Frame, grant: Grant, extents: list[Extent]) -> None:
        moved_bytes = 0
        try:
            for extent in extents:
                self._receive(sock, grant, extent)
                moved_bytes += extent.length_bytes
        except PolarKVError as error:
            self._count_error(error)
            say_and_close(sock, encode_failure(frame.op, frame.request_id, error))
            raise
        finally:
            self._counters.add(_WRITE_BYTES, moved_bytes)
        sock.sendall(encode_frame(frame.op, frame.request_id, Empty()))
        self._counters.add(_WRITES, len(extents))

    def _receive(self, sock: socket.socket, grant: Grant, extent: Extent) -> None:
        """One chunk into its slot. The header goes first and comes back last: in between the slot holds nothing."""
        view, start = self._pool.view, extent.offset_bytes
        payload, end = start + HEADER_BYTES, start + HEADER_BYTES + extent.length_bytes

        def check() -> None:
            self._gate.still(grant)

        check()
        view[start:payload] = ERASED
        for piece in range(payload, end, PIECE_BYTES):
            deadline = time.monotonic() + self._stall_s
            receive_into(sock, view[piece : min(piece + PIECE_BYTES, end)], deadline, check)
        trailer = bytearray(_CHECKSUM.size)
        receive_into(sock, memoryview(trailer), time.monotonic() + self._stall_s, check)
        (checksum,) = _CHECKSUM.unpack(trailer)
        check()
        view[end : start + stride_bytes(extent.length_bytes)] = bytes(stride_bytes(extent.length_bytes) + start - end)
        view[start:payload] = pack_header(Header(extent.key, extent.length_bytes, checksum, grant.tenant))

    def _count_error(self, error: PolarKVError) -> None:
        self._counters.add(labelled("polarkv_slab_refusals_total", "kind", type(error).__name__))


def _tune(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with contextlib.suppress(OSError):  # bbr, some systems' default, is much slower inside one data centre
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


def say_and_close(sock: socket.socket, failure: bytes) -> None:
    """Tell the peer what is wrong although it may still be sending.

    Closing a socket with unread bytes resets the connection, and the reset would overtake the text.
    """
    deadline = time.monotonic() + _LINGER_S
    waste = bytearray(64 << 10)
    try:
        sock.sendall(failure)
        sock.shutdown(socket.SHUT_WR)
        while wait_readable(sock, deadline - time.monotonic()) and sock.recv_into(waste):
            if time.monotonic() >= deadline:
                return
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN, errno.EAGAIN):
            raise
