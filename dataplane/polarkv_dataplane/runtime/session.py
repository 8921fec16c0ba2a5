"""One registration of a process at the manager, on one connection: what other threads may send on it."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from polarkv_client.errors import PolarKVError, Refused
from polarkv_client.protocol.messages import InventoryItem, Op, Registered, ReportInventory
from polarkv_client.protocol.wire import Frame, encode_frame, raise_failure
from polarkv_dataplane.runtime.clock import ManagerClock

WINDOW = 256
INVENTORY_BATCH = 4096
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Life:
    """What a registration gave: the cache node's number and incarnation, and the manager's epoch."""

    number: int
    incarnation: int
    epoch: int


class Session:
    """Sends requests without waiting for each answer; at most ``WINDOW`` of them are unanswered at a time.

    A session ends with its connection and never comes back: what was not answered by then was lost or not, and the next
    registration's inventory tells the manager what is true.
    """

    def __init__(self, sock: socket.socket, registered: Registered, sent_at: float) -> None:
        self.sock = sock
        self.life = Life(registered.number, registered.incarnation, registered.epoch)
        self.clock = ManagerClock(registered.manager_now_ms, sent_at)
        self.timeout_s = registered.timeout_ms / 1000
        self.quarantine_s = registered.quarantine_ms / 1000
        self.heartbeat_s = registered.heartbeat_ms / 1000
        self._lock = threading.Lock()
        self._window = threading.Semaphore(WINDOW)
        self._unanswered: dict[int, tuple[Op, float]] = {}
        self._next_id = 1
        self._ended = threading.Event()
        self._confirmed_at = sent_at

    @property
    def alive(self) -> bool:
        """Whether the connection still stands, as far as this side knows."""
        return not self._ended.is_set()

    def trusted(self) -> bool:
        """Whether the manager cannot have given this node up for silence: it answered something sent recently."""
        return self.alive and time.monotonic() - self._confirmed_at < self.timeout_s

    def end(self) -> None:
        """Wake every thread that uses the connection; whoever opened the socket closes it."""
        self._ended.set()
        with contextlib.suppress(OSError):  # it may not be connected any more
            self.sock.shutdown(socket.SHUT_RDWR)

    def post(self, op: Op, build: Callable[[], Any], *, block: bool = True) -> bool:
        """Send what ``build`` returns (nothing when that is None), without waiting for the answer.

        ``build`` runs while no other thread can send, so that what it reads is as new as everything sent before.
        With ``block`` false nothing is sent while the window is full: who reads answers must not wait for them.

        Returns:
            False when the session has ended, now or before, or nothing could be sent at once.
        """
        while not self._window.acquire(block, 0.2 if block else None):
            if not block or not self.alive:
                return False
        try:
            with self._lock:
                if not self.alive:
                    return False
                message = build()
                if message is None:
                    self._window.release()
                    return True
                request_id = self._next_id
                self._next_id = request_id % 0xFFFF_FFFF + 1
                self._unanswered[request_id] = (op, time.monotonic())
                self.sock.sendall(encode_frame(op, request_id, message))
                return True
        except OSError:  # the send's time-out (EAGAIN) too: part of a frame may be out, so nothing can follow it
            self.end()
            return False

    def answered(self, frame: Frame) -> tuple[Op, float] | None:
        """Match an answer to its request: (op, when it was sent), or None when there is no such request.

        Raises:
            Refused: the manager does not take the heartbeats of this registration or reports any more.
        """
        with self._lock:
            found = self._unanswered.pop(frame.request_id, None)
        if found is None:
            return None
        self._window.release()
        op, sent_at = found
        try:
            raise_failure(frame)
        except PolarKVError as error:
            if op != Op.OPERATION_DONE:  # one operation's end concerns that operation alone
                raise Refused(f"the manager refused {op.name}: {error}") from error
            _log.warning("the manager refused the end of an operation: %s", error)
        self._confirmed_at = max(self._confirmed_at, sent_at)
        return found


def report_inventory(session: Session, batches: Iterable[Callable[[], list[InventoryItem]]]) -> bool:
    """Send an inventory, batch by batch, then its end; return whether all of it was sent.

    Each batch is built when it is sent, under the session's lock: see :meth:`Session.post`.
    """
    life = session.life
    for batch in batches:

        def build(batch: Callable[[], list[InventoryItem]] = batch) -> ReportInventory | None:
            items = batch()
            return ReportInventory(life.number, life.incarnation, items) if items else None

        if not session.post(Op.REPORT_INVENTORY, build):
            return False
    return session.post(Op.REPORT_INVENTORY, lambda: ReportInventory(life.number, life.incarnation, [], last=True))
