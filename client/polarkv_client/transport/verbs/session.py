"""The client's side of an RDMA session: a TCP connection to the slab server, the lanes made over it, its renewals.

A key of the node's memory opens all of it, for as long as a queue pair stands. So each write is fenced by the session:
the slab server destroys the queue pairs that may write when it has not been told in time that no write is overdue.
The arithmetic is in docs/design/rdma.md.
"""

from __future__ import annotations

import logging
import select
import socket
import threading
import time
from contextlib import suppress

from polarkv_client import errors
from polarkv_client.endpoints import RdmaPort
from polarkv_client.protocol import wire
from polarkv_client.protocol.grants import Access
from polarkv_client.protocol.messages import Empty, Op, RdmaConnect, RdmaConnected, RdmaRenew
from polarkv_client.transport.base import HeldGrant
from polarkv_client.transport.verbs import devices
from polarkv_client.transport.verbs.lane import Lane
from polarkv_client.transport.verbs.local import LocalDevice
from polarkv_client.transport.verbs.moves import Piece

RENEWALS = 4  # in the time after which the slab server fences
_log = logging.getLogger(__name__)
MovingLane = Lane[Piece]


class Session:
    """One session with one life of one cache node; safe for several threads."""

    def __init__(self, name: str, endpoint: str, deadline: float) -> None:
        """Connect; the session begins with its first lane.

        Raises:
            Unavailable, DeadlineExceeded: nobody answers there.
        """
        self._name = name
        self._connection = wire.Connection.open(endpoint, deadline)
        self._calling = threading.Lock()  # one request at a time on the connection
        self._lock = threading.Lock()
        self._lanes: set[MovingLane] = set()
        self._ended: list[int] = []  # lanes that the slab server is to destroy its end of
        self._session_s = 0.0
        self._why = ""
        self._thread: threading.Thread | None = None

    @property
    def ended(self) -> str:
        """Why it is of no more use; empty while it is."""
        return self._why

    def connect(self, device: LocalDevice, port: RdmaPort, grant: HeldGrant, deadline: float) -> MovingLane:
        """A new lane between a device of this machine and one of the node's. The grant says whether it may write.

        Raises:
            Refused, Unauthorized: the slab server says no. Unavailable, DeadlineExceeded, ProtocolError: it failed.
        """
        # Before the slab server is asked: its connection has to wait for the answer, and renewals with it.
        towards = devices.raw_gid(port.address)
        device.reach(towards, deadline)
        lane: MovingLane = Lane.make(device)
        theirs: list[int] = []
        try:
            mine = lane.describe()
            request = RdmaConnect(grant.signed, port.device, mine)
            with self._turn(deadline):
                answer = self._connection.call(Op.SLAB_RDMA_CONNECT, request, RdmaConnected, deadline)
            theirs.append(answer.lane)
            if answer.pair.gid != towards:
                device.reach(answer.pair.gid, deadline)
            lane.connect(mine, answer, can_write=grant.body.access == Access.WRITE)
            self._begin(lane, answer.session_ms)
        except BaseException:
            with self._lock:
                self._ended += theirs  # else the other end would stand, and count, for as long as the session does
            lane.close()
            if self._connection.closed or self._thread is None:
                self._end("the session could not be opened, or its connection broke")
            raise
        return lane

    def drop(self, lane: MovingLane) -> None:
        """A lane was closed: the slab server hears of it with the next renewal."""
        with self._lock:
            if lane in self._lanes:
                self._lanes.discard(lane)
                self._ended.append(lane.number)

    def close(self) -> None:
        """End it. Lanes in use end with errors; their users close them."""
        self._end("the session is closed")

    def _turn(self, deadline: float) -> _Turn:
        return _Turn(self._calling, deadline)

    def _begin(self, lane: MovingLane, session_ms: int) -> None:
        with self._lock:
            if self._why:
                raise errors.Unavailable(self._why)
            self._lanes.add(lane)
            self._session_s = session_ms / 1000
            if self._thread is not None:
                return
            self._thread = threading.Thread(target=self._run, name=f"polarkv-rdma-{self._name}", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        """Renew, until the end of either side."""
        poll = select.poll()
        poll.register(self._connection.sock, select.POLLRDHUP)
        try:
            while True:
                due = time.monotonic() + self._session_s / RENEWALS
                while (left_s := due - time.monotonic()) > 0:
                    if poll.poll(left_s * 1000):
                        raise errors.Unavailable("the slab server has gone, or begun a new life")
                self._renew()
        except (errors.PolarKVError, OSError) as error:
            self._end(f"{self._name}: the RDMA session ended: {error}")
        finally:
            self._connection.close()

    def _renew(self) -> None:
        deadline = time.monotonic() + self._session_s
        with self._turn(deadline):
            # From here on the order matters: looked at after the last answer came, before this message is made.
            now = time.monotonic()
            with self._lock:
                overdue = [lane for lane in self._lanes if lane.write_until <= now]
                for lane in overdue:
                    self._lanes.discard(lane)
                    self._ended.append(lane.number)
                ended, self._ended = self._ended, []
            for lane in overdue:
                lane.give_up("the write was not over when its ticket ended")
            self._connection.call(Op.SLAB_RDMA_RENEW, RdmaRenew(ended), Empty, deadline)

    def _end(self, why: str) -> None:
        with self._lock:
            if self._why:
                return
            self._why = why
            lanes, self._lanes = self._lanes, set()
        with suppress(OSError):
            self._connection.sock.shutdown(socket.SHUT_RDWR)  # wakes the thread, which closes it
        if self._thread is None:
            self._connection.close()
        for lane in lanes:
            lane.give_up(why)
        _log.info("%s", why)


class _Turn:
    """The connection, for one call."""

    __slots__ = ("_deadline", "_lock")

    def __init__(self, lock: threading.Lock, deadline: float) -> None:
        self._lock = lock
        self._deadline = deadline

    def __enter__(self) -> None:
        if not self._lock.acquire(timeout=max(0.0, self._deadline - time.monotonic())):
            raise errors.DeadlineExceeded("the slab server has not answered another request yet")

    def __exit__(self, *_: object) -> None:
        self._lock.release()
