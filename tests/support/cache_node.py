"""A slab server and a disk server beside a scripted manager, in this process, on real sockets and files."""

from __future__ import annotations

import os
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from polarkv_client import layout
from polarkv_client.protocol.grants import Access, Extent
from polarkv_client.protocol.messages import Empty, Op, SlabRead, SlabWrite
from polarkv_client.protocol.wire import Connection, decode_body, encode_frame, raise_failure
from polarkv_dataplane.disk.server import DiskServer
from polarkv_dataplane.disk.settings import DiskSettings
from polarkv_dataplane.runtime.stopping import Stop
from polarkv_dataplane.runtime.stream import read_frame, receive_into
from polarkv_dataplane.slab.server import SlabServer
from polarkv_dataplane.slab.settings import SlabSettings
from tests.support.fake_manager import FakeManager
from tests.support.waiting import wait_until

SECRET = b"a secret of the whole cluster"
MIB = 1 << 20


def secret_file(folder: Path) -> Path:
    """Write the cluster's secret into ``folder``."""
    path = folder / "secret"
    path.write_bytes(SECRET)
    return path


def chunk(number: int, length_bytes: int = 100_000) -> tuple[bytes, bytes, int]:
    """(key, payload, checksum) of a chunk made from its number."""
    payload = bytes(os.urandom(64)) * (length_bytes // 64 + 1)
    payload = payload[:length_bytes]
    return number.to_bytes(32, "big"), payload, layout.checksum([payload])


@contextmanager
def slab_server(manager: FakeManager, folder: Path, **changes: object) -> Iterator[SlabServer]:
    """Run a slab server in threads."""
    values: dict[str, object] = {
        "node": "node-1",
        "manager": manager.endpoint,
        "secret_file": secret_file(folder),
        "memory_bytes": 32 * MIB,
        "slab_bytes": 4 * MIB,
        "unix_socket": str(folder / "slab.sock"),
        "stall_timeout_ms": 10_000,  # longer than a busy machine makes a peer pause
    }
    stop = Stop()
    server = SlabServer(SlabSettings(**(values | changes)), stop)
    server.start()
    try:
        yield server
    finally:
        stop.set()
        server.stop()


@contextmanager
def registered_slab(manager: FakeManager, folder: Path, **changes: object) -> Iterator[SlabServer]:
    """The same, once it serves: its manager knows it sooner than it knows that itself."""
    with slab_server(manager, folder, **changes) as server:
        wait_until(lambda: server.counters.snapshot().get("polarkv_slab_registrations_total"), "the registration")
        yield server


@contextmanager
def disk_server(manager: FakeManager, folder: Path, **changes: object) -> Iterator[DiskServer]:
    """Run a disk server in threads."""
    values: dict[str, object] = {
        "node": "node-1",
        "manager": manager.endpoint,
        "secret_file": secret_file(folder),
        "slab_socket": str(folder / "slab.sock"),
        "directories": [folder / "disk"],
        "capacity_bytes": 64 * MIB,
    }
    stop = Stop()
    server = DiskServer(DiskSettings(**(values | changes)), stop)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        stop.set()
        thread.join(30)
        assert not thread.is_alive()


class TcpClient:
    """The least that speaks the slab server's TCP path."""

    def __init__(self, endpoint: str, timeout_s: float = 30.0) -> None:
        self.deadline = time.monotonic() + timeout_s
        self.connection = Connection.open(endpoint, self.deadline)
        self.sock = self.connection.sock
        self.sock.settimeout(timeout_s)

    def ask(self, op: Op, message: object) -> None:
        """Send a request and do not wait."""
        self.sock.sendall(encode_frame(op, 1, message))

    def answer(self) -> None:
        """Wait for an OK answer; raise what the server reports."""
        frame = read_frame(self.sock, self.deadline)
        raise_failure(frame)
        decode_body(frame.body, Empty)

    def write(self, grant: bytes, chunks: list[tuple[bytes, int]]) -> None:
        """Write (payload, checksum) pairs to the grant's extents in order."""
        self.ask(Op.SLAB_WRITE, SlabWrite(grant, list(range(len(chunks)))))
        for payload, checksum in chunks:
            self.sock.sendall(payload)
            self.sock.sendall(struct.pack("<Q", checksum))
        self.answer()

    def read(self, grant: bytes, lengths: list[int]) -> list[tuple[layout.Header | None, bytes]]:
        """Read the grant's extents in order: (header, payload) of each."""
        self.ask(Op.SLAB_READ, SlabRead(grant, list(range(len(lengths)))))
        self.answer()
        found = []
        for length_bytes in lengths:
            raw = bytearray(layout.HEADER_BYTES + length_bytes)
            receive_into(self.sock, memoryview(raw), self.deadline)
            found.append((layout.unpack_header(raw), bytes(raw[layout.HEADER_BYTES :])))
        return found

    def close(self) -> None:
        self.connection.close()


def store(manager: FakeManager, offset: int, number: int, length_bytes: int = 100_000) -> tuple[bytes, bytes, int]:
    """Write a chunk over TCP; return it."""
    key, payload, checksum = chunk(number, length_bytes)
    client = TcpClient(manager.channel("slab").register.tcp)
    try:
        client.write(manager.grant(Access.WRITE, [Extent(0, key, offset, length_bytes)]), [(payload, checksum)])
    finally:
        client.close()
    return key, payload, checksum
