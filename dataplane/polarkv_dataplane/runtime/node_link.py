"""The link from a cache node's process to the manager: register, heartbeat, commands, and again after a loss."""

from __future__ import annotations

import logging
import random
import socket
import threading
import time
from typing import Protocol

from polarkv_client.errors import (
    ConfigurationError,
    GoldenMismatch,
    PolarKVError,
    ProtocolError,
    Unauthorized,
    VersionMismatch,
)
from polarkv_client.protocol.messages import Heartbeat, HeartbeatAnswer, Op, Register, Registered
from polarkv_client.protocol.wire import Connection, Frame, decode_body, encode_frame, raise_failure
from polarkv_dataplane.runtime.counters import Counters
from polarkv_dataplane.runtime.log import LimitedLogger
from polarkv_dataplane.runtime.session import Session
from polarkv_dataplane.runtime.stream import read_frame, set_send_timeout, wait_readable

CONNECT_S = 2.0
REGISTER_S = 10.0
FRAME_S = 10.0
_FIRST_DELAY_S, _MAX_DELAY_S = 0.05, 1.0
# Nothing that a later attempt with the same settings would change.
_FATAL = (ConfigurationError, Unauthorized, VersionMismatch, GoldenMismatch)


class Listener(Protocol):
    """A process that uses a link; every method runs in the link's thread."""

    def describe(self, sock: socket.socket) -> Register:
        """Bring about that nothing of an earlier registration is still under way, and say what to register."""

    def registered(self, session: Session) -> None:
        """A new session has begun."""

    def command(self, session: Session, frame: Frame) -> None:
        """The manager asks for something. Must not block."""

    def failed(self, error: PolarKVError) -> None:
        """The very first registration was refused for a reason that trying again does not change."""


class NodeLink:
    """Keeps one process registered. One thread: it reads, sends heartbeats, and connects anew after a loss."""

    def __init__(self, endpoint: str, listener: Listener, counters: Counters, name: str) -> None:
        self._endpoint = endpoint
        self._listener = listener
        self._counters = counters
        self._closing = threading.Event()
        self._session: Session | None = None
        self._log = logging.getLogger(f"{__name__}.{name}")
        self._limited = LimitedLogger(self._log, 5.0)
        self._thread = threading.Thread(target=self._run, name=f"link-{name}", daemon=True)

    def start(self) -> None:
        """Begin to connect."""
        self._thread.start()

    def close(self, timeout_s: float = 1.0) -> bool:
        """End the session and the thread; wait for that up to ``timeout_s``, and return whether it came."""
        self._closing.set()
        session = self._session
        if session is not None:
            session.end()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        delay_s, was_registered = _FIRST_DELAY_S, False
        while not self._closing.is_set():
            try:
                connection = Connection.open(self._endpoint, time.monotonic() + CONNECT_S)
                try:
                    session = self._register(connection.sock)
                    was_registered, delay_s = True, _FIRST_DELAY_S
                    self._hold(session)
                finally:
                    connection.close()
            except _FATAL as error:
                if not was_registered:
                    self._listener.failed(error)
                    return
                self._lost(error)
            except (PolarKVError, EOFError, OSError) as error:
                self._lost(error)
            except Exception as error:  # this thread is the node's only way into the cluster: it must not end
                self._log.exception("the link to the manager met a defect")
                self._lost(error)
            self._closing.wait(delay_s * random.uniform(0.5, 1.0))
            delay_s = min(delay_s * 2, _MAX_DELAY_S)

    def _lost(self, error: BaseException) -> None:
        if not self._closing.is_set():
            self._counters.add("polarkv_link_losses_total")
            self._limited.warning(type(error).__name__, "manager %s: %s; trying again", self._endpoint, error)

    def _register(self, sock: socket.socket) -> Session:
        request = self._listener.describe(sock)
        sock.settimeout(None)
        set_send_timeout(sock, FRAME_S)
        sent_at = time.monotonic()
        sock.sendall(encode_frame(Op.REGISTER, 1, request))
        if not wait_readable(sock, REGISTER_S):
            raise ProtocolError(f"no answer to the registration within {REGISTER_S:g} s")
        frame = read_frame(sock, time.monotonic() + FRAME_S)
        raise_failure(frame)
        registered = decode_body(frame.body, Registered)
        if registered.heartbeat_ms < 1 or registered.timeout_ms < registered.heartbeat_ms:
            raise ProtocolError(
                f"heartbeats every {registered.heartbeat_ms} of {registered.timeout_ms} ms are no offer"
            )
        session = Session(sock, registered, sent_at)
        set_send_timeout(sock, session.timeout_s)
        self._session = session
        return session

    def _hold(self, session: Session) -> None:
        """Serve one session until it ends."""
        try:
            self._listener.registered(session)
            heard_at = next_beat = time.monotonic()
            while session.alive and not self._closing.is_set():
                now = time.monotonic()
                if now >= next_beat:
                    next_beat = max(next_beat + session.heartbeat_s, now)
                    self._beat(session)
                if wait_readable(session.sock, next_beat - now):
                    self._handle(session, read_frame(session.sock, time.monotonic() + FRAME_S))
                    heard_at = time.monotonic()
                elif time.monotonic() - heard_at > session.timeout_s:
                    raise ProtocolError(f"the manager has been silent for {session.timeout_s:g} s")
        finally:
            session.end()
            self._session = None

    def _beat(self, session: Session) -> None:
        life, values = session.life, self._counters.snapshot()
        session.post(Op.HEARTBEAT, lambda: Heartbeat(life.number, life.incarnation, values), block=False)

    def _handle(self, session: Session, frame: Frame) -> None:
        if frame.request_id == 0:
            self._listener.command(session, frame)
            return
        answered = session.answered(frame)
        if answered is None:
            raise ProtocolError(f"an answer to request {frame.request_id}, which was not sent")
        op, sent_at = answered
        if op == Op.HEARTBEAT:
            session.clock.observe(decode_body(frame.body, HeartbeatAnswer).manager_now_ms, sent_at)
