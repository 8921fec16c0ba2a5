"""What an entry costs the manager: bytes at a million keys, and a lookup's time as the directory grows."""

from __future__ import annotations

import gc
import hashlib
import subprocess
import sys
import time
from pathlib import Path

import pytest

from polarkv_client.protocol.messages import InventoryItem
from polarkv_dataplane.manager.core.directory import Directory
from polarkv_dataplane.manager.records.model import Settings

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


@pytest.mark.deep
@pytest.mark.timeout(300)
def test_lookups_do_not_slow_down_with_a_million_keys() -> None:
    """p99 of batched lookups, small and large in turn, so that whatever else the machine does meets both alike."""
    small, large = filled(1000, False), filled(MILLION, False)
    batches = {
        "small": (small, [keys_of(0, 512)] * 400),
        "large": (large, [keys_of(first, 512) for first in range(0, MILLION - 512, MILLION // 400)][:400]),
    }
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        ratios = [_ratio(batches) for _ in range(7)]
    finally:
        gc.enable()
        gc.unfreeze()
    ratio = sorted(ratios)[len(ratios) // 2]
    print(f"\np99 of a lookup of 512 keys with a million keys is {ratio:.2f} of that with a thousand; rounds: {ratios}")
    assert ratio <= P99_RATIO


def _ratio(batches: dict[str, tuple[Directory, list[list[bytes]]]]) -> float:
    spans: dict[str, list[int]] = {name: [] for name in batches}
    for place in range(400):
        for name, (directory, asked) in batches.items():
            before = time.perf_counter_ns()
            tiers = directory.match_prefix(asked[place])
            spans[name].append(time.perf_counter_ns() - before)
            assert len(tiers) == 512
    return quantile(spans["large"], 0.99) / quantile(spans["small"], 0.99)
