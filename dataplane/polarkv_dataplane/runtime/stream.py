"""Frames and raw bytes on blocking sockets, each wait with a deadline on ``time.monotonic()``'s clock."""

from __future__ import annotations

import select
import socket
import struct
import time
from collections.abc import Callable

from polarkv_client.errors import DeadlineExceeded, ProtocolError
from polarkv_client.protocol.wire import HEAD, MAX_BODY_BYTES, Frame, decode_head

_TIMEVAL = struct.Struct("@ll")


def set_send_timeout(sock: socket.socket, timeout_s: float) -> None:
    """Let the kernel end a send that makes no progress, with EAGAIN, while the socket stays blocking for Python."""
    whole = int(timeout_s)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL.pack(whole, int((timeout_s - whole) * 1e6)))


def wait_readable(sock: socket.socket, timeout_s: float) -> bool:
    """Wait for bytes or the end of the stream; return whether either came."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(max(0.0, timeout_s) * 1000))


def receive_into(
    sock: socket.socket, view: memoryview, deadline: float, check: Callable[[], None] | None = None
) -> None:
    """Fill ``view`` from the socket.

    ``check`` runs before bytes are taken and may raise: nothing is ever written to ``view`` while this waits, so that
    what ``check`` found true still holds, but for microseconds, when bytes land.

    Raises:
        DeadlineExceeded: the bytes did not come in time. EOFError: the stream ended first. OSError: it broke.
    """
    filled, size_bytes = 0, len(view)
    while filled < size_bytes:
        if check is not None:
            check()
        try:
            count = sock.recv_into(view[filled:], 0, socket.MSG_DONTWAIT)
        except BlockingIOError:
            if not wait_readable(sock, deadline - time.monotonic()):
                raise DeadlineExceeded(f"{size_bytes - filled} bytes did not come in time") from None
            continue
        if not count:
            raise EOFError(f"the stream ended {size_bytes - filled} bytes early")
        filled += count


def read_frame(sock: socket.socket, deadline: float, max_body_bytes: int = MAX_BODY_BYTES) -> Frame:
    """Read one frame; the socket stands at its first byte or behind it.

    Raises:
        ProtocolError, VersionMismatch: garbage, a truncated frame, a body beyond the limit, or another version.
        EOFError: the stream ended between frames. DeadlineExceeded, OSError: as :func:`receive_into`.
    """
    head = bytearray(HEAD.size)
    first = sock.recv_into(head)
    if not first:
        raise EOFError("peer closed the connection")
    try:
        receive_into(sock, memoryview(head)[first:], deadline)
        op, request_id, length_bytes, status = decode_head(head)
        if length_bytes > max_body_bytes:
            raise ProtocolError(f"a body of {length_bytes} bytes exceeds {max_body_bytes}: split the batch")
        body = bytearray(length_bytes)
        receive_into(sock, memoryview(body), deadline)
    except EOFError as error:
        raise ProtocolError(f"truncated frame: {error}") from error
    return Frame(op, request_id, status, bytes(body))
