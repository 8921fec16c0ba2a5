"""One connection of a client or cache node: frames in, frames out, as many as came in one go answered in one write."""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import TYPE_CHECKING, Protocol, cast

from polarkv_client import errors
from polarkv_client.protocol.messages import Op
from polarkv_client.protocol.wire import HEAD, decode_head, encode_failure, encode_frame
from polarkv_dataplane.runtime.log import LimitedLogger

if TYPE_CHECKING:
    from polarkv_dataplane.manager.shell.manager import Manager

FIRST_FRAME_BYTES = 16 << 10  # from someone who has shown no token yet
HIGH_WATER_BYTES = 1 << 20  # a peer that has this much to read yet is not listened to meanwhile
FLUSH_S = 2.0  # so long a connection that is being closed may take to be read to its end
MOST_UNREAD_BYTES = 32 << 20  # commands are pushed unasked: a peer that lets so many pile up is cut off
_log = logging.getLogger(__name__)
_limited = LimitedLogger(_log)


class Role(Protocol):
    """What a connection turned out to be."""

    frame_bytes: int  # the longest body it may send

    def handle(self, op: int, request_id: int, body: bytes) -> None:
        """Answer one request, now or later. Raises what is wrong with it."""

    def gone(self) -> None:
        """The connection ended."""


class Peer(asyncio.Protocol):
    """Frames of one connection. The first one decides what it is."""

    def __init__(self, manager: Manager) -> None:
        self.manager = manager
        self.transport: asyncio.Transport | None = None
        self.name = "?"
        self.role: Role | None = None
        self._rest = bytearray()
        self._needed = HEAD.size
        self._out: list[bytes] = []
        self._handling = False
        self._unread = False  # the peer does not read its answers
        self._held = False  # a request is being worked on in slices: what follows it waits
        self._deadline: asyncio.TimerHandle | None = None

    # From asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.set_write_buffer_limits(high=HIGH_WATER_BYTES)
        sock = self.transport.get_extra_info("socket")
        peer = self.transport.get_extra_info("peername")
        self.name = f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) else "local"
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            for option, value in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3)):
                sock.setsockopt(socket.IPPROTO_TCP, option, value)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        try:
            self.manager.admit(self)
        except errors.Refused as error:
            self.fail(Op.ATTACH, 0, error)
            return
        seconds = self.manager.settings.attach_timeout_ms / 1000
        self._deadline = self.manager.loop.call_later(seconds, self._too_late)

    def data_received(self, data: bytes) -> None:
        rest = self._rest
        if rest:
            rest += data
            if len(rest) < self._needed or self._unread or self._held:
                return
            data = bytes(rest)
            rest.clear()
        self._consume(data)

    def pause_writing(self) -> None:
        self._unread = True
        self._listen()

    def resume_writing(self) -> None:
        self._unread = False
        self._resume()

    def eof_received(self) -> None:
        if self._rest:
            self.fail(0, 0, errors.ProtocolError("the stream ended inside a frame"))

    def connection_lost(self, error: Exception | None) -> None:
        self.transport = None
        self._settled()
        self._rest.clear()
        role, self.role = self.role, None
        self.manager.dismiss(self)
        if role is not None:
            role.gone()

    # For roles

    def become(self, role: Role) -> None:
        """The first frame said who this is."""
        self.role = role
        self._settled()

    def send(self, frame: bytes) -> None:
        """Send a frame; those that are sent while frames are handled leave together."""
        if self._handling:
            self._out.append(frame)
        elif self.transport is not None:
            self.transport.write(frame)
            if self.transport.get_write_buffer_size() > MOST_UNREAD_BYTES:
                _limited.warning("unread", "%s does not read what it is sent: cut off", self.name)
                self.transport.abort()

    def answer(self, op: int, request_id: int, message: object) -> None:
        self.send(encode_frame(op, request_id, message))

    def fail(self, op: int, request_id: int, error: errors.PolarKVError) -> None:
        """Say what is wrong and close."""
        _limited.warning(type(error).__name__, "%s: %s: closed", self.name, error)
        self.manager.counts.add("refused_connections")
        self.send(encode_failure(op, request_id, error))
        self._flush()
        self.close()

    def close(self) -> None:
        """Close once everything has been sent, and in any case soon: a peer that reads nothing must not hold it."""
        if self.transport is not None:
            self.transport.close()
            self._settled()
            self._deadline = self.manager.loop.call_later(FLUSH_S, self.transport.abort)

    def hold(self) -> None:
        """Handle no further frame before :meth:`release`."""
        self._held = True
        self._listen()

    def release(self) -> None:
        self._held = False
        self._resume()

    # Inside

    def _consume(self, data: bytes) -> None:
        at, end = 0, len(data)
        needed = HEAD.size
        self._handling = True
        try:
            while end - at >= HEAD.size and not self._held and not self._unread:
                op, request_id, length_bytes, _ = decode_head(data[at : at + HEAD.size])
                limit = self.role.frame_bytes if self.role is not None else FIRST_FRAME_BYTES
                if length_bytes > limit:
                    raise errors.ProtocolError(f"a body of {length_bytes} bytes exceeds the limit of {limit}")
                stop = at + HEAD.size + length_bytes
                if stop > end:
                    needed = stop - at
                    break
                self._handle(op, request_id, data[at + HEAD.size : stop])
                at = stop
                if len(self._out) >= 256:
                    self._flush()
        except errors.PolarKVError as error:
            self._handling = False
            self._flush()
            op, request_id = HEAD.unpack(data[at : at + HEAD.size])[2:4]
            self.fail(op, request_id, error)
            return
        finally:
            self._handling = False
            self._flush()
        self._needed = needed
        if at < end and self.transport is not None:
            self._rest += data[at:] if at else data

    def _handle(self, op: int, request_id: int, body: bytes) -> None:
        """One request. What concerns it alone is answered; what makes the connection useless is raised."""
        try:
            if self.role is not None:
                self.role.handle(op, request_id, body)
            else:
                self.manager.welcome(self, op, request_id, body)
        except (errors.Refused, errors.ConfigurationError) as error:
            _limited.warning(type(error).__name__, "%s: refused: %s", self.name, error)
            self.manager.counts.add("refused_requests")
            self.send(encode_failure(op, request_id, error))
        except errors.PolarKVError:
            raise
        except Exception as error:
            _log.exception("%s: request %d failed", self.name, op)
            self.manager.counts.add("internal_errors")
            self.send(encode_failure(op, request_id, error))

    def _flush(self) -> None:
        if self._out:
            frames, self._out = self._out, []
            if self.transport is not None:
                self.transport.write(frames[0] if len(frames) == 1 else b"".join(frames))

    def _listen(self) -> None:
        if self.transport is not None and not self.transport.is_closing():
            if self._unread or self._held:
                self.transport.pause_reading()
            else:
                self.transport.resume_reading()

    def _resume(self) -> None:
        if self._rest and not self._unread and not self._held and not self._handling:
            data = bytes(self._rest)
            self._rest.clear()
            self._consume(data)
        self._listen()

    def _settled(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _too_late(self) -> None:
        self.fail(Op.ATTACH, 0, errors.Refused("no ATTACH or REGISTER came in time"))
