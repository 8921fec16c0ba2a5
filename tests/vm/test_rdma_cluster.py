"""A whole embedded cluster with RDMA alone: cache nodes on one host's device, the client on the other's."""

from __future__ import annotations

import os
import random
import re
import subprocess
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from polarkv_client.states import Tier
from polarkv_client.sync import SyncClient
from tests.local.support.invariants import settled
from tests.local.support.world import World, running
from tests.support.guest import SLOWNESS
from tests.support.waiting import wait_until

MIB = 1 << 20
NODES = 2
CHUNKS = 80  # of 1 MiB, over twice 32 MiB of memory: the rest is on disk
pytestmark = pytest.mark.in_order
SLABS = [f"slab-{node}" for node in range(NODES)]


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    manager = {
        "quarantine_ms": 3000, "read_lease_ms": 5000, "write_ticket_ms": 5000, "operation_timeout_ms": 10_000,
        "node_timeout_ms": 10_000,  # longer than two slab servers are stopped
    }  # fmt: skip
    slab = {"rdma": "only", "rdma_devices": ["rxe0"]}
    with running(NODES, "32MiB", "256MiB", manager=manager, slab=slab) as made:
        yield made


@pytest.fixture(scope="module")
def client(world: World) -> Iterator[SyncClient]:
    with world.client("auto", rdma_devices="rxe1", deadline_ms=20_000) as made:
        yield made


class Moved:
    """What has gone over the link and through the slab servers, since it was made."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._before = self._now()

    def _now(self) -> dict[str, float]:
        found: dict[str, float] = {"seconds": time.monotonic()}
        for host in ("host0", "host1"):
            sent = Path(f"/sys/class/net/{host}/statistics/tx_bytes").read_text(encoding="ascii")
            found[f"{host} sent"] = int(sent)
        found["slab sockets"] = sum(socket_bytes(self._world.cluster.pid(name)) for name in SLABS)
        found["slab seconds"] = sum(busy_s(self._world.cluster.pid(name)) for name in SLABS)
        return found

    def since(self) -> dict[str, float]:
        return {name: value - self._before[name] for name, value in self._now().items()}


def socket_bytes(pid: int) -> int:
    """What all TCP sockets of a process have sent and received."""
    shown = subprocess.run(["ss", "-Htinp"], capture_output=True, text=True, check=True, timeout=30 * SLOWNESS).stdout
    total = 0
    for head, details in re.findall(r"^(\S.*)\n\s+(.*)$", shown, re.MULTILINE):
        if f"pid={pid}," in head:
            total += sum(map(int, re.findall(r"bytes_(?:sent|received):(\d+)", details)))
    return total


def busy_s(pid: int) -> float:
    """Processor time of a process, its own and the kernel's for it."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    spent_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    assert spent_s > 0  # it has started, at least: the kernel does count
    return spent_s


def all_present(client: SyncClient, keys: list[bytes], chunks: list[np.ndarray]) -> bool:
    return client.store(keys, chunks).present == len(keys)


def chunk(number: int) -> np.ndarray:
    return np.frombuffer(random.Random(number).randbytes(MIB), np.uint8)


KEYS = [number.to_bytes(32, "big") for number in range(CHUNKS)]


def test_everything_moves_by_one_sided_operations_alone(world: World, client: SyncClient) -> None:
    """Stores, memory hits and disk hits: bytes cross the link, none go through the slab servers."""
    payloads = [chunk(number) for number in range(CHUNKS)]
    moved = Moved(world)
    for start in range(0, CHUNKS, 8):
        keys, chunks = KEYS[start : start + 8], payloads[start : start + 8]
        wait_until(partial(all_present, client, keys, chunks), "room for a batch", 30)
    stored = moved.since()
    assert stored["host1 sent"] > CHUNKS * MIB

    tiers = set()
    moved = Moved(world)
    targets = [np.zeros(MIB, np.uint8) for _ in range(8)]
    hits = 0
    for start in [*range(0, CHUNKS, 8), *range(CHUNKS - 16, CHUNKS, 8)]:
        loaded = client.load(KEYS[start : start + 8], targets)
        for place, found in enumerate(loaded.chunks):
            assert found.hit, found
            assert np.array_equal(targets[place], payloads[start + place])
            tiers.add(found.tier)
            hits += 1
    assert tiers == {Tier.MEMORY, Tier.DISK}
    loads = moved.since()
    assert loads["host0 sent"] > hits * MIB
    for phase in (stored, loads):
        assert phase["slab sockets"] < MIB / 4, phase
        # Soft RoCE works at the expense of whoever runs, so that some of it is counted as theirs.
        assert phase["slab seconds"] < 0.5 * phase["seconds"], phase
    print({"stored": stored, "loaded": loads})

    for reached in client.status().nodes:
        assert reached.transport == "rdma"
        assert reached.why.startswith("both ends have it, by ibverbs 20")
        assert "no shm: another host" in reached.why or "shm: the node does not offer it" in reached.why
    counted = client.status().counters
    assert counted["rdma_write_bytes"] >= CHUNKS * MIB
    assert counted["rdma_read_bytes"] == hits * MIB
    assert not {name for name in counted if name.startswith(("tcp_", "shm_"))}
    stats = settled(world)
    assert stats["cross_node_bytes"] == 0
    for node in world.nodes():
        assert node["rdma"].endswith("/rxe0@10.9.0.1")
        assert (node["tcp"], node["shm"]) == ("", "")


def test_the_slab_servers_need_not_even_run(world: World, client: SyncClient) -> None:
    """Stopped, they cannot have done anything: not for long, or the manager gives their nodes up."""
    keys, payloads = KEYS[-4:], [chunk(number) for number in range(CHUNKS - 4, CHUNKS)]
    fresh, fresh_keys = [chunk(500), chunk(501)], [bytes([5] * 32), bytes([6] * 32)]
    targets = [np.zeros(MIB, np.uint8) for _ in keys]
    assert client.load(keys, targets).complete
    for target in targets:
        target[:] = 0
    with world.stopped(SLABS[0]), world.stopped(SLABS[1]):
        loaded = client.load(keys, targets)
        stored = client.store(fresh_keys, fresh)
    assert [found.tier for found in loaded.chunks] == [Tier.MEMORY] * 4
    assert all(map(np.array_equal, targets, payloads))
    assert stored.stored == 2
    assert client.load(fresh_keys, targets[:2]).complete
    assert all(map(np.array_equal, targets, fresh))


def test_a_slab_server_that_is_killed_comes_back_over_rdma(world: World, client: SyncClient) -> None:
    world.cluster.restart("slab-0", 30 * SLOWNESS)
    payloads = [chunk(1000 + number) for number in range(4)]
    keys = [(1000 + number).to_bytes(32, "big") for number in range(4)]
    wait_until(lambda: client.store(keys, payloads).present == 4, "stores on both nodes", 30)
    target = [np.zeros(MIB, np.uint8) for _ in keys]
    assert client.load(keys, target).complete
    assert all(map(np.array_equal, target, payloads))
    assert {node.transport for node in client.status().nodes} <= {"rdma", "none"}


def test_other_ways_are_not_to_be_had(world: World) -> None:
    with world.client("tcp") as other:
        stored = other.store([b"t" * 32], [bytes(1000)]).chunks[0]
        assert not other.exists([b"t" * 32])[0]
        assert stored.outcome == "failed"
        (node,) = other.status().nodes[:1]
        assert "tcp: the node does not offer it" in node.why
