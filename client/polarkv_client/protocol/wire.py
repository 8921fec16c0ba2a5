"""Frames: a 16-byte head, then a body in MessagePack; and the two ways to move them, blocking and asyncio.

    magic "PK" · wire version u8 · op u8 · request id u32 · body length u32 · status u8 · reserved 3 bytes

A response carries the request's id and op. Status 0 is an answer; anything else is a :class:`Failure`. Data payloads
never travel in frames' bodies: the slab's TCP path streams them behind a frame.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import time
from enum import IntEnum
from typing import TypeVar

import msgspec

from polarkv_client import errors
from polarkv_client.endpoints import parse_endpoint
from polarkv_client.protocol.messages import Failure, Op

WIRE_VERSION = 1
WIRE_VERSION_MIN = 1  # N-1 is accepted; there is none before 1
MAX_BODY_BYTES = 64 << 20
HEAD = struct.Struct("<2sBBIIB3x")
_MAGIC = b"PK"


class Status(IntEnum):
    """How a request ended, on the wire."""

    OK = 0
    PROTOCOL = 1
    VERSION = 2
    GOLDEN = 3
    UNAUTHORIZED = 4
    REFUSED = 5
    DAMAGED = 6
    INTERNAL = 7
    CONFIGURATION = 8


_ERROR_BY_STATUS: dict[int, type[errors.PolarKVError]] = {
    Status.PROTOCOL: errors.ProtocolError,
    Status.VERSION: errors.VersionMismatch,
    Status.GOLDEN: errors.GoldenMismatch,
    Status.UNAUTHORIZED: errors.Unauthorized,
    Status.REFUSED: errors.Refused,
    Status.DAMAGED: errors.Damaged,
    Status.INTERNAL: errors.Unavailable,
    Status.CONFIGURATION: errors.Refused,
}
_STATUS_BY_ERROR: tuple[tuple[type[BaseException], Status], ...] = (
    (errors.VersionMismatch, Status.VERSION),
    (errors.GoldenMismatch, Status.GOLDEN),
    (errors.ProtocolError, Status.PROTOCOL),
    (errors.Unauthorized, Status.UNAUTHORIZED),
    (errors.Refused, Status.REFUSED),
    (errors.Damaged, Status.DAMAGED),
    (errors.ConfigurationError, Status.CONFIGURATION),
    (errors.Unavailable, Status.INTERNAL),  # as which it arrives; its text is made for people
)
Message = TypeVar("Message")
_encoder = msgspec.msgpack.Encoder()
_decoders: dict[type, msgspec.msgpack.Decoder[object]] = {}


class Frame(msgspec.Struct, frozen=True, gc=False):
    """One frame as it came in; ``body`` is still encoded."""

    op: int
    request_id: int
    status: int
    body: bytes


def encode_frame(op: int, request_id: int, message: object, status: int = Status.OK) -> bytes:
    """Head and body of one frame.

    Raises:
        ProtocolError: the body is longer than the limit (split the batch).
    """
    body = _encoder.encode(message)
    if len(body) > MAX_BODY_BYTES:
        raise errors.ProtocolError(f"a body of {len(body)} bytes exceeds {MAX_BODY_BYTES}: split the batch")
    return HEAD.pack(_MAGIC, WIRE_VERSION, op, request_id, len(body), status) + body


def encode_failure(op: int, request_id: int, error: BaseException) -> bytes:
    """The frame that tells the peer of ``error``; unknown kinds become INTERNAL without their text's details."""
    for kind, status in _STATUS_BY_ERROR:
        if isinstance(error, kind):
            return encode_frame(op, request_id, Failure(str(error)), status)
    return encode_frame(op, request_id, Failure(f"internal error ({type(error).__name__})"), Status.INTERNAL)


def decode_head(raw: bytes | bytearray | memoryview) -> tuple[int, int, int, int]:
    """(op, request id, body length in bytes, status) of a head.

    Raises:
        VersionMismatch: the peer's wire version is not spoken here.
        ProtocolError: this is no head.
    """
    magic, version, op, request_id, length_bytes, status = HEAD.unpack(raw)
    if magic != _MAGIC:
        raise errors.ProtocolError(f"not a PolarKV peer: the frame starts with {magic!r}")
    if not WIRE_VERSION_MIN <= version <= WIRE_VERSION:
        raise errors.VersionMismatch(
            f"peer speaks wire version {version}, this side {WIRE_VERSION_MIN} to {WIRE_VERSION}: upgrade the older one"
        )
    if length_bytes > MAX_BODY_BYTES:
        raise errors.ProtocolError(f"a body of {length_bytes} bytes exceeds the limit of {MAX_BODY_BYTES}")
    return op, request_id, length_bytes, status


def decode_body(body: bytes | memoryview, kind: type[Message]) -> Message:
    """The message in a body; fields that a newer peer added are ignored, fields that an older one lacks get defaults.

    Raises:
        ProtocolError: the body is not a message of this kind.
    """
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.msgpack.Decoder(kind)
    try:
        return decoder.decode(body)  # type: ignore[return-value]
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise errors.ProtocolError(f"not a valid {kind.__name__}: {error}") from error


def raise_failure(frame: Frame) -> None:
    """Raise what the peer reported, if the frame is a failure."""
    if frame.status != Status.OK:
        kind = _ERROR_BY_STATUS.get(frame.status, errors.ProtocolError)
        raise kind(decode_body(frame.body, Failure).text)


