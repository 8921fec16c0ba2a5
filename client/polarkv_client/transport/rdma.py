"""RDMA: the caller's buffers and the node's memory joined by one-sided reads and writes; the slab server does nothing.

Fencing, ordering and recovery are argued in docs/design/rdma.md.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from polarkv_client import errors
from polarkv_client.endpoints import RdmaPort, parse_rdma_endpoint
from polarkv_client.protocol.grants import Access
from polarkv_client.protocol.messages import NodeInfo
from polarkv_client.transport.base import HeldGrant, Pick, Scope, Transport
from polarkv_client.transport.verbs.local import LocalDevice, LocalDevices, pair_rails
from polarkv_client.transport.verbs.moves import Read, Write
from polarkv_client.transport.verbs.session import MovingLane, Session

_MOST_LANES = 16  # of each kind, over all rails
_REST_S = 5.0  # for which a rail that could not be connected is left out, where there are others
_log = logging.getLogger(__name__)


class RdmaTransport(Transport):
    """See :class:`Transport`. Lanes are kept for the next call; each is one queue pair, of one rail."""

    name = "rdma"

    def __init__(self, node: NodeInfo, devices: LocalDevices, lanes: int, connect_timeout_s: float) -> None:
        """``lanes``: how many of each rail one operation uses."""
        super().__init__(node, lanes)
        self._devices = devices
        self._connect_timeout_s = connect_timeout_s
        self._lanes_a_rail = lanes
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._connecting = threading.Lock()
        self._rails: list[tuple[LocalDevice, RdmaPort]] = []
        self._session: Session | None = None
        self._idle: dict[bool, list[MovingLane]] = {False: [], True: []}  # by whether they may write
        self._lanes: dict[bool, int] = {False: 0, True: 0}
        self._lost: dict[bool, int] = {False: 0, True: 0}  # that failed and have no successor yet
        self._shown: dict[bool, HeldGrant] = {}  # the last grant of each kind
        self._next_rail = 0
        self._resting: dict[tuple[LocalDevice, RdmaPort], float] = {}  # rails that failed, and until when
        self._closed = False

    def reach(self, grant: HeldGrant, scope: Scope) -> None:
        self.expect_life(grant)
        with self._lane(grant, scope):
            pass

    def read(self, grant: HeldGrant, picks: Sequence[Pick], scope: Scope) -> list[errors.PolarKVError | None]:
        self.expect_life(grant)
        results: list[errors.PolarKVError | None] = []
        try:
            scope.check()
            with self._lane(grant, scope) as lane:
                self.expect_within(picks, lane.remote.size_bytes)
                read = Read(lane, picks, scope)
                results = read.results
                read.run()
        except (errors.Refused, errors.Unauthorized):
            raise
        except errors.PolarKVError as error:
            results += [error] * (len(picks) - len(results))
        return results

    def write(self, grant: HeldGrant, picks: Sequence[Pick], scope: Scope) -> list[int]:
        self.expect_life(grant)
        scope.check()
        with self._lane(grant, scope) as lane:
            self.expect_within(picks, lane.remote.size_bytes)
            write = Write(lane, picks, grant.body.tenant, scope)
            write.run()
            return write.checksums

    def peer_gone(self) -> bool:
        session = self._session
        return session is not None and bool(session.ended)

    def upkeep(self) -> None:
        """Replace lanes that failed, so that the next call need not. The last grant may have ended: then it must."""
        for kind, grant in list(self._shown.items()):
            while True:
                with self._lock:
                    if self._closed or not self._lost[kind] or self._lanes[kind] >= _MOST_LANES:
                        break
                    self._lost[kind] -= 1
                    self._lanes[kind] += 1
                self._put(self._connect_counted(kind, grant, Scope(time.monotonic() + self._connect_timeout_s)))

    def ended_cleanly(self, error: BaseException) -> bool:
        return True  # the lane of a read that failed is destroyed before the call returns

    def close(self) -> None:
        with self._lock:
            self._closed = True
            session, self._session = self._session, None
            idle = [lane for lanes in self._idle.values() for lane in lanes]
            self._idle = {False: [], True: []}
            self._changed.notify_all()
        for lane in idle:
            lane.close()
        if session is not None:
            session.close()

    @contextmanager
    def _lane(self, grant: HeldGrant, scope: Scope) -> Iterator[MovingLane]:
        """A lane for one call. One that was closed in it is replaced when the next call needs it."""
        lane = self._take(grant, scope)
        try:
            yield lane
        finally:
            self._put(lane)

    def _take(self, grant: HeldGrant, scope: Scope) -> MovingLane:
        """An idle lane, else a new one, else the next that becomes idle."""
        kind = grant.body.access == Access.WRITE
        with self._lock:
            self._shown[kind] = grant
            while True:
                if self._closed:
                    raise errors.Unavailable(f"the transport to {self.node.name} is closed")
                while self._idle[kind]:
                    lane = self._idle[kind].pop(0)
                    if not lane.broken:
                        return lane
                    self._forget(lane)
                if self._lanes[kind] < _MOST_LANES:
                    self._lanes[kind] += 1
                    self._lost[kind] = max(0, self._lost[kind] - 1)
                    break
                self._changed.wait(min(scope.remaining(), 0.1))
        return self._connect_counted(kind, grant, scope)

    def _connect_counted(self, kind: bool, grant: HeldGrant, scope: Scope) -> MovingLane:
        """A new lane that has been counted already."""
        try:
            return self._connect(grant, scope)
        except BaseException:
            with self._lock:
                self._lanes[kind] -= 1
                self._changed.notify()
            raise

    def _put(self, lane: MovingLane) -> None:
        with self._lock:
            if not lane.broken and not self._closed:
                self._idle[lane.can_write].append(lane)
                self._changed.notify()
                return
            self._forget(lane)

    def _forget(self, lane: MovingLane) -> None:
        """The lock is held."""
        self._lanes[lane.can_write] -= 1
        self._lost[lane.can_write] += not self._closed
        if self._session is not None:
            self._session.drop(lane)
        self._changed.notify()
        lane.close()  # last: when it fails, the lane is gone all the same

    def _connect(self, grant: HeldGrant, scope: Scope, *, again: bool = True) -> MovingLane:
        found = self._devices.open()  # the first time it loads a library
        deadline = min(scope.deadline, time.monotonic() + self._connect_timeout_s)
        session = self._open_session(found, deadline)
        try:
            lane = self._connect_rail(session, grant, deadline)
        except errors.Unavailable:
            if not again or not session.ended:
                raise
            return self._connect(grant, scope, again=False)  # the session had ended before this; there may be another
        with self._lock:
            if self._session is session:
                return lane
        lane.close()
        raise errors.Unavailable(f"the transport to {self.node.name} is closed, or its session has ended")

    def _connect_rail(self, session: Session, grant: HeldGrant, deadline: float) -> MovingLane:
        """A lane of the next rail, or of one after it where that cannot be connected; it is then left out for a while.

        Raises as :meth:`Session.connect`, what the last of them said.
        """
        now = time.monotonic()
        with self._lock:
            first, self._next_rail = self._next_rail, self._next_rail + 1
            turned = [self._rails[(first + place) % len(self._rails)] for place in range(len(self._rails))]
            chosen = [rail for rail in turned if self._resting.get(rail, now) <= now] or turned
        for rail in chosen:
            try:
                lane = session.connect(*rail, grant, deadline)
            except errors.Unavailable as error:
                if session.ended or rail is chosen[-1] or time.monotonic() >= deadline:
                    raise
                with self._lock:
                    self._resting[rail] = time.monotonic() + _REST_S
                _log.info("%s: %s does without one of its rails for a while: %s", self.node.name, rail[0].name, error)
            else:
                return lane
        raise errors.Unavailable(f"there is no rail to {self.node.name}")

    def _open_session(self, found: Sequence[LocalDevice], deadline: float) -> Session:
        if not self._connecting.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise errors.DeadlineExceeded(f"another thread is still connecting to {self.node.name}")
        try:
            session = self._session
            if session is not None and session.ended:
                session = None
            if session is not None and {device for device, _ in self._rails} == set(found):
                return session
            # Else a device's address has changed: what was opened with the old one is closed, or will be.
            endpoint = parse_rdma_endpoint(self.node.rdma)
            rails = pair_rails(found, endpoint.ports)
            made = session or Session(self.node.name, endpoint.tcp, deadline)
            with self._lock:
                closed = self._closed
                if not closed:
                    self._rails, self._session, self._resting = rails, made, {}
                    self.parallelism = self._lanes_a_rail * len(rails)
            if closed:
                made.close()
                raise errors.Unavailable(f"the transport to {self.node.name} is closed")
            return made
        except ValueError as error:
            raise errors.ProtocolError(f"{self.node.name} offers RDMA at {self.node.rdma!r}: {error}") from error
        finally:
            self._connecting.release()
