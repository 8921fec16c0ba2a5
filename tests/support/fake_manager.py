"""A manager that follows a script: real sockets and frames, no rules of its own."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from polarkv_client.errors import PolarKVError
from polarkv_client.protocol.grants import Access, Extent, Grant, sign
from polarkv_client.protocol.messages import (
    Carve,
    DiskCommand,
    Empty,
    Heartbeat,
    HeartbeatAnswer,
    InventoryItem,
    Op,
    OperationDone,
    Register,
    Registered,
    ReportInventory,
)
from polarkv_client.protocol.wire import Frame, decode_body, encode_failure, encode_frame
from polarkv_dataplane.runtime import secrets
from polarkv_dataplane.runtime.stream import read_frame, wait_readable
from tests.support.guest import SLOWNESS
from tests.support.waiting import wait_until


@dataclass
class Channel:
    """One connection of a cache node, and all that came on it."""

    sock: socket.socket
    register: Register
    registered: Registered
    heartbeats: list[Heartbeat] = field(default_factory=list)
    inventory: list[InventoryItem] = field(default_factory=list)
    inventory_complete: bool = False
    done: dict[int, OperationDone] = field(default_factory=dict)
    order: list[OperationDone | ReportInventory] = field(default_factory=list)
    open: bool = True

    def push(self, op: Op, message: object) -> None:
        """Send a command."""
        self.sock.sendall(encode_frame(op, 0, message))


class FakeManager:
    """Registers whoever comes, counts incarnations, records everything, and pushes what a test tells it to."""

    def __init__(
        self, secret: bytes, heartbeat_ms: int = 50, timeout_ms: int = 30_000, port: int = 0, number: int = 7
    ) -> None:
        self.secrets = secrets.derive(secret)
        self.heartbeat_ms = heartbeat_ms
        self.timeout_ms = timeout_ms
        self.number = number
        self.epoch = 1
        self.quarantine_ms = 3000  # for RDMA sessions, which must be renewed within it on a loaded machine too
        self.incarnation = 0
        self.new_incarnation_for_known = False
        self.refuse: PolarKVError | None = None
        self.mute = threading.Event()  # while set, nothing is answered
        self.channels: list[Channel] = []
        self._operation = 0
        self._listener = socket.create_server(("127.0.0.1", port))
        self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def now_ms(self) -> int:
        """The manager's clock."""
        return int(time.monotonic() * 1000) + 5_000_000

    def close(self) -> None:
        """Die: every connection breaks."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.drop_connections()

    def drop_connections(self) -> None:
        """Break the connections that stand."""
        for channel in self.channels:
            with contextlib.suppress(OSError):
                channel.sock.shutdown(socket.SHUT_RDWR)

    def channel(self, role: str, nth: int = 1) -> Channel:
        """The ``nth`` registration of a role, when it has come."""
        return wait_until(
            lambda: next(iter([c for c in self.channels if c.register.role == role][nth - 1 : nth]), None),
            f"registration {nth} of a {role} server",
        )

    def grant(
        self, access: Access, extents: list[Extent], *, deadline_ms: int = 30_000 * SLOWNESS, **changes: int
    ) -> bytes:
        """Sign a grant for the present incarnation; ``deadline_ms`` counts from now."""
        fields = {
            "node": self.number,
            "incarnation": self.incarnation,
            "epoch": self.epoch,
            "holder": 1,
            "tenant": 9,
        } | changes
        return sign(
            Grant(access=access, deadline_ms=self.now_ms() + deadline_ms, extents=extents, **fields),
            self.secrets.grant_key,
        )

    def carve(self, base: int, stride: int) -> None:
        """Carve a slab."""
        self.channel("slab")  # it answers a registration before it notes it
        slab = [c for c in self.channels if c.register.role == "slab"][-1]
        slab.push(Op.CARVE, Carve(self.incarnation, base, stride))

    def send(self, op: Op, key: bytes, *, channel: Channel | None = None, **fields: int) -> int:
        """Send a command to the disk server; return the operation's id."""
        self._operation += 1
        channel = channel or [c for c in self.channels if c.register.role == "disk"][-1]
        channel.push(op, DiskCommand(fields.pop("incarnation", self.incarnation), self._operation, key, **fields))
        return self._operation

    def done(self, operation: int, channel: Channel | None = None) -> OperationDone:
        """How an operation ended, when it has."""
        channel = channel or [c for c in self.channels if c.register.role == "disk"][-1]
        return wait_until(lambda: channel.done.get(operation), f"the end of operation {operation}")

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        channel: Channel | None = None
        try:
            channel = self._register(sock)
            while channel is not None:
                if wait_readable(sock, 60):
                    self._handle(channel, read_frame(sock, time.monotonic() + 10))
        except (EOFError, OSError, PolarKVError):
            pass
        finally:
            if channel is not None:
                channel.open = False
            sock.close()

    def _register(self, sock: socket.socket) -> Channel | None:
        frame = read_frame(sock, time.monotonic() + 10)
        register = decode_body(frame.body, Register)
        if self.refuse is not None:
            sock.sendall(encode_failure(frame.op, frame.request_id, self.refuse))
            return None
        if register.role == "slab" and (register.fresh or self.new_incarnation_for_known):
            self.incarnation += 1
        registered = Registered(
            1, self.epoch, self.number, self.incarnation, self.now_ms(), self.heartbeat_ms, self.timeout_ms,
            self.quarantine_ms,
        )  # fmt: skip
        channel = Channel(sock, register, registered)
        sock.sendall(encode_frame(frame.op, frame.request_id, registered))
        self.channels.append(channel)
        return channel

    def _handle(self, channel: Channel, frame: Frame) -> None:
        if self.mute.is_set():
            return
        answer: object = Empty()
        if frame.op == Op.HEARTBEAT:
            channel.heartbeats.append(decode_body(frame.body, Heartbeat))
            answer = HeartbeatAnswer(self.now_ms())
        elif frame.op == Op.REPORT_INVENTORY:
            report = decode_body(frame.body, ReportInventory)
            channel.inventory += report.items
            channel.order.append(report)
            channel.inventory_complete = channel.inventory_complete or report.last
        elif frame.op == Op.OPERATION_DONE:
            done = decode_body(frame.body, OperationDone)
            channel.order.append(done)
            channel.done[done.operation] = done
        channel.sock.sendall(encode_frame(frame.op, frame.request_id, answer))


def running(start: Callable[[], None]) -> threading.Thread:
    """Run ``start`` in a thread."""
    thread = threading.Thread(target=start, daemon=True)
    thread.start()
    return thread
