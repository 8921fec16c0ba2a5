"""kill -9 and SIGSTOP of every role at a random moment under load, over shared memory and TCP at once."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator

import pytest

from tests.local.support.invariants import settled
from tests.local.support.oracle import Caller, Chunks
from tests.local.support.worker import Orders
from tests.local.support.workers import Worker
from tests.local.support.world import World, recovers, running

SEED = int(os.environ.get("POLARKV_FAULT_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 30)
ROLES = ["manager", "slab-0", "disk-0"]
LENGTHS = (20_000, 70_000, 200_000)
FAMILY = f"kill {SEED}"
_never = threading.Event()


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    print(f"POLARKV_FAULT_SEED={SEED}")
    # Less room than chunks: eviction, offload, load and purge go on while processes die.
    with running(2, "16MiB", "32MiB") as world:
        yield world


@pytest.fixture(scope="module")
def load(world: World) -> Iterator[list[Worker]]:
    """Two client processes at work, one a transport; they live through every fault of this file."""
    workers: list[Worker] = []
    try:
        for number, transport in enumerate(("shm", "tcp")):
            workers.append(Worker(orders(world, transport, SEED + number)))
        yield workers
    finally:
        for worker in workers:
            worker.kill()


def orders(world: World, transport: str, seed: int) -> Orders:
    return Orders(str(world.cluster.connection), transport, seed, FAMILY, LENGTHS, keys=1500, batch=12)


def moment(chance: random.Random) -> None:
    """Let a random time pass: the faults are to meet the load in the middle of something."""
    _never.wait(chance.uniform(0.05, 0.6))


def check(workers: list[Worker]) -> None:
    violations = [text for worker in workers for text in worker.violations()]
    assert not violations, f"seed {SEED}: " + "\n".join(violations[:10])


def calls_of(caller: Caller, chance: random.Random, seconds: float) -> None:
    """Ordinary calls of this process's own client for about so long."""
    import time

    end = time.monotonic() + seconds
    while time.monotonic() < end:
        numbers = [chance.randrange(1500) for _ in range(8)]
        caller.load(numbers)
        caller.store(numbers)


@pytest.mark.parametrize("role", ROLES)
def test_killed(world: World, load: list[Worker], role: str) -> None:
    chance = random.Random(f"{SEED} killed {role}")
    chunks = Chunks(FAMILY, LENGTHS)
    with world.caller(chunks, "shm") as near, world.caller(chunks, "tcp") as far:
        for _ in range(2):
            moment(chance)
            former = world.kill(role)
            calls_of(near, chance, 0.3)
            calls_of(far, chance, 0.3)
            world.started_again(role, former)
        for caller in (near, far):  # never made anew
            print(f"{role} killed: serves again after {recovers(caller, list(range(2000, 2016))):.2f} s")
    check(load)


@pytest.mark.parametrize("long", [False, True], ids=["shortly", "until it is given up"])
@pytest.mark.parametrize("role", ROLES)
def test_stopped(world: World, load: list[Worker], role: str, long: bool) -> None:
    chance = random.Random(f"{SEED} stopped {role}")
    chunks = Chunks(FAMILY, LENGTHS)
    with world.caller(chunks, "shm") as near, world.caller(chunks, "tcp") as far:
        moment(chance)
        with world.stopped(role):
            for _ in range(3 if long else 1):
                calls_of(near, chance, 0.5)
                calls_of(far, chance, 0.5)
        world.ready()
        for caller in (near, far):
            print(f"{role} stopped: serves again after {recovers(caller, list(range(2100, 2116))):.2f} s")
    check(load)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_client_killed_or_stopped_does_not_concern_others(world: World, load: list[Worker], transport: str) -> None:
    chance = random.Random(f"{SEED} client {transport}")
    with world.caller(Chunks(FAMILY, LENGTHS), transport) as caller:
        victim = Worker(orders(world, transport, SEED + 100))
        try:
            moment(chance)
            victim.stop()
            calls_of(caller, chance, 2.0)  # past all of its grants
            victim.go_on()
            moment(chance)
        finally:
            victim.kill()
        check([*load, victim])
        assert recovers(caller, list(range(2200, 2216))) < 20


def test_z_after_all_of_it_nothing_is_left_open(world: World, load: list[Worker]) -> None:
    """Runs last in this file: the workers end, the books are closed."""
    for worker in load:
        done = worker.finish()
        print(f"{worker.orders.transport}: {done['calls']} calls, slowest {done['slowest_s']:.3f} s, {done['reasons']}")
        assert done["reasons"].get("hit", 0) > 0
    check(load)
    settled(world)
    with world.caller(Chunks(f"{FAMILY} afterwards", LENGTHS)) as caller:
        assert recovers(caller, list(range(40))) < 20
    settled(world)
    assert world.metric("polarkv_tiering_cross_node_bytes_total") == 0
