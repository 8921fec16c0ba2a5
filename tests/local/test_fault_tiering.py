"""The metric of cross-node tiering is evidence, not a constant: it moves when a disk server's bytes went elsewhere."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator

import pytest

from polarkv_client.errors import Refused
from polarkv_client.keys import join_keys
from polarkv_client.protocol import grants
from polarkv_client.protocol import messages as m
from polarkv_client.protocol.messages import Op
from polarkv_client.protocol.wire import WIRE_VERSION, Connection, Frame, decode_body, encode_frame
from tests.local.support.oracle import Chunks
from tests.local.support.raw import RawClient
from tests.local.support.world import World, running
from tests.support.waiting import wait_until

LOCAL = "polarkv_tiering_local_bytes_total"
METRIC = "polarkv_tiering_cross_node_bytes_total"
POOL, HOST = "the pool", "this host"
CALL_S = 30.0
MEMORY_BYTES = 256 << 20  # more than the real node has: most keys come here


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    # The node below sends no heartbeats, and whoever plays it has a ticket and an operation under way.
    long = {"node_timeout_ms": 60_000, "write_ticket_ms": 30_000, "operation_timeout_ms": 60_000}
    with running(1, "16MiB", "64MiB", manager=long) as world:
        yield world


class FakeNode:
    """Both servers of a cache node, by hand: they claim what they are told to."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.name = f"fake-{uuid.uuid4()}"
        self.slab = self._open()
        self.registered = self._register(self.slab, "slab", 0, POOL, HOST)
        self._inventory(self.slab)
        self.disk: Connection | None = None

    def attach_disk(self, pool: str = POOL, host: str = HOST) -> Connection:
        """Its disk server. Raises what the manager says."""
        disk = self._open()
        try:
            self._register(disk, "disk", self.registered.incarnation, pool, host)
        except BaseException:
            disk.close()
            raise
        self.disk = disk
        self._inventory(disk)
        return disk

    def next_command(self) -> tuple[Frame, m.DiskCommand]:
        """What the manager asks of the disk server; other frames are passed over."""
        assert self.disk is not None
        deadline = time.monotonic() + CALL_S
        while True:
            frame = self._receive(self.disk, deadline)
            if frame.op in {Op.OFFLOAD, Op.LOAD, Op.PURGE}:
                return frame, decode_body(frame.body, m.DiskCommand)

    def done(self, command: m.DiskCommand, moved_bytes: int, pool: str) -> None:
        """Claim that a command moved so many bytes from or to ``pool``."""
        assert self.disk is not None
        life = self.registered
        claim = m.OperationDone(
            life.number, life.incarnation, command.operation, m.OperationResult.OK, moved_bytes, pool
        )
        self.disk.send(encode_frame(Op.OPERATION_DONE, 9, claim), time.monotonic() + CALL_S)

    def close(self) -> None:
        for connection in (self.slab, self.disk):
            if connection is not None:
                connection.close()

    def _open(self) -> Connection:
        return Connection.open(f"unix://{self._world.places.socket('manager')}", time.monotonic() + CALL_S)

    def _register(self, connection: Connection, role: str, incarnation: int, pool: str, host: str) -> m.Registered:
        request = m.Register(
            WIRE_VERSION, WIRE_VERSION, self._world.node_token(), role, self.name, incarnation, pool, host,
            memory_bytes=MEMORY_BYTES, slab_bytes=1 << 20, disk_bytes=1 << 28, tcp="tcp://127.0.0.1:1",
        )  # fmt: skip
        return connection.call(Op.REGISTER, request, m.Registered, time.monotonic() + CALL_S)

    def _inventory(self, connection: Connection) -> None:
        life = self.registered
        report = m.ReportInventory(life.number, life.incarnation, [], last=True)
        connection.send(encode_frame(Op.REPORT_INVENTORY, 2, report), time.monotonic() + CALL_S)

    @staticmethod
    def _receive(connection: Connection, deadline: float) -> Frame:
        connection.sock.settimeout(max(deadline - time.monotonic(), 0.001))
        head = connection.sock.recv(16, 0x100)  # MSG_WAITALL: frames may come together
        length_bytes = int.from_bytes(head[8:12], "little")
        body = connection.sock.recv(length_bytes, 0x100) if length_bytes else b""
        return Frame(head[3], int.from_bytes(head[4:8], "little"), head[12], body)


@pytest.fixture
def fake(world: World) -> Iterator[FakeNode]:
    node = FakeNode(world)
    yield node
    node.close()


def offload_command(world: World, fake: FakeNode) -> m.DiskCommand:
    """Commit a chunk on the fake node; the command that copies it to its disk."""
    chunks = Chunks(fake.name + str(time.monotonic()))
    with RawClient(world.cluster.connection) as raw:

        def placed() -> m.DiskCommand | None:
            number = placed.tried = placed.tried + 1  # type: ignore[attr-defined]
            key = chunks.key(number)
            answer = raw.begin([key], 5000)
            if not answer.ticket or grants.read(answer.grants[0]).node != fake.registered.number:
                return None
            commit = m.CommitStore(answer.ticket, join_keys([key]), [12345])
            outcomes = raw.connection.call(Op.COMMIT_STORE, commit, m.Outcomes, time.monotonic() + CALL_S).outcomes
            assert outcomes == b"\x00"
            return fake.next_command()[1]

        placed.tried = 0  # type: ignore[attr-defined]
        command = wait_until(placed, "a chunk to be placed on the fake node")
    assert command is not None
    return command


def test_only_bytes_of_another_memory_count(world: World, fake: FakeNode) -> None:
    fake.attach_disk()
    local_bytes = world.metric(LOCAL)
    fake.done(offload_command(world, fake), 8192, POOL)
    wait_until(lambda: world.metric(LOCAL) == local_bytes + 8192, "the claim to be counted")
    assert world.metric(METRIC) == 0
    fake.done(offload_command(world, fake), 4096, "another pool")
    wait_until(lambda: world.metric(METRIC) == 4096, "the claim to be counted")
    assert world.stats()["cross_node_bytes"] == 4096


@pytest.mark.parametrize(("pool", "host"), [("another pool", HOST), (POOL, "another host")])
def test_a_disk_server_that_is_not_paired_is_refused(world: World, fake: FakeNode, pool: str, host: str) -> None:
    with pytest.raises(Refused, match="its own slab server"):
        fake.attach_disk(pool, host)
