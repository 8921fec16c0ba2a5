"""One manager's connections: a bounded pool, attached, with a breaker and a background thread that reconnects."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from polarkv_client import errors
from polarkv_client.breaker import Breaker, BreakerState
from polarkv_client.config import ClientConfig
from polarkv_client.keys import golden_digest
from polarkv_client.protocol import wire
from polarkv_client.protocol.messages import Attach, Attached, Op
from polarkv_client.resolve import Resolver
from polarkv_client.transport.base import Scope

log = logging.getLogger(__name__)
Answer = TypeVar("Answer")
_TELLING_S = 0.1  # silence as long as this, in one call or several in a row, is a failure of the manager
_IN_A_ROW_S = 1.0  # between calls that are further apart nobody listened


class Silence:
    """How long the manager has not answered calls that came one after the other. Times are time.monotonic()'s."""

    def __init__(self) -> None:
        self._from_to: tuple[float, float] | None = None

    def lasts_s(self, began: float, ended: float) -> float:
        """A call between these times had no answer: how long the silence has lasted."""
        before = self._from_to
        began = before[0] if before is not None and began - before[1] <= _IN_A_ROW_S else began
        self._from_to = began, ended
        return ended - began

    def ends(self) -> None:
        """There was an answer."""
        self._from_to = None


class Channel:
    """Connections to one manager, each attached, each with one request in flight."""

    def __init__(self, endpoint: str, config: ClientConfig, host: str, on_attach: Callable[[Attached], None]) -> None:
        self.endpoint = endpoint
        self.breaker = Breaker(
            f"the manager at {endpoint}",
            config.breaker_failures,
            config.breaker_first_ms / 1000,
            config.breaker_longest_ms / 1000,
        )
        self._config = config
        self._host = host
        self._on_attach = on_attach
        self._resolver = Resolver(endpoint)
        self._timeout_s = config.manager_timeout_ms / 1000
        self._name = config.client_name or f"{socket.gethostname()}:{os.getpid()}"
        self._pool = _Pool(config.manager_connections)
        self._closing = threading.Event()
        self._prober_lock = threading.Lock()
        self._prober: threading.Thread | None = None
        self._connected = False
        self._silence = Silence()

    def call(
        self, op: Op, request: object, answer: type[Answer], deadline: float, *,
        wait_ms: int = 0, idempotent: bool = True, scope: Scope | None = None,
    ) -> Answer:  # fmt: skip
        """One request and its answer.

        Args:
            wait_ms: how long the request itself asks the manager to wait; its time-out is that much longer.
            idempotent: whether it may be sent a second time when a kept connection turns out to be broken.
            scope: its cancellation wakes the call.

        Raises:
            BreakerOpen, Unavailable, DeadlineExceeded, ProtocolError, Refused, Unauthorized, GoldenMismatch.
        """
        now = time.monotonic()
        if self.breaker.state is not BreakerState.CLOSED:
            raise errors.BreakerOpen(f"the manager at {self.endpoint} is not asked for now: {self.breaker.why}")
        limit = min(deadline, now + self._timeout_s + wait_ms / 1000)
        try:
            result = self._exchange(op, request, answer, limit, idempotent, scope)
        except (errors.Unavailable, errors.DeadlineExceeded, errors.ProtocolError) as error:
            if scope is not None and scope.cancelled:
                raise errors.Cancelled("the operation was cancelled") from error
            waited_s = self._silence.lasts_s(now, time.monotonic()) - wait_ms / 1000
            # A caller's own short deadline says nothing about the manager.
            if not isinstance(error, errors.DeadlineExceeded) or waited_s >= min(_TELLING_S, self._timeout_s):
                self._failed(error)
            raise
        except errors.PolarKVError:
            self._answered()  # it said no: it is there
            raise
        self._answered()
        return result

    def connect(self, deadline: float) -> None:
        """Have one attached connection ready. Raises as :meth:`call`."""
        connection = self._pool.take(deadline)
        try:
            connection = connection or self._open(deadline)
        finally:
            self._pool.give_back(connection)
        self._answered()

    def close(self) -> None:
        """Close the idle connections and end the background thread."""
        self._closing.set()
        self._pool.close()
        prober = self._prober
        if prober is not None and prober is not threading.current_thread():
            prober.join(self._config.connect_timeout_ms / 1000 + 1)

    @property
    def connected(self) -> bool:
        """Whether the manager answered when it was last asked."""
        return self._connected

    def _exchange(
        self, op: Op, request: object, answer: type[Answer], limit: float, idempotent: bool, scope: Scope | None
    ) -> Answer:
        connection = kept = self._pool.take(limit)
        try:
            if connection is None:
                connection = self._open(limit)
            try:
                return _call(connection, op, request, answer, limit, scope)
            except (errors.Unavailable, errors.ProtocolError) as error:
                cancelled = scope is not None and scope.cancelled
                if not kept or not idempotent or cancelled or isinstance(error, errors.VersionMismatch):
                    raise
                connection.close()
            # The manager was probably started again: the others of the pool are as old as this one.
            self._pool.drop_idle()
            connection = self._open(limit)
            return _call(connection, op, request, answer, limit, scope)
        finally:
            self._pool.give_back(connection)

    def _open(self, limit: float) -> wire.Connection:
        """A new connection, attached."""
        if self._closing.is_set():
            raise errors.Unavailable("the client is closed")
        deadline = min(limit, time.monotonic() + self._config.connect_timeout_ms / 1000)
        connection = wire.Connection.open(self._resolver.resolve(deadline), deadline)
        golden = golden_digest()
        request = Attach(
            wire_min=wire.WIRE_VERSION_MIN,
            wire_max=wire.WIRE_VERSION,
            token=self._config.token.get_secret_value(),
            golden=golden,
            client=self._name,
            host_id=self._host,
        )
        try:
            attached = connection.call(Op.ATTACH, request, Attached, deadline)
            if attached.golden != golden:
                raise errors.GoldenMismatch(
                    "client and manager derive different keys: run the same version on both sides"
                )
            if not wire.WIRE_VERSION_MIN <= attached.wire <= wire.WIRE_VERSION:
                raise errors.VersionMismatch(
                    f"the manager chose wire version {attached.wire}, which is not spoken here"
                )
        except BaseException:
            connection.close()
            raise
        self._on_attach(attached)
        return connection

    def _failed(self, error: errors.PolarKVError) -> None:
        self._connected = False
        self._pool.drop_idle()
        self.breaker.failure(str(error), time.monotonic())
        if self.breaker.state is BreakerState.OPEN:
            self._start_prober(error)

    def _answered(self) -> None:
        self._connected = True
        self._silence.ends()
        self.breaker.success()

    def _start_prober(self, error: errors.PolarKVError) -> None:
        with self._prober_lock:
            if self._closing.is_set() or (self._prober is not None and self._prober.is_alive()):
                return
            log.warning("the manager at %s is not asked for now: %s", self.endpoint, error)
            self._prober = threading.Thread(target=self._probe, name="polarkv-reconnect", daemon=True)
            self._prober.start()

    def _probe(self) -> None:
        """Reconnect in the background until it works, so that no operation pays for finding out."""
        while not self._closing.wait(max(self.breaker.retry_at - time.monotonic(), 0.001)):
            try:
                self.breaker.check(time.monotonic())
            except errors.BreakerOpen:
                continue
            try:
                connection = self._open(time.monotonic() + self._config.connect_timeout_ms / 1000)
            except Exception as error:  # this thread is the only way back: it outlives whatever goes wrong
                self.breaker.failure(str(error), time.monotonic())
                continue
            if not self._pool.put(connection):
                connection.close()
            with self._prober_lock:  # first: a breaker that opens again from here on needs a new prober
                self._prober = None
            self._answered()
            log.warning("the manager at %s answers again", self.endpoint)
            return


