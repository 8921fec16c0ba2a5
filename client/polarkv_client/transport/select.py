"""Which transport to use to which cache node, and why: shared memory on the same host, else RDMA, else TCP."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterator

import msgspec

from polarkv_client import errors
from polarkv_client.breaker import Breaker
from polarkv_client.config import ClientConfig
from polarkv_client.protocol.messages import NodeInfo
from polarkv_client.results import NodeStatus
from polarkv_client.transport.base import HeldGrant, Scope, Transport
from polarkv_client.transport.rdma import RdmaTransport
from polarkv_client.transport.shm import ShmTransport
from polarkv_client.transport.tcp import TcpTransport
from polarkv_client.transport.verbs.local import LocalDevices

log = logging.getLogger(__name__)
_RETRY_BETTER_S = 30.0  # how long a node stays on its second choice before the first is tried again


class _Route:
    """One life of one cache node."""

    def __init__(self, node: NodeInfo, config: ClientConfig) -> None:
        self.node = node
        self.lock = threading.Lock()
        self.transport: Transport | None = None
        self.why = "not used yet"
        self.retry_better_at = float("inf")
        self.breaker = Breaker(
            f"cache node {node.name}",
            config.breaker_failures,
            config.breaker_first_ms / 1000,
            config.breaker_longest_ms / 1000,
        )


class Transports:
    """The transports to all cache nodes; safe for several threads."""

    def __init__(self, config: ClientConfig, host: str) -> None:
        self._config = config
        self._host = host
        cores = os.cpu_count() or 1
        self._copy_threads = config.copy_threads or min(cores, 4)
        self._tcp_connections = config.tcp_connections or (2 if cores >= 4 else 1)
        self._queue_pairs = config.rdma_queue_pairs or (2 if cores >= 4 else 1)
        self._devices = LocalDevices(
            config.rdma_devices, config.rdma_gid_index, config.rdma_registered_bytes, config.rdma_binding
        )
        self._lock = threading.Lock()
        self._routes: dict[int, _Route] = {}
        self._closed = False

    def choose(self, node: NodeInfo, grant: HeldGrant, scope: Scope) -> Transport:
        """The transport for what ``grant`` allows on ``node``; report what became of it with :meth:`done`.

        Raises:
            BreakerOpen, Unavailable, Refused, DeadlineExceeded: the node cannot be reached now.
        """
        route = self._route(node)
        route.breaker.check(time.monotonic())
        transport = route.transport
        if transport is not None and time.monotonic() < route.retry_better_at:
            return transport
        if not route.lock.acquire(timeout=scope.remaining()):
            raise errors.DeadlineExceeded(f"another thread is still connecting to {node.name}")
        try:
            if route.transport is None or time.monotonic() >= route.retry_better_at:
                self._connect(route, grant, scope)
            transport = route.transport
            assert transport is not None
            if self._routes.get(node.number) is not route:  # forgotten meanwhile: nobody else would ever close it
                transport.close()
                raise errors.Unavailable(f"{node.name} has gone, or has begun a new life")
            return transport
        except errors.PolarKVError as error:
            self.done(node, error)
            raise
        finally:
            route.lock.release()

    def done(self, node: NodeInfo, error: BaseException | None) -> None:
        """How a transfer to ``node`` ended: a peer that keeps failing is left alone for a while."""
        route = self._routes.get(node.number)
        if route is None or route.node.incarnation != node.incarnation:
            return
        if error is None or isinstance(error, (errors.Refused, errors.Damaged, errors.Unauthorized)):
            route.breaker.success()
            return
        late = isinstance(error, errors.LeaseEnded) and not error.peer_silent  # too much for one lease
        if not late and not isinstance(error, (errors.Cancelled, errors.BreakerOpen)):
            route.breaker.failure(str(error), time.monotonic())

    def status(self) -> list[NodeStatus]:
        """One row a node that was used."""
        with self._lock:
            routes = sorted(self._routes.items())
        return [
            NodeStatus(
                route.node.name,
                route.node.incarnation,
                route.transport.name if route.transport else "none",
                route.why,
                route.breaker.state.value,
            )
            for _, route in routes
        ]

    @property
    def used(self) -> bool:
        """Whether there is a cache node that was used and not forgotten."""
        return bool(self._routes)

    def sweep(self) -> None:
        """Close what leads to servers that have gone; their nodes' breakers stay as they are."""
        with self._lock:
            routes = list(self._routes.values())
        for route in routes:
            transport = route.transport
            if transport is None:
                continue
            if not transport.peer_gone():
                with contextlib.suppress(errors.PolarKVError):
                    transport.upkeep()
                continue
            if not route.lock.acquire(blocking=False):
                continue  # who connects now will find out
            try:
                if route.transport is transport:
                    route.transport = None
                    route.why = f"{transport.name}: the slab server has gone"
                    route.retry_better_at = float("inf")
            finally:
                route.lock.release()
            transport.close()
        self._devices.sweep(time.monotonic())

    def forget_absent(self, nodes: dict[int, NodeInfo]) -> None:
        """Close what leads to nodes that are not in the table any more."""
        with self._lock:
            gone = [self._routes.pop(number) for number in list(self._routes) if number not in nodes]
        for route in gone:
            if route.transport is not None:
                route.transport.close()

    def close(self) -> None:
        """Close all of them."""
        with self._lock:
            self._closed = True
        self.forget_absent({})
        self._devices.close()

    def _route(self, node: NodeInfo) -> _Route:
        route = self._routes.get(node.number)
        if route is not None and route.node == node:
            return route
        with self._lock:
            if self._closed:
                raise errors.Unavailable("the client is closed")
            old = self._routes.get(node.number)
            if old is not None and old.node.incarnation > node.incarnation:
                raise errors.Refused(f"{node.name} has begun a new life since this grant")
            if old is not None and _same_ways(old.node, node):
                old.node = node
                return old
            route = self._routes[node.number] = _Route(node, self._config)
        if old is not None and old.transport is not None:
            old.transport.close()
        return route

    def _connect(self, route: _Route, grant: HeldGrant, scope: Scope) -> None:
        """Try the ways in order of preference; keep the first that works."""
        reasons: list[str] = []
        last: errors.PolarKVError = errors.Unavailable(f"{route.node.name} offers no transport that is allowed here")
        previous = route.transport
        for new, why in self._candidates(route.node, reasons):
            transport = new
            if previous is not None and new.name == previous.name:
                new.close()
                transport = previous
            try:
                transport.reach(grant, scope)
            except errors.PolarKVError as error:
                transport.close()
                reasons.append(f"{transport.name}: {error}")
                last = error
                continue
            better_failed = any(reason.startswith(("shm: ", "rdma: ")) for reason in reasons)
            route.retry_better_at = time.monotonic() + _RETRY_BETTER_S if better_failed else float("inf")
            route.transport = transport
            route.why = "; ".join([why, *reasons])
            log.info("cache node %s by %s (%s)", route.node.name, transport.name, route.why)
            if previous is not None and previous is not transport:
                previous.close()
            return
        route.transport = None
        route.why = "; ".join(reasons) or str(last)
        raise last

    def _no_rdma_here(self) -> str:
        """Why this machine cannot; nothing: it can."""
        try:
            self._devices.open()
        except errors.PolarKVError as error:
            return str(error)
        return ""

    def _candidates(self, node: NodeInfo, reasons: list[str]) -> Iterator[tuple[Transport, str]]:
        """Ways to try, in order. RDMA devices are opened only when what comes before them has failed."""
        connect_s = self._config.connect_timeout_ms / 1000
        allowed = self._config.transport
        by_shm, by_rdma, by_tcp = (allowed in {"auto", way} for way in ("shm", "rdma", "tcp"))
        near = node.host_id == self._host
        if by_shm and not (node.shm and near):
            reasons.append("no shm: another host" if node.shm else "shm: the node does not offer it")
        if by_rdma and not node.rdma:
            reasons.append("no rdma: the node does not offer it")
        if by_tcp and not node.tcp:
            reasons.append("tcp: the node does not offer it")
        if by_shm and node.shm and near:
            yield ShmTransport(node, self._copy_threads, connect_s, self._config.shm_copies), "same host"
        if by_rdma and node.rdma:
            if missing := self._no_rdma_here():
                reasons.append(f"no rdma: {missing}")
            else:
                why = "only rdma is allowed" if allowed == "rdma" else "both ends have it"
                transport = RdmaTransport(node, self._devices, self._queue_pairs, connect_s)
                yield transport, f"{why}, by {self._devices.binding}"
        if by_tcp and node.tcp:
            why = "only tcp is allowed" if allowed == "tcp" else "by network"
            yield TcpTransport(node, self._tcp_connections, connect_s), why


def _same_ways(old: NodeInfo, new: NodeInfo) -> bool:
    return msgspec.structs.replace(old, state=new.state) == new
