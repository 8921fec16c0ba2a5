"""The disk server as a whole, beside a real slab server: commands, fences, inventories, and its ends."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from polarkv_client import layout
from polarkv_client.protocol.messages import Op, OperationDone, OperationResult, ReportInventory
from polarkv_dataplane.disk.executor import Task
from polarkv_dataplane.disk.server import DiskServer
from polarkv_dataplane.embedded.supervisor import STOP_S
from polarkv_dataplane.slab.server import SlabServer
from tests.support.cache_node import MIB, SECRET, disk_server, secret_file, slab_server, store
from tests.support.fake_manager import FakeManager
from tests.support.processes import server_process
from tests.support.waiting import wait_until

OK, NO_SPACE, MISSING, DAMAGED, FAILED = OperationResult


@pytest.fixture
def disk(manager: FakeManager, slab: SlabServer, tmp_path: Path) -> Iterator[DiskServer]:
    with disk_server(manager, tmp_path) as server:
        manager.channel("disk")
        yield server


class Chunk:
    """A chunk that lies in memory."""

    def __init__(self, manager: FakeManager, number: int, offset: int = 0, length_bytes: int = 100_000) -> None:
        self.key, self.payload, self.checksum = store(manager, offset, number, length_bytes)
        self.fields: dict[str, Any] = {
            "offset_bytes": offset, "length_bytes": length_bytes, "checksum": self.checksum, "tenant": 9,
        }  # fmt: skip

    def path(self, folder: Path) -> Path:
        name = self.key.hex()
        return folder / "data" / name[:2] / name[2:4] / name


def result(manager: FakeManager, op: Op, item: Chunk, **changes: int) -> OperationDone:
    return manager.done(manager.send(op, item.key, **(item.fields | changes)))


def test_down_up_and_away(manager: FakeManager, slab: SlabServer, disk: DiskServer, tmp_path: Path) -> None:
    item = Chunk(manager, 1, 4096)
    done = result(manager, Op.OFFLOAD, item)
    assert (done.result, done.moved_bytes, done.pool) == (OK, layout.stride_bytes(100_000), slab.pool.id)
    path = item.path(tmp_path / "disk")
    assert path.read_bytes() == slab.pool.view[4096 : 4096 + done.moved_bytes]
    assert disk.index.used_bytes == path.stat().st_blocks * 512
    elsewhere = 8 * MIB
    assert result(manager, Op.LOAD, item, offset_bytes=elsewhere).result == OK
    header = layout.expect_header(slab.pool.view[elsewhere : elsewhere + 64], item.key, 100_000)
    assert (header.checksum, header.tenant) == (item.checksum, 9)
    assert slab.pool.view[elsewhere + 64 : elsewhere + 64 + 100_000] == item.payload
    assert result(manager, Op.PURGE, item).result == OK
    assert not path.exists()
    assert disk.index.used_bytes == 0
    assert result(manager, Op.LOAD, item).result == MISSING
    assert result(manager, Op.PURGE, item).result == OK  # purging nothing is done at once


def test_memory_that_does_not_match_is_not_offloaded(
    manager: FakeManager, slab: SlabServer, disk: DiskServer, tmp_path: Path
) -> None:
    item = Chunk(manager, 1)
    assert result(manager, Op.OFFLOAD, item, checksum=item.checksum ^ 1).result == DAMAGED
    assert result(manager, Op.OFFLOAD, item, length_bytes=99_999).result == DAMAGED
    slab.pool.view[9000] ^= 1
    done = result(manager, Op.OFFLOAD, item)
    assert done.result == DAMAGED
    assert "do not match" in done.text
    assert not item.path(tmp_path / "disk").exists()
    assert disk.index.used_bytes == 0


def test_a_damaged_file_is_deleted_and_its_slot_empty(
    manager: FakeManager, slab: SlabServer, disk: DiskServer, tmp_path: Path
) -> None:
    item = Chunk(manager, 1)
    assert result(manager, Op.OFFLOAD, item).result == OK
    path = item.path(tmp_path / "disk")
    raw = bytearray(path.read_bytes())
    raw[50_000] ^= 1
    path.write_bytes(raw)
    assert result(manager, Op.LOAD, item).result == DAMAGED
    assert layout.unpack_header(slab.pool.view[:64]) is None
    assert not path.exists()
    assert disk.index.used_bytes == 0
    assert result(manager, Op.LOAD, item).result == MISSING


def test_slots_outside_the_memory_are_refused(manager: FakeManager, disk: DiskServer) -> None:
    item = Chunk(manager, 1)
    for changes in (
        {"offset_bytes": 32 * MIB - 4096},
        {"offset_bytes": -4096},
        {"offset_bytes": 100},
        {"length_bytes": -1},
    ):
        done = result(manager, Op.OFFLOAD, item, **changes)
        assert done.result == FAILED and done.text
    assert manager.done(manager.send(Op.PURGE, b"short")).result == FAILED


def test_the_capacity_is_held_and_freed(manager: FakeManager, slab: SlabServer, tmp_path: Path) -> None:
    with disk_server(manager, tmp_path, capacity_bytes=2 * MIB) as disk:
        manager.channel("disk")
        first, second = Chunk(manager, 1, 0, MIB), Chunk(manager, 2, 2 * MIB, MIB)
        assert result(manager, Op.OFFLOAD, first).result == OK
        assert result(manager, Op.OFFLOAD, first).result == OK  # again: takes the place of the first
        done = result(manager, Op.OFFLOAD, second)
        assert done.result == NO_SPACE and "2097152" in done.text
        assert result(manager, Op.PURGE, first).result == OK
        assert result(manager, Op.OFFLOAD, second).result == OK
        assert MIB < disk.index.used_bytes <= 2 * MIB


def test_commands_of_other_incarnations_are_dropped(
    manager: FakeManager, slab: SlabServer, disk: DiskServer, tmp_path: Path
) -> None:
    item = Chunk(manager, 1)
    late = manager.send(Op.OFFLOAD, item.key, **item.fields, incarnation=99)
    assert result(manager, Op.PURGE, item).result == OK  # behind it
    wait_until(lambda: disk.counters.snapshot().get("polarkv_disk_stale_commands_total") == 1, "the count")
    assert late not in manager.channel("disk").done
    assert not item.path(tmp_path / "disk").exists()


def test_purge_and_offload_of_one_key_keep_their_order(
    manager: FakeManager, slab: SlabServer, disk: DiskServer, tmp_path: Path
) -> None:
    item = Chunk(manager, 1, 0, 2 * MIB)
    operations = [manager.send(op, item.key, **item.fields) for _ in range(10) for op in (Op.OFFLOAD, Op.PURGE)]
    last = manager.send(Op.OFFLOAD, item.key, **item.fields)
    assert manager.done(last).result == OK
    ended = [message.operation for message in manager.channel("disk").order if isinstance(message, OperationDone)]
    assert ended == [*operations, last]
    assert item.path(tmp_path / "disk").exists()


def test_many_operations_at_once_all_end(manager: FakeManager, slab: SlabServer, disk: DiskServer) -> None:
    items = [Chunk(manager, number, number * MIB, 500_000) for number in range(1, 30)]
    for op in (Op.OFFLOAD, Op.LOAD):
        operations = [manager.send(op, item.key, **item.fields) for item in items]
        assert [manager.done(operation).result for operation in operations] == [OK] * len(items)
    for item in items:
        start = item.fields["offset_bytes"] + 64
        assert slab.pool.view[start : start + 500_000] == item.payload


def test_a_full_queue_refuses_and_serves_on(manager: FakeManager, slab: SlabServer, tmp_path: Path) -> None:
    with disk_server(manager, tmp_path, io_threads=1, queue_length=2) as disk:
        manager.channel("disk")
        item = Chunk(manager, 1)
        gate = threading.Event()
        write = disk.files.write
        disk.files.write = lambda *a: (gate.wait(30), write(*a))[1]  # type: ignore[method-assign]
        held = [manager.send(Op.OFFLOAD, item.key, **item.fields) for _ in range(2)]
        refused = manager.done(manager.send(Op.OFFLOAD, item.key, **item.fields))
        assert refused.result == FAILED and "queue is full" in refused.text
        gate.set()
        assert [manager.done(operation).result for operation in held] == [OK, OK]


def test_an_operation_that_waited_too_long_is_refused(manager: FakeManager, slab: SlabServer, tmp_path: Path) -> None:
    with disk_server(manager, tmp_path, io_threads=1, operation_timeout_ms=1000) as disk:
        manager.channel("disk")
        item, other = Chunk(manager, 1), Chunk(manager, 2, MIB)
        assert result(manager, Op.OFFLOAD, other).result == OK
        gate = threading.Event()
        write = disk.files.write
        disk.files.write = lambda *a: (gate.wait(30), write(*a))[1]  # type: ignore[method-assign]
        first = manager.send(Op.OFFLOAD, item.key, **item.fields)
        wait_until(lambda: len(disk.executor) == 1, "the first")
        late = manager.send(Op.LOAD, other.key, **other.fields)
        wait_until(lambda: len(disk.executor) == 2, "the second")
        begun = time.monotonic()
        wait_until(lambda: time.monotonic() > begun + 1.05, "its time")
        slab.pool.view[MIB : MIB + 64] = b"\xee" * 64  # its slot is another's by now
        gate.set()
        assert manager.done(first).result == OK
        done = manager.done(late)
        assert done.result == FAILED and "longer" in done.text
        assert slab.pool.view[MIB : MIB + 64] == b"\xee" * 64


def test_no_load_begins_once_the_manager_is_silent(tmp_path: Path) -> None:
    manager = FakeManager(SECRET, heartbeat_ms=20, timeout_ms=1500)
    try:
        with slab_server(manager, tmp_path) as slab, disk_server(manager, tmp_path, io_threads=1) as disk:
            manager.channel("disk")
            item = Chunk(manager, 1)
            assert result(manager, Op.OFFLOAD, item).result == OK
            gate, read = threading.Event(), disk.files.read
            disk.files.read = lambda *a: (gate.wait(30), read(*a))[1]  # type: ignore[method-assign]
            manager.send(Op.LOAD, item.key, **item.fields)
            wait_until(lambda: len(disk.executor) == 1, "the load")
            manager.mute.set()
            wait_until(lambda: disk.counters.snapshot().get("polarkv_link_losses_total", 0) >= 1, "the loss")
            slab.pool.view[:64] = b"\xee" * 64
            assert len([c for c in manager.channels if c.register.role == "disk"]) == 1  # it waits for the load to end
            gate.set()
            manager.mute.clear()
            manager.channel("disk", 2)
            assert slab.pool.view[:64] == b"\xee" * 64
    finally:
        manager.close()


def test_a_restarted_manager_is_told_from_memory(manager: FakeManager, slab: SlabServer, disk: DiskServer) -> None:
    items = [Chunk(manager, number, number * MIB) for number in range(1, 6)]
    for item in items:
        assert result(manager, Op.OFFLOAD, item).result == OK
    assert result(manager, Op.PURGE, items[0]).result == OK
    manager.epoch = 2
    manager.drop_connections()
    channel = manager.channel("disk", 2)
    wait_until(lambda: channel.inventory_complete, "the inventory")
    assert {(i.key, i.length_bytes, i.checksum, i.tenant, i.offset_bytes) for i in channel.inventory} == {
        (item.key, 100_000, item.checksum, 9, -1) for item in items[1:]
    }
    assert (channel.register.fresh, channel.register.disk_used_bytes) == (False, disk.index.used_bytes)
    assert result(manager, Op.LOAD, items[1]).result == OK


def test_a_restarted_disk_server_finds_its_files(manager: FakeManager, slab: SlabServer, tmp_path: Path) -> None:
    folders = [tmp_path / "d0", tmp_path / "d1"]
    with disk_server(manager, tmp_path, directories=folders) as disk:
        manager.channel("disk")
        items = [Chunk(manager, number, number * MIB) for number in range(1, 7)]
        for item in items:
            assert result(manager, Op.OFFLOAD, item).result == OK
        used_bytes = disk.index.used_bytes
    paths = [item.path(folders[item.key[-1] % 2]) for item in items]
    assert all(path.exists() for path in paths)
    os.truncate(paths[0], 5000)
    paths[1].write_bytes(paths[3].read_bytes())  # another key's file
    odd = paths[2].parent / "notes.txt"
    odd.write_text("not ours")
    with disk_server(manager, tmp_path, directories=[*reversed(folders)]) as disk:
        channel = manager.channel("disk", 2)
        wait_until(lambda: channel.inventory_complete, "the inventory")
        assert {item.key for item in channel.inventory} == {item.key for item in items[2:]}
        wait_until(lambda: not paths[0].exists() and not paths[1].exists(), "bad files to be removed")
        assert odd.exists()
        assert disk.index.used_bytes == used_bytes * 4 // 6
        assert disk.counters.snapshot()["polarkv_disk_scan_rejected_total"] == 3
        assert result(manager, Op.LOAD, items[2]).result == OK
        assert slab.pool.view[3 * MIB + 64 : 3 * MIB + 64 + 100_000] == items[2].payload


def test_commands_are_served_while_the_scan_runs(manager: FakeManager, slab: SlabServer, tmp_path: Path) -> None:
    """A purge during the scan must not come back through it."""
    with disk_server(manager, tmp_path):
        manager.channel("disk")
        items = [Chunk(manager, number, number * MIB) for number in (1, 2)]
        for item in items:
            assert result(manager, Op.OFFLOAD, item).result == OK
    gate = threading.Event()
    from polarkv_dataplane.disk import scan

    real = scan.read_header

    def held(path: str, key: bytes) -> object:
        found = real(path, key)
        gate.wait(30)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scan, "read_header", held)
        with disk_server(manager, tmp_path) as disk:
            channel = manager.channel("disk", 2)
            assert result(manager, Op.LOAD, items[0]).result == OK  # before the scan has said that it is there
            assert result(manager, Op.PURGE, items[1]).result == OK
            assert not channel.inventory_complete
            gate.set()
            wait_until(lambda: channel.inventory_complete, "the inventory")
            reported = [i for r in channel.order if isinstance(r, ReportInventory) for i in r.items]
            assert items[1].key not in {item.key for item in reported}
            assert len(disk.index) == 1


def test_a_new_slab_is_attached_to_after_all_work_on_the_old_one_ended(manager: FakeManager, tmp_path: Path) -> None:
    with slab_server(manager, tmp_path) as first, disk_server(manager, tmp_path) as disk:
        manager.channel("disk")
        item = Chunk(manager, 1)
        assert result(manager, Op.OFFLOAD, item).result == OK
        old_pool = first.pool.id
        gate, read = threading.Event(), disk.files.read
        disk.files.read = lambda *a: (gate.wait(30), read(*a))[1]  # type: ignore[method-assign]
        manager.send(Op.LOAD, item.key, **item.fields)
        wait_until(lambda: len(disk.executor) == 1, "the load")
        first.stop()
        with slab_server(manager, tmp_path) as second:
            wait_until(lambda: manager.incarnation == 2, "the second life")
            assert len([c for c in manager.channels if c.register.role == "disk"]) == 1
            gate.set()
            channel = manager.channel("disk", 2)
            assert (channel.register.incarnation, channel.register.pool) == (2, second.pool.id)
            assert second.pool.id != old_pool
            wait_until(lambda: channel.inventory_complete, "the inventory")
            assert [i.key for i in channel.inventory] == [item.key]
            done = result(manager, Op.LOAD, item)
            assert (done.result, done.pool) == (OK, second.pool.id)
            assert second.pool.view[64 : 64 + 100_000] == item.payload


def test_a_new_incarnation_of_the_same_slab_is_followed(
    manager: FakeManager, slab: SlabServer, disk: DiskServer
) -> None:
    manager.new_incarnation_for_known = True
    next(c for c in manager.channels if c.register.role == "slab").sock.shutdown(2)
    wait_until(lambda: manager.incarnation >= 2, "the second life")
    wait_until(
        lambda: (
            [c for c in manager.channels if c.register.role == "disk"][-1].register.incarnation == manager.incarnation
        ),
        "the disk server to follow",
    )
    item = Chunk(manager, 1)
    assert result(manager, Op.OFFLOAD, item).result == OK


def test_a_purge_that_waited_for_long_is_carried_out_all_the_same(
    manager: FakeManager, slab: SlabServer, tmp_path: Path
) -> None:
    """Kind: a purge dropped by its age left a file of which no entry knew."""
    with disk_server(manager, tmp_path, operation_timeout_ms=1, io_threads=1) as disk:
        manager.channel("disk")
        item = Chunk(manager, 1)
        path = item.path(tmp_path / "disk")
        wait_until(lambda: result(manager, Op.OFFLOAD, item).result == OK, "an offload that does not wait")
        go_on, began = threading.Event(), threading.Event()

        def busy() -> None:
            began.set()
            go_on.wait(30)

        assert disk.executor.submit(Task(b"another key", busy, fenced=False))
        assert began.wait(30)
        came_at = time.monotonic()
        load, purge = manager.send(Op.LOAD, item.key, **item.fields), manager.send(Op.PURGE, item.key)
        wait_until(lambda: len(disk.executor) == 3 and time.monotonic() - came_at > 0.01, "both to have waited")
        go_on.set()
        late = manager.done(load)
        assert late.result == FAILED and "waited longer" in late.text
        assert manager.done(purge).result == OK
        assert not path.exists()


def test_a_disk_server_says_over_how_many_volumes_it_spreads(
    manager: FakeManager, slab: SlabServer, tmp_path: Path
) -> None:
    with disk_server(manager, tmp_path, directories=[tmp_path / "a", tmp_path / "b"]):
        assert manager.channel("disk").register.volumes == 2


def settings(manager: FakeManager, tmp_path: Path) -> dict[str, object]:
    return {
        "node": "node-1", "manager": manager.endpoint, "secret_file": secret_file(tmp_path),
        "slab_socket": str(tmp_path / "slab.sock"), "directories": [str(tmp_path / "disk")], "capacity_bytes": 64 * MIB,
    }  # fmt: skip


def test_the_process_ends_cleanly_on_sigterm_even_without_a_slab(manager: FakeManager, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with server_process("disk", settings(manager, tmp_path), log) as process:
        wait_until((tmp_path / "disk" / "data").exists, "its start")
        wait_until(lambda: "cannot attach" in log.read_text(), "a line that says what is missing")
        with slab_server(manager, tmp_path):
            wait_until(lambda: "ready disk node=node-1 incarnation=1" in log.read_text(), "the ready line")
            asked_at = time.monotonic()
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
            assert time.monotonic() - asked_at < STOP_S


def test_a_killed_process_is_followed_by_one_that_serves_its_files(
    manager: FakeManager, slab: SlabServer, tmp_path: Path
) -> None:
    with server_process("disk", settings(manager, tmp_path), tmp_path / "log"):
        manager.channel("disk")
        item = Chunk(manager, 1)
        assert result(manager, Op.OFFLOAD, item).result == OK
    with server_process("disk", settings(manager, tmp_path), tmp_path / "log"):
        channel = manager.channel("disk", 2)
        wait_until(lambda: channel.inventory_complete, "the inventory")
        assert [i.key for i in channel.inventory] == [item.key]
        assert result(manager, Op.LOAD, item).result == OK
        # a second opener of the same directory, meanwhile
        with server_process("disk", settings(manager, tmp_path), tmp_path / "log2") as second:
            assert second.wait(20) != 0
        assert "another process uses this directory" in (tmp_path / "log2").read_text()
        assert result(manager, Op.LOAD, item).result == OK