class _Pool:
    """At most so many connections. Whoever takes one, or a place for one, gives it back."""

    def __init__(self, most: int) -> None:
        self._idle: deque[wire.Connection] = deque()
        self._changed = threading.Condition()
        self._free_places = most
        self._waiting = 0
        self._closed = False

    def take(self, limit: float) -> wire.Connection | None:
        """A kept connection; or None, and the place to open one. The last one given back comes first.

        Raises:
            DeadlineExceeded: there was neither in time.
        """
        try:
            return self._idle.pop()  # by far the most frequent case takes no lock
        except IndexError:
            pass
        with self._changed:
            self._waiting += 1
            try:
                while True:
                    if self._idle:
                        with contextlib.suppress(IndexError):
                            return self._idle.pop()
                    if self._free_places:
                        self._free_places -= 1
                        return None
                    if not self._changed.wait(max(limit - time.monotonic(), 0)) and time.monotonic() >= limit:
                        raise errors.DeadlineExceeded("no connection to the manager became free in time")
            finally:
                self._waiting -= 1

    def give_back(self, connection: wire.Connection | None) -> None:
        """A connection to keep; a closed one, or None, gives its place back."""
        if connection is not None and self._closed:
            connection.close()
        if connection is None or connection.closed:
            with self._changed:
                self._free_places += 1
                self._changed.notify()
            return
        self._idle.append(connection)
        if self._waiting:  # read after the append: who begins to wait now looks at what is idle first
            with self._changed:
                self._changed.notify()

    def put(self, connection: wire.Connection) -> bool:
        """Keep a connection that was opened without a place; False when there is none left."""
        with self._changed:
            if not self._free_places or self._closed:
                return False
            self._free_places -= 1
        self.give_back(connection)
        return True

    def drop_idle(self) -> None:
        """Close what is kept."""
        while True:
            try:
                connection = self._idle.pop()
            except IndexError:
                return
            connection.close()
            self.give_back(connection)

    def close(self) -> None:
        """Keep nothing from now on."""
        self._closed = True
        self.drop_idle()


def _call(
    connection: wire.Connection, op: Op, request: object, answer: type[Answer], limit: float, scope: Scope | None
) -> Answer:
    """The exchange on one connection; with a scope, one that its cancellation ends."""
    if scope is None:
        return connection.call(op, request, answer, limit)
    wake = partial(_shut_down, connection.sock)
    scope.on_cancel(wake)
    try:
        return connection.call(op, request, answer, limit)
    finally:
        scope.forget(wake)
        if scope.cancelled:
            connection.close()


def _shut_down(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
