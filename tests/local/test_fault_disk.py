"""Disks that are full, missing or someone else's, and machines that are too small."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from polarkv_client.errors import ConfigurationError
from polarkv_client.protocol import grants
from polarkv_client.results import Stored
from polarkv_client.states import Tier
from polarkv_dataplane.disk.server import run_disk
from polarkv_dataplane.disk.settings import DiskSettings
from polarkv_dataplane.embedded import Cluster
from polarkv_dataplane.slab.server import run_slab
from polarkv_dataplane.slab.settings import SlabSettings
from tests.local.support.invariants import settled
from tests.local.support.oracle import Caller, Chunks
from tests.local.support.raw import RawClient
from tests.local.support.world import World, recovers, running

LENGTHS = (100_000,)
DEADLINE_MS = 10_000  # here it is not deadlines that are looked at: a disk may be slow
_never = threading.Event()


def fill(caller: Caller, first: int, count: int, batch: int = 16) -> None:
    """Store many chunks, loading some in between; a store may wait for memory, and none may fail."""
    for start in range(first, first + count, batch):
        numbers = list(range(start, start + batch))
        stored = caller.store(numbers, DEADLINE_MS)
        bad = [chunk for chunk in stored.chunks if chunk.outcome not in {Stored.STORED, Stored.EXISTS}]
        assert not bad, bad[:3]
        caller.load([start // 2, start // 3], DEADLINE_MS)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A mounted ext4 file system of 24 MiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting takes root")
    image, folder = tmp_path / "image", tmp_path / "mounted"
    folder.mkdir()
    with image.open("wb") as file:
        file.truncate(24 << 20)
    try:
        subprocess.run(["mkfs.ext4", "-q", "-F", str(image)], check=True, capture_output=True, timeout=30)
        subprocess.run(["mount", "-o", "loop", str(image), str(folder)], check=True, capture_output=True, timeout=30)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no loop mounts here: {error}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True, timeout=30)


def test_a_file_system_that_is_full_before_its_capacity_evicts(small_disk: Path) -> None:
    # The manager believes in 64 MiB; the file system has 24, and someone else's file takes part of them.
    chunks = Chunks("full file system", LENGTHS)
    (small_disk / "theirs").write_bytes(bytes(4 << 20))
    with running(1, "16MiB", "64MiB", files_at=small_disk / "polarkv", patient=True) as world:
        with world.caller(chunks, wait_for_space_ms=5000) as caller:
            fill(caller, 0, 640)  # 64 MiB of payload
            assert caller.load(list(range(632, 640)), DEADLINE_MS).complete
            tiers = caller.client.exists(chunks.keys(range(640)))
            print(f"full: {tiers.count(Tier.MEMORY)} in memory, {tiers.count(Tier.DISK)} on disk of 640")
            assert tiers.count(Tier.DISK) > 20
            # It stays so, and the disk's owner gets room again when it deletes something.
            (small_disk / "theirs").unlink()
            fill(caller, 1000, 160)
        settled(world)
        assert world.cluster.state()["children"]["disk-0"]["starts"] == 1


def test_a_disk_filled_by_others_to_the_last_byte_never_fails_a_store(small_disk: Path) -> None:
    chunks = Chunks("full to the last", LENGTHS)
    with (
        running(1, "16MiB", "16MiB", files_at=small_disk / "polarkv", patient=True) as world,
        world.caller(chunks, wait_for_space_ms=5000) as caller,
    ):
        fill(caller, 0, 48)
        eat(small_disk / "theirs")
        fill(caller, 100, 320)
        assert caller.load(list(range(412, 420)), DEADLINE_MS).complete
        (small_disk / "theirs").unlink()
        fill(caller, 1000, 160)
        settled(world)
        assert world.cluster.state()["children"]["disk-0"]["starts"] == 1


def eat(path: Path) -> None:
    """Write until the file system is full."""
    with path.open("wb", buffering=0) as file:
        for size in (1 << 20, 4096, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue


def test_the_capacity_is_kept_by_own_accounting() -> None:
    chunks = Chunks("capacity", (30_000, 100_000, 4_000))
    capacity_bytes = 24 << 20
    with (
        running(1, "16MiB", str(capacity_bytes), patient=True) as world,
        world.caller(chunks, wait_for_space_ms=5000) as caller,
    ):
        watched: list[int] = []
        for start in range(0, 960, 160):
            fill(caller, start, 160)
            watched.append(allocated_bytes(world.places.disk(0)))
        print(f"allocated after each 160 chunks: {watched}")
        assert max(watched) <= capacity_bytes
        assert watched[-1] > capacity_bytes // 2
        stats = settled(world)
        # Space that files take, not what the manager hopes: the two may differ by directories alone.
        assert allocated_bytes(world.places.disk(0)) <= capacity_bytes, stats


def test_a_store_that_got_room_for_some_chunks_waits_for_the_others_too() -> None:
    chunks = Chunks("room for some", (1_900_000,))  # one to a slab: eight have room
    with (
        running(1, "16MiB", "64MiB", patient=True) as world,
        world.caller(chunks, wait_for_space_ms=4000) as caller,
    ):
        recovers(caller, list(range(8)))
        with RawClient(world.cluster.connection) as raw:
            assert len(grants.read(raw.acquire(chunks.keys(range(6))).grants[0]).extents) == 6  # until their deadline
            stored = caller.store(list(range(100, 108)), deadline_ms=6000)
        assert stored.stored == 8, stored
        settled(world)


def allocated_bytes(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder / "data"):
        for name in names:
            try:
                total += os.lstat(os.path.join(parent, name)).st_blocks * 512
            except FileNotFoundError:
                continue
    return total


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with running(1, "16MiB", "64MiB") as world:
        yield world


def disk_settings(world: World, **changes: object) -> DiskSettings:
    values: dict[str, object] = {
        "node": "node-0",
        "manager": f"unix://{world.places.socket('manager')}",
        "secret_file": world.places.secret,
        "slab_socket": str(world.places.socket("slab-0")),
        "directories": [world.places.disk(0)],
        "capacity_bytes": 1 << 24,
    }
    return DiskSettings(**(values | changes))


def slab_settings(world: World, **changes: object) -> SlabSettings:
    values: dict[str, object] = {
        "node": "node-9",
        "manager": f"unix://{world.places.socket('manager')}",
        "secret_file": world.places.secret,
        "memory_bytes": 16 << 20,
    }
    return SlabSettings(**(values | changes))


def test_a_directory_in_use_is_refused_and_its_owner_goes_on(world: World) -> None:
    with pytest.raises(ConfigurationError, match="another process uses this directory"):
        run_disk(disk_settings(world))
    with world.caller(Chunks("in use", LENGTHS)) as caller:
        assert recovers(caller, [0, 1]) < 20


def test_a_cluster_directory_in_use_is_refused(world: World) -> None:
    with pytest.raises(ConfigurationError, match=r"polarkv down"), Cluster(1, directory=world.cluster.directory):
        pass
    with world.caller(Chunks("cluster in use", LENGTHS)) as caller:
        assert recovers(caller, [0, 1]) < 20


def test_a_directory_of_another_node_is_refused(world: World, tmp_path: Path) -> None:
    world.cluster.stop()
    try:
        with pytest.raises(ConfigurationError, match="node-0"):
            run_disk(disk_settings(world, node="node-1"))
    finally:
        world.cluster.start()


def test_a_missing_mount_is_refused_before_anything_is_written(world: World, tmp_path: Path) -> None:
    missing = tmp_path / "not mounted"
    with pytest.raises(ConfigurationError, match="mount"):
        run_disk(disk_settings(world, directories=[missing], require_mount=True))
    assert not missing.exists()


def test_memory_beyond_the_machine_is_refused_with_what_there_is(world: World) -> None:
    too_much = psutil.virtual_memory().total * 2
    with pytest.raises(ConfigurationError, match="memory") as caught:
        run_slab(slab_settings(world, memory_bytes=too_much))
    assert caught.value.field == "memory_bytes"
    with pytest.raises(ConfigurationError, match=r"use at most"), Cluster(1, memory=too_much):
        pass


def test_disk_beyond_the_file_system_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"use at most"), Cluster(1, disk="4096TiB"):
        pass
