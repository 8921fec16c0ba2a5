"""Peers that misbehave on purpose, and what the conformance suite needs to talk to good ones."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec

from polarkv_client.layout import stride_bytes
from polarkv_client.protocol import grants
from polarkv_client.protocol.grants import Access, Extent
from polarkv_client.protocol.messages import NodeInfo
from polarkv_client.transport.base import HeldGrant, Pick, Scope, Transport
from polarkv_client.transport.rdma import RdmaTransport
from polarkv_client.transport.shm import ShmTransport
from polarkv_client.transport.tcp import TcpTransport
from polarkv_client.transport.verbs.local import LocalDevices
from tests.support.guest import IN_GUEST, SLOWNESS
from tests.support.slab_process import SlabProcess
from tests.support.small_manager import SmallManager
from tests.support.waiting import wait_until

KINDS = ["shm", "shm-calls", "tcp"]  # and rdma, in the virtual machine of tests/vm
CONNECT_S = 1.0 * SLOWNESS
SIZE = 70_000
# For a loaded machine, or a guest of one slow processor; what would hang here hangs for longer.
SLACK_S = 5.0 * SLOWNESS if IN_GUEST else 1.5


class OwnDevices(RdmaTransport):
    """With devices of its own, which a client shares among its transports."""

    def __init__(self, info: NodeInfo, devices: LocalDevices | None = None) -> None:
        self.devices = devices or LocalDevices()
        super().__init__(info, self.devices, 2, 3 * CONNECT_S)

    def close(self) -> None:
        super().close()
        self.devices.close()


def make(kind: str, info: NodeInfo) -> Transport:
    """A transport of this kind to a node."""
    if kind == "tcp":
        return TcpTransport(info, 2, CONNECT_S)
    if kind.startswith("rdma"):
        return OwnDevices(info, LocalDevices(binding=kind.removeprefix("rdma-")))
    return ShmTransport(info, 2, CONNECT_S, "calls" if kind == "shm-calls" else "auto")


def ways(kind: str) -> dict[str, Any]:
    """The same, as a client's settings."""
    return {"transport": "shm", "shm_copies": "calls"} if kind == "shm-calls" else {"transport": kind}


def key(number: int) -> bytes:
    """The key of the chunk with this number."""
    return number.to_bytes(32, "big")


def payload(length_bytes: int, seed: int = 1) -> bytes:
    """Bytes that differ from place to place and seed to seed."""
    block = bytes((i * 7 + seed * 13 + i // 251) % 256 for i in range(min(length_bytes, 65_521)))
    return (block * (length_bytes // max(len(block), 1) + 1))[:length_bytes]


def soon(seconds: float = 5.0) -> Scope:
    """A scope that ends in so many seconds."""
    return Scope(time.monotonic() + seconds * SLOWNESS)


@dataclass
class Bench:
    """One slab server and a transport to it; hands out extents from its memory, one after the other."""

    slab: SlabProcess
    transport: Transport
    next_bytes: int = 0

    def extents(self, lengths: list[int], first_key: int = 1) -> list[Extent]:
        """New extents of these lengths."""
        made = []
        for index, length_bytes in enumerate(lengths):
            made.append(Extent(index, key(first_key + index), self.next_bytes, length_bytes))
            self.next_bytes += stride_bytes(length_bytes)
        return made

    def grant(self, access: Access, extents: list[Extent], **changes: int) -> HeldGrant:
        """A signed grant for them."""
        signed = self.slab.manager.grant(access, extents, **changes)
        return HeldGrant(signed, grants.read(signed))

    def store(self, chunks: list[bytes], first_key: int = 1) -> list[Extent]:
        """Write chunks; the extents with their checksums, as a manager would grant them for reading."""
        extents = self.extents([len(chunk) for chunk in chunks], first_key)
        grant = self.grant(Access.WRITE, extents)
        self.transport.reach(grant, soon())
        checksums = self.transport.write(grant, picks(extents, list(chunks)), soon())
        return [replace_checksum(extent, checksum) for extent, checksum in zip(extents, checksums, strict=True)]

    def poke(self, offset_bytes: int, data: bytes) -> None:
        """Change the node's memory behind everyone's back."""
        with self.attached() as shm:
            os.pwrite(shm._descriptor, data, offset_bytes)

    def peek(self, offset_bytes: int, size_bytes: int) -> bytes:
        """What lies in the node's memory."""
        with self.attached() as shm:
            return os.pread(shm._descriptor, size_bytes, offset_bytes)

    @contextmanager
    def attached(self) -> Iterator[ShmTransport]:
        shm = ShmTransport(self.slab.info, 1, CONNECT_S)
        shm.reach(self.grant(Access.READ, []), soon())
        yield shm
        shm.close()


def replace_checksum(extent: Extent, checksum: int) -> Extent:
    """The extent with a checksum."""
    return Extent(extent.index, extent.key, extent.offset_bytes, extent.length_bytes, checksum)


def picks(extents: list[Extent], buffers: Sequence[Any]) -> list[Pick]:
    """All extents of a grant, with one buffer or scatter list each."""
    made = []
    for place, (extent, buffer) in enumerate(zip(extents, buffers, strict=True)):
        parts = buffer if isinstance(buffer, list) else [buffer]
        made.append(Pick(place, extent, [memoryview(part) for part in parts]))
    return made


@contextmanager
def impostor(kind: str, serve: Callable[[socket.socket], None], info: NodeInfo, folder: str) -> Iterator[NodeInfo]:
    """A node whose connections are served by ``serve``."""
    if kind.startswith("shm"):
        path = f"{folder}/impostor.sock"
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(path)
        listener.listen()
        fake = msgspec.structs.replace(info, shm=f"unix://{path}")
    else:
        listener = socket.create_server(("127.0.0.1", 0))
        peer = f"127.0.0.1:{listener.getsockname()[1]}"
        fake = msgspec.structs.replace(info, tcp=f"tcp://{peer}", rdma=f"rdma://{peer}/{info.rdma.rpartition('/')[2]}")
    sockets: list[socket.socket] = []

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = listener.accept()
                sockets.append(sock)
                threading.Thread(target=quietly, args=(serve, sock), daemon=True).start()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield fake
    finally:
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        for sock in sockets:
            sock.close()
        thread.join(30)


def quietly(serve: Callable[[socket.socket], None], sock: socket.socket) -> None:
    """Serve, whatever the client does to the connection."""
    with contextlib.suppress(OSError):
        serve(sock)


def black_hole(sock: socket.socket) -> None:
    """Take in everything, answer nothing."""
    while sock.recv(1 << 20):
        pass


@contextmanager
def in_time(seconds: float) -> Iterator[None]:
    """The block takes no longer than ``seconds`` and the slack."""
    begin = time.monotonic()
    yield
    assert time.monotonic() - begin < seconds * SLOWNESS + SLACK_S


def chunks(count: int, size: int = SIZE) -> tuple[list[bytes], list[bytes], list[bytearray]]:
    """Keys, payloads, targets."""
    return (
        [key(n) for n in range(count)],
        [payload(size, n) for n in range(count)],
        [bytearray(size) for _ in range(count)],
    )


def settled(manager: SmallManager, kind: type, count: int = 1) -> list[object]:
    """The requests of a kind that the client sends in the background."""
    wait_until(lambda: len(manager.requests(kind)) >= count, f"{count} {kind.__name__}")
    return manager.requests(kind)