async def read_frame(reader: asyncio.StreamReader) -> Frame:
    """The next frame of a stream.

    Raises:
        ProtocolError, VersionMismatch: garbage, a truncated frame, or another version.
        EOFError: the stream ended between frames.
    """
    try:
        head = await reader.readexactly(HEAD.size)
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise errors.ProtocolError("the stream ended inside a frame's head") from error
        raise EOFError("peer closed the connection") from error
    op, request_id, length_bytes, status = decode_head(head)
    try:
        body = await reader.readexactly(length_bytes)
    except asyncio.IncompleteReadError as error:
        raise errors.ProtocolError("the stream ended inside a frame's body") from error
    return Frame(op, request_id, status, body)


_QUICK_S = 150e-6  # of a processor's time is bet on a quick answer, where the last one was quick


class Connection:
    """A blocking connection for one request at a time; not for several threads at once.

    Every call takes a deadline on ``time.monotonic()``'s clock. After any error the connection is closed: the next
    answer on it could be that of an earlier request.
    """

    __slots__ = ("_next_id", "_quick", "closed", "sock")

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.closed = False
        self._next_id = 1
        self._quick = False

    @classmethod
    def open(cls, endpoint: str, deadline: float) -> Connection:
        """Connect to ``unix:///path`` or ``tcp://host:port``.

        Raises:
            Unavailable: nobody answers there. DeadlineExceeded: not in time.
        """
        try:
            return cls(connect_socket(endpoint, deadline))
        except TimeoutError as error:
            raise errors.DeadlineExceeded(f"connecting to {endpoint} took too long") from error
        except OSError as error:
            raise errors.Unavailable(f"cannot connect to {endpoint}: {error}") from error

    def call(self, op: Op, request: object, answer: type[Message], deadline: float) -> Message:
        """Send one request and wait for its answer.

        Raises:
            DeadlineExceeded, Unavailable, ProtocolError: the connection is closed and the outcome unknown.
            Refused, Unauthorized and the other failures that the peer reports: the connection stays good.
        """
        request_id = self._next_id = (self._next_id + 1) & 0xFFFF_FFFF
        try:
            self.send(encode_frame(op, request_id, request), deadline)
            frame = self.receive(deadline)
            if not frame.request_id:  # said to the connection, not to a request: why it is being closed
                raise_failure(frame)
            if frame.request_id != request_id:
                raise errors.ProtocolError(f"answer to request {frame.request_id} instead of {request_id}")
        except BaseException:
            self.close()
            raise
        raise_failure(frame)
        return decode_body(frame.body, answer)

    def send(self, data: bytes, deadline: float) -> None:
        """Send all of ``data``. Raises as :meth:`call`."""
        with _translated(self):
            self.sock.settimeout(_remaining(deadline))
            self.sock.sendall(data)

    def receive(self, deadline: float) -> Frame:
        """The next frame. Raises as :meth:`call`."""
        with _translated(self):
            raw = self._first(deadline)
            while len(raw) < HEAD.size:
                raw += self._more(65536, deadline)
            op, request_id, length_bytes, status = decode_head(raw[: HEAD.size])
            missing = length_bytes - (len(raw) - HEAD.size)
            if missing < 0:
                raise errors.ProtocolError("more than one answer came at once")
            if missing:
                parts = [raw[HEAD.size :]]
                while missing:
                    parts.append(self._more(min(missing, 1 << 20), deadline))
                    missing -= len(parts[-1])
                return Frame(op, request_id, status, b"".join(parts))
            return Frame(op, request_id, status, raw[HEAD.size :])

    def _first(self, deadline: float) -> bytes:
        """What comes first. A peer that was quick last time is asked again and again for a moment before it is waited
        for: to sleep and be woken takes as long as a short answer does."""
        began = time.monotonic()
        if self._quick:
            self.sock.setblocking(False)
            while time.monotonic() < began + _QUICK_S:
                with contextlib.suppress(BlockingIOError):
                    return self.sock.recv(65536)
        self.sock.settimeout(_remaining(deadline))
        data = self.sock.recv(65536)
        self._quick = time.monotonic() - began < 1.5 * _QUICK_S  # a wake-up's time included
        return data

    def _more(self, size_bytes: int, deadline: float) -> bytes:
        self.sock.settimeout(_remaining(deadline))
        data = self.sock.recv(size_bytes)
        if not data:
            raise errors.Unavailable("peer closed the connection")
        return data

    def close(self) -> None:
        """Close it; a second call does nothing."""
        self.closed = True
        self.sock.close()


class _translated:
    """Socket errors as the project's."""

    __slots__ = ("_connection",)

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def __enter__(self) -> None:
        if self._connection.closed:
            raise errors.Unavailable("the connection is closed")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, TimeoutError):
            raise errors.DeadlineExceeded("the peer did not answer in time") from error
        if isinstance(error, OSError):
            raise errors.Unavailable(f"the connection broke: {error}") from error


def _remaining(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise errors.DeadlineExceeded("the deadline has passed")
    return left


def connect_socket(endpoint: str, deadline: float) -> socket.socket:
    """A connected socket to ``unix:///path`` or ``tcp://host:port``, with Nagle's delay off.

    Raises:
        ConfigurationError: no such form. OSError, TimeoutError: as the system says.
    """
    try:
        target = parse_endpoint(endpoint)
    except ValueError as error:
        raise errors.ConfigurationError("endpoint", endpoint, str(error)) from None
    timeout = _remaining(deadline)
    if target.path:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(timeout)
            sock.connect(target.path)
        except BaseException:
            sock.close()
            raise
        return sock
    sock = socket.create_connection((target.host, target.port), timeout)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock
