"""Killed with 10,000 entries: what the nodes still hold is served again within 10 s (the figures are printed)."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence

import pytest

from polarkv_client.states import Tier
from tests.local.support.invariants import settled
from tests.local.support.oracle import Caller, Chunks
from tests.local.support.worker import Orders
from tests.local.support.workers import Worker
from tests.local.support.world import World, running
from tests.support.waiting import wait_until

ENTRIES = 10_000
NODES = 2
WITHIN_S = 10.0
SHARE = 0.99
BATCH = 500
LENGTHS = (2_000, 6_000)  # 4 and 8 KiB in a slot: 60 MB in all


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    # Memory for about half of them, disk for all: entries in memory, on disk, and in both.
    with running(NODES, "16MiB", "128MiB") as world:
        yield world


def batches(numbers: Sequence[int]) -> list[list[int]]:
    return [list(numbers[start : start + BATCH]) for start in range(0, len(numbers), BATCH)]


def tiers(caller: Caller, numbers: Sequence[int]) -> list[Tier]:
    return [tier for part in batches(numbers) for tier in caller.client.exists(caller.chunks.keys(part))]


def filled(world: World, chunks: Chunks) -> list[int]:
    """Store until the cluster has all entries; return the numbers of those that are committed."""
    numbers = list(range(ENTRIES))
    with world.caller(chunks, wait_for_space_ms=2000) as caller:
        caller.deadline_ms = 10_000

        def all_there() -> bool:
            for part in batches(numbers):
                missing = [n for n, tier in zip(part, caller.client.exists(chunks.keys(part)), strict=True) if not tier]
                if missing:
                    caller.store(missing)
            return all(tiers(caller, numbers))

        wait_until(all_there, "all entries to be stored", 60, 0.2)
    settled(world)
    return numbers


def served(caller: Caller, numbers: Sequence[int]) -> int:
    """Really load them all, and compare every byte."""
    return sum(caller.load(part, deadline_ms=5000).hits for part in batches(numbers))


def serves_again(caller: Caller, numbers: Sequence[int], began: float) -> tuple[int, float]:
    """(entries that are there again, seconds since ``began``), once there are enough, or at the end of the time."""
    found = 0
    while time.monotonic() - began < WITHIN_S:
        found = sum(bool(tier) for tier in tiers(caller, numbers))
        if found >= SHARE * len(numbers):
            break
        threading.Event().wait(0.05)
    return found, time.monotonic() - began


@pytest.mark.timeout(150)
def test_a_manager_killed_under_load_comes_back_with_what_nodes_hold(world: World) -> None:
    chunks = Chunks("manager", LENGTHS)
    numbers = filled(world, chunks)
    load = Worker(Orders(str(world.cluster.connection), "shm", 1, "manager", LENGTHS, ENTRIES, batch=32, stores=False))
    with world.caller(chunks) as caller:
        try:
            before = tiers(caller, numbers)
            threading.Event().wait(0.5)
            former = world.kill("manager")
            began = time.monotonic()
            found, took_s = serves_again(caller, numbers, began)
        finally:
            done = load.finish()
        world.started_again("manager", former)
        assert not load.violations()
        loaded = served(caller, numbers)
        figures("manager", before, found, took_s, loaded)
        print(f"load meanwhile: {done['calls']} calls, slowest {done['slowest_s']:.3f} s")
        assert took_s < WITHIN_S and found >= SHARE * len(numbers)
        assert loaded >= SHARE * len(numbers)
    settled(world)


@pytest.mark.timeout(150)
def test_entries_that_only_memory_has_survive_the_manager() -> None:
    # No file helps here: the slab servers prove what lies in their memory by its headers.
    chunks, numbers = Chunks("memory alone", LENGTHS), list(range(ENTRIES // 2))
    calm = {"offload_ahead": False, "memory_high_percent": 100, "write_ticket_ms": 5000}
    with running(NODES, "32MiB", "128MiB", manager=calm) as world, world.caller(chunks) as caller:
        for part in batches(numbers):
            assert caller.store(part, deadline_ms=5000).stored == len(part)
        before = tiers(caller, numbers)
        assert world.stats()["disk_used_bytes"] == 0
        former = world.kill("manager")
        began = time.monotonic()
        found, took_s = serves_again(caller, numbers, began)
        world.started_again("manager", former)
        loaded = served(caller, numbers)
        figures("manager (memory alone)", before, found, took_s, loaded)
        assert took_s < WITHIN_S and found >= SHARE * len(numbers)
        assert loaded >= SHARE * len(numbers)
        settled(world)


@pytest.mark.timeout(150)
@pytest.mark.parametrize("role", ["slab", "disk", "slab and disk"])
def test_a_cache_node_restarted_with_its_directory_serves_its_files(world: World, role: str) -> None:
    chunks = Chunks("manager", LENGTHS)
    numbers = filled(world, chunks)
    with world.caller(chunks) as caller:
        before = tiers(caller, numbers)
        held = on_files_of(world, 0, chunks, numbers)
        elsewhere = [number for number in numbers if number not in held]
        lives = [node["incarnation"] for node in world.nodes()]
        formers = {f"{part}-0": world.kill(f"{part}-0") for part in role.split(" and ")}
        began = time.monotonic()
        # Until the manager has noticed, it still names what the dead node held.
        wait_until(lambda: [n["incarnation"] for n in world.nodes()] != lives, "the node's next life", WITHIN_S)
        found, took_s = serves_again(caller, sorted(held), began)
        for name, former in formers.items():
            world.started_again(name, former)
        loaded = served(caller, sorted(held))
        figures(role, before, found, took_s, loaded)
        kept = sum(map(bool, tiers(caller, elsewhere)))
        print(f"files on the node: {len(held)}; of {len(elsewhere)} keys elsewhere {kept} are still served")
        assert kept == len(elsewhere)
        assert took_s < WITHIN_S and found >= SHARE * len(held)
        assert loaded >= SHARE * len(held)
    settled(world)


def on_files_of(world: World, node: int, chunks: Chunks, numbers: Sequence[int]) -> set[int]:
    """The numbers whose files lie in a node's directory: what it can prove."""
    names = {path.name for path in (world.places.disk(node) / "data").rglob("*") if path.is_file()}
    assert names, "nothing was copied to disk"
    return {number for number in numbers if chunks.key(number).hex() in names}


def figures(what: str, before: Sequence[Tier], found: int, took_s: float, loaded: int) -> None:
    memory, disk = before.count(Tier.MEMORY), before.count(Tier.DISK)
    print(
        f"{what} killed: before {len(before)} entries ({memory} in memory, {disk} on disk alone); "
        f"{found} there again after {took_s:.2f} s; {loaded} loaded, every byte right"
    )
