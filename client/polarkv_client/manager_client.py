"""Blocking calls to the manager: bounded pools of attached connections, shard routing, breaker, reconnecting.

Every call takes an absolute deadline on ``time.monotonic()``'s clock and ends by it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from polarkv_client import errors
from polarkv_client.breaker import Breaker, BreakerState
from polarkv_client.config import ClientConfig
from polarkv_client.keys import golden_digest
from polarkv_client.protocol import wire
from polarkv_client.protocol.messages import (
    AbortStore,
    AcquireRead,
    Attach,
    Attached,
    BeginStore,
    CommitStore,
    Empty,
    Keys,
    NodeInfo,
    NodeList,
    Op,
    Outcomes,
    Prefetch,
    ReadGrants,
    ReleaseRead,
    ReportDamaged,
    Shard,
    StoreGrants,
)
from polarkv_client.resolve import Resolver
from polarkv_client.transport.base import Scope

log = logging.getLogger(__name__)
Answer = TypeVar("Answer")
_TELLING_S = 0.1  # silence as long as this is a failure of the manager
_REFRESH_S = 0.2  # at most this often is the node table asked for


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
        self._idle: deque[wire.Connection] = deque()
        self._free = threading.Semaphore(config.manager_connections)
        self._closing = threading.Event()
        self._prober_lock = threading.Lock()
        self._prober: threading.Thread | None = None
        self._connected = False

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
        if not self._free.acquire(timeout=max(limit - now, 0)):
            raise errors.DeadlineExceeded("no connection to the manager became free in time")
        try:
            result = self._exchange(op, request, answer, limit, idempotent, scope)
        except (errors.Unavailable, errors.DeadlineExceeded, errors.ProtocolError) as error:
            if scope is not None and scope.cancelled:
                raise errors.Cancelled("the operation was cancelled") from error
            waited_s = time.monotonic() - now - wait_ms / 1000
            # A caller's own short deadline says nothing about the manager.
            if not isinstance(error, errors.DeadlineExceeded) or waited_s >= min(_TELLING_S, self._timeout_s):
                self._failed(error)
            raise
        except errors.PolarKVError:
            self._answered()  # it said no: it is there
            raise
        finally:
            self._free.release()
        self._answered()
        return result

    def connect(self, deadline: float) -> None:
        """Have one attached connection ready. Raises as :meth:`call`."""
        if not self._idle:
            self._keep(self._open(deadline))
        self._answered()

    def close(self) -> None:
        """Close the idle connections and end the background thread."""
        self._closing.set()
        self._drop_idle()
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
        try:
            connection, kept = self._idle.pop(), True
        except IndexError:
            connection, kept = self._open(limit), False
        try:
            return self._on(connection, op, request, answer, limit, scope)
        except (errors.Unavailable, errors.ProtocolError) as error:
            cancelled = scope is not None and scope.cancelled
            if not kept or not idempotent or cancelled or isinstance(error, errors.VersionMismatch):
                raise
        # The manager was probably started again: the others of the pool are as old as this one.
        self._drop_idle()
        return self._on(self._open(limit), op, request, answer, limit, scope)

    def _on(
        self,
        connection: wire.Connection,
        op: Op,
        request: object,
        answer: type[Answer],
        limit: float,
        scope: Scope | None,
    ) -> Answer:
        """The exchange on one connection, which is kept unless it broke."""
        if scope is None:
            try:
                return connection.call(op, request, answer, limit)
            finally:
                self._keep(connection)
        wake = partial(_shut_down, connection.sock)
        scope.on_cancel(wake)
        try:
            return connection.call(op, request, answer, limit)
        finally:
            scope.forget(wake)
            if scope.cancelled:
                connection.close()
            self._keep(connection)

    def _keep(self, connection: wire.Connection) -> None:
        if connection.closed:
            return
        if self._closing.is_set():
            connection.close()
        else:
            self._idle.append(connection)

    def _drop_idle(self) -> None:
        while self._idle:
            try:
                self._idle.pop().close()
            except IndexError:
                return

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
        self._drop_idle()
        self.breaker.failure(str(error), time.monotonic())
        if self.breaker.state is BreakerState.OPEN:
            self._start_prober(error)

    def _answered(self) -> None:
        self._connected = True
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
            except errors.PolarKVError as error:
                self.breaker.failure(str(error), time.monotonic())
                continue
            self._keep(connection)
            self._answered()
            log.warning("the manager at %s answers again", self.endpoint)
            return


class ManagerClient:
    """The manager's operations, over one channel a shard. Safe for several threads."""

    def __init__(self, config: ClientConfig, host: str) -> None:
        self._config = config
        self._host = host
        self._lock = threading.Lock()
        self._attached: Attached | None = None
        self._nodes: dict[int, NodeInfo] = {}
        self._refreshed_at = 0.0
        self._home = Channel(config.endpoint, config, host, self._note_attached)
        self._channels: dict[str, Channel] = {"": self._home, config.endpoint: self._home}
        self._shards: list[Shard] = []

    @property
    def home(self) -> Channel:
        """The channel to the manager that the configuration names."""
        return self._home

    @property
    def channels(self) -> list[Channel]:
        """All channels, once each."""
        return list({id(channel): channel for channel in self._channels.values()}.values())

    @property
    def attached(self) -> Attached | None:
        """What the manager said at the last attach."""
        return self._attached

    @property
    def nodes(self) -> dict[int, NodeInfo]:
        """The cache nodes by number, as last heard."""
        return self._nodes

    def connect(self, deadline: float) -> Attached:
        """Attach now. Raises what :meth:`Channel.call` raises."""
        self._home.connect(deadline)
        assert self._attached is not None
        return self._attached

    def route(self, keys: Sequence[bytes]) -> list[tuple[Channel, list[int]]]:
        """Whose each key is: for each channel the places of its keys, in order."""
        if len(self._shards) <= 1:
            channel = self._channel(self._shards[0].endpoint) if self._shards else self._home
            return [(channel, list(range(len(keys))))]
        places: dict[str, list[int]] = {}
        by_byte = [next((s.endpoint for s in self._shards if s.first <= byte <= s.last), "") for byte in range(256)]
        for place, key in enumerate(keys):
            places.setdefault(by_byte[key[0]], []).append(place)
        return [(self._channel(endpoint), group) for endpoint, group in places.items()]

    def exists(self, channel: Channel, keys: bytes, deadline: float) -> bytes:
        """A Tier a key. Takes no lock, renews nothing."""
        answer = channel.call(Op.EXISTS, Keys(keys), Outcomes, deadline)
        return _expect(answer.outcomes, len(keys) // 32)

    def match_prefix(self, channel: Channel, keys: bytes, deadline: float) -> bytes:
        """A Tier for each key of the longest prefix that is there."""
        answer = channel.call(Op.MATCH_PREFIX, Keys(keys), Outcomes, deadline)
        if len(answer.outcomes) > len(keys) // 32:
            raise errors.ProtocolError("the manager matched more keys than it was asked for")
        return answer.outcomes

    def begin_store(
        self, channel: Channel, keys: bytes, lengths: list[int], wait_ms: int, scope: Scope
    ) -> tuple[StoreGrants, float]:
        """Ask for slots. Returns the answer and until when the ticket may be used, counted from when this was sent."""
        sent = time.monotonic()
        answer = channel.call(
            Op.BEGIN_STORE,
            BeginStore(keys, lengths, wait_ms),
            StoreGrants,
            scope.deadline,
            wait_ms=wait_ms,
            scope=scope,
        )
        _expect(answer.outcomes, len(keys) // 32)
        return answer, sent + answer.ticket_ms / 1000

    def commit_store(self, channel: Channel, ticket: int, keys: bytes, checksums: list[int], deadline: float) -> bytes:
        """Make what was written visible: a CommitOutcome a key."""
        request = CommitStore(ticket, keys, checksums)
        answer = channel.call(Op.COMMIT_STORE, request, Outcomes, deadline, idempotent=False)
        return _expect(answer.outcomes, len(checksums))

    def abort_store(self, channel: Channel, ticket: int, keys: bytes, deadline: float) -> None:
        """Give slots back."""
        channel.call(Op.ABORT_STORE, AbortStore(ticket, keys), Empty, deadline)

    def acquire_read(self, channel: Channel, keys: bytes, wait_ms: int, scope: Scope) -> tuple[ReadGrants, float]:
        """Ask for leases. Returns the answer and until when the lease may be used, counted from when this was sent."""
        sent = time.monotonic()
        answer = channel.call(
            Op.ACQUIRE_READ, AcquireRead(keys, wait_ms), ReadGrants, scope.deadline, wait_ms=wait_ms, scope=scope
        )
        _expect(answer.outcomes, len(keys) // 32)
        _expect(answer.tiers, len(keys) // 32)
        return answer, sent + answer.lease_ms / 1000

    def release_read(self, channel: Channel, lease: int, clean: bool, deadline: float) -> None:
        """End a lease."""
        channel.call(Op.RELEASE_READ, ReleaseRead(lease, clean), Empty, deadline)

    def report_damaged(self, channel: Channel, lease: int, keys: bytes, deadline: float) -> None:
        """End a lease under which damaged chunks were read."""
        channel.call(Op.REPORT_DAMAGED, ReportDamaged(lease, keys), Empty, deadline)

    def prefetch(self, channel: Channel, keys: bytes, deadline: float) -> None:
        """Ask that chunks on disk be brought to memory."""
        channel.call(Op.PREFETCH, Prefetch(keys), Empty, deadline)

    def list_nodes(self, deadline: float) -> dict[int, NodeInfo]:
        """The cache nodes by number, asked for now."""
        answer = self._home.call(Op.LIST_NODES, Empty(), NodeList, deadline)
        self._nodes = {node.number: node for node in answer.nodes}
        return self._nodes

    def node(self, number: int, incarnation: int, deadline: float) -> NodeInfo:
        """The cache node that a grant is for; the table is asked for again when it is older than the grant.

        Raises:
            Refused: there is no such life of that node. Others as :meth:`Channel.call`.
        """
        found = self._nodes.get(number)
        if found is None or found.incarnation < incarnation:
            with self._lock:
                due = time.monotonic() - self._refreshed_at >= _REFRESH_S
                if due:
                    self._refreshed_at = time.monotonic()
            if due:
                self.list_nodes(deadline)
            found = self._nodes.get(number)
        if found is None or found.incarnation != incarnation:
            raise errors.Refused(f"cache node {number} has no incarnation {incarnation} (any more)")
        return found

    def close(self) -> None:
        """Close all channels."""
        for channel in self.channels:
            channel.close()

    def _channel(self, endpoint: str) -> Channel:
        channel = self._channels.get(endpoint)
        if channel is None:
            with self._lock:
                channel = self._channels.get(endpoint)
                if channel is None:
                    channel = Channel(endpoint, self._config, self._host, lambda attached: None)
                    self._channels[endpoint] = channel
        return channel

    def _note_attached(self, attached: Attached) -> None:
        previous = self._attached
        self._attached = attached
        self._shards = attached.shards
        self._nodes = {node.number: node for node in attached.nodes}
        if previous is not None and previous.epoch != attached.epoch:
            log.info("the manager began epoch %d; %d cache nodes", attached.epoch, len(attached.nodes))


def _shut_down(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def _expect(outcomes: bytes, count: int) -> bytes:
    if len(outcomes) != count:
        raise errors.ProtocolError(f"the manager answered for {len(outcomes)} keys, asked were {count}")
    return outcomes
