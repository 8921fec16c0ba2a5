"""What an entry costs the manager: bytes at a million keys, and a lookup's time as the manager fills."""

from __future__ import annotations

import gc
import hashlib
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from polarkv_client.protocol.messages import InventoryItem
from polarkv_dataplane.manager.core.directory import Directory
from polarkv_dataplane.manager.records.model import Settings
from tests.support.managers import Client, FakeNode, ManagerProcess, make_settings

MILLION = 1_000_000
BYTES_A_KEY = 400
P99_RATIO = 1.5
SLAB_BYTES = 64 << 20
LENGTH_BYTES = 4000
BATCH = 1000


def keys_of(first: int, count: int) -> list[bytes]:
    """Full-width keys, none of whose bytes are shared with another's."""
    numbers = range(first, first + count)
    return [hashlib.blake2b(number.to_bytes(8, "big"), digest_size=32).digest() for number in numbers]


def filled(count: int, mixed: bool) -> Directory:
    """A directory of ``count`` keys: stored into memory, or (``mixed``) also a third on disk and a third in both."""
    directory = Directory(Settings(offload_ahead=False))
    members, now = directory.members, 1
    memory_bytes = -(-count * 4096 // SLAB_BYTES) * SLAB_BYTES
    node = members.join("n", 0, memory_bytes, SLAB_BYTES, True, now)
    members.prove_memory(node, [], True, now)
    members.attach_disk(node, 2 * memory_bytes, now)
    tenant = directory.ledger.tenant(1)
    for first in range(0, count, BATCH):
        keys = keys_of(first, min(BATCH, count - first))
        third = len(keys) // 3 if mixed else 0
        granted = directory.begin_store(keys[third:], [LENGTH_BYTES] * (len(keys) - third), tenant, now)
        checksums = [2**63 + number for number in range(first, first + len(keys))]  # as wide as real ones
        directory.commit_store(granted.number, keys[third:], checksums[third:], now)
        found = [InventoryItem(key, LENGTH_BYTES, told, 1) for key, told in zip(keys, checksums, strict=True)]
        members.prove_disk(node, found[: 2 * third], now)
        directory.ledger.take_effects()
    assert len(directory.ledger.entries) == count
    return directory


def resident_bytes() -> int:
    fields = Path("/proc/self/statm").read_text(encoding="ascii").split()
    return int(fields[1]) * 4096


def measure(mixed: bool) -> float:
    """Bytes a key, as the operating system sees them. Run in a process of its own."""
    filled(1000, mixed)
    gc.collect()
    before = resident_bytes()
    directory = filled(MILLION, mixed)
    gc.collect()
    after = resident_bytes()
    return (after - before) / len(directory.ledger.entries)


@pytest.mark.deep
@pytest.mark.timeout(300)
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc")
@pytest.mark.parametrize("mixed", [False, True], ids=["in memory", "mixed states"])
def test_a_million_keys_cost_at_most_400_bytes_each(mixed: bool) -> None:
    code = f"from tests.model.test_budget import measure; print(measure({mixed}))"
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=280, check=False)
    assert run.returncode == 0, run.stderr
    spent = float(run.stdout)
    print(f"\n{spent:.0f} bytes a key")
    assert 100 < spent <= BYTES_A_KEY


def quantile(values: list[int], part: float) -> int:
    return sorted(values)[int(len(values) * part)]


@contextmanager
def manager_with(count: int, folder: Path) -> Iterator[Client]:
    """A manager in a process of its own whose one node has reported ``count`` files; yield a client of it."""
    folder.mkdir()
    settings = make_settings(folder, ready_file=folder / "ready", node_timeout_ms=30_000)
    with ManagerProcess(settings) as process:
        running = process.start()
        with FakeNode(running.unix, disk_bytes=1 << 40, auto=None) as node:
            for first in range(0, count, 5 * BATCH):
                keys = keys_of(first, min(5 * BATCH, count - first))
                found = [InventoryItem(key, LENGTH_BYTES, 2**63 + 1, 1) for key in keys]
                node.on_disk.inventory(found, last=first + 5 * BATCH >= count)
            with Client(running.unix) as client:
                yield client


@pytest.mark.deep
@pytest.mark.timeout(300)
def test_lookups_of_clients_do_not_slow_down_with_a_million_keys(tmp_path: Path) -> None:
    """p99 as a client sees it, of a small and a large manager in turn, so that other load meets both alike.

    Batches of 512 random keys are shown and not judged: a million entries do not fit the processor's caches, and with
    so many keys a call those misses are most of it.
    """
    with manager_with(1000, tmp_path / "small") as small, manager_with(MILLION, tmp_path / "large") as large:
        ratios = {size: sorted(_ratio(small, large, size) for _ in range(7)) for size in (1, 64, 512)}
    print()
    for size, rounds in ratios.items():
        print(f"{size} keys: p99 is {rounds[3]:.2f} of that with a thousand ({rounds[0]:.2f}–{rounds[6]:.2f})")
    assert ratios[1][3] <= P99_RATIO
    assert ratios[64][3] <= P99_RATIO


def _ratio(small: Client, large: Client, size: int) -> float:
    spans: tuple[list[int], list[int]] = ([], [])
    for place in range(500):
        for into, client, first in ((spans[0], small, place % 480), (spans[1], large, place * 1601 % (MILLION - size))):
            keys = keys_of(first, size)
            before = time.perf_counter_ns()
            tiers = client.match_prefix(*keys)
            into.append(time.perf_counter_ns() - before)
            assert len(tiers) == size
    return quantile(spans[1], 0.99) / quantile(spans[0], 0.99)
