"""A minute (``POLARKV_SOAK_SECONDS``) of kill -9 and SIGSTOP of every role, at random, under mixed load.

The seed is printed; ``POLARKV_SOAK_SEED`` repeats its choices (not the machine's timing).
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections import Counter

import pytest

from polarkv_client.errors import PolarKVError
from tests.local.support.invariants import settled
from tests.local.support.oracle import Chunks
from tests.local.support.worker import Orders
from tests.local.support.workers import Worker
from tests.local.support.world import World, recovers, running

SECONDS = float(os.environ.get("POLARKV_SOAK_SECONDS", "60"))
SEED = int(os.environ.get("POLARKV_SOAK_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 30)
NODES = 2
ROLES = ["manager", *(f"{role}-{node}" for role in ("slab", "disk") for node in range(NODES))]
LENGTHS = (4_000, 30_000, 120_000, 400_000)
TRANSPORTS = ("shm", "tcp", "auto")
KEYS = 1200
_never = threading.Event()


class Chaos:
    """Chooses a victim and a fault, again and again."""

    def __init__(self, world: World, workers: list[Worker], chance: random.Random) -> None:
        self.world, self.workers, self.chance = world, workers, chance
        self.ended: list[Worker] = []
        self.faults: Counter[str] = Counter()

    def strike(self) -> None:
        """One fault; sometimes a second one while the first lasts."""
        if self.chance.random() < 0.25:
            self._client()
            return
        role = self.chance.choice(ROLES)
        if self.chance.random() < 0.5:
            self._signal(role, signal.SIGKILL)
            return
        self._signal(role, signal.SIGSTOP)
        try:
            # Shorter and longer than leases, and than the time after which a node is given up.
            pause(self.chance.choice([0.05, 0.4, 1.0, 3.0]))
            if self.chance.random() < 0.2:
                self._signal(self.chance.choice(ROLES), signal.SIGKILL)
        finally:
            self._signal(role, signal.SIGCONT)

    def evict(self, chunks: Chunks) -> None:
        """By hand, as an operator would."""
        first = self.chance.randrange(KEYS)
        keys = chunks.keys([(first + step) % KEYS for step in range(40)])
        with contextlib.suppress(OSError):  # the manager may be gone at the moment
            self.world.evict(keys, purge=self.chance.random() < 0.2)
            self.faults["evict"] += 1

    def _signal(self, role: str, number: signal.Signals) -> None:
        with contextlib.suppress(PolarKVError, ProcessLookupError):  # it is being started again
            self.world.cluster.signal(role, number)
            if number != signal.SIGCONT:
                self.faults[f"{number.name} {role.partition('-')[0]}"] += 1

    def _client(self) -> None:
        place = self.chance.randrange(len(self.workers))
        victim = self.workers[place]
        if self.chance.random() < 0.5:
            victim.stop()
            pause(self.chance.choice([0.1, 2.5]))
            victim.go_on()
            self.faults["SIGSTOP client"] += 1
            return
        victim.kill()
        self.faults["SIGKILL client"] += 1
        self.ended.append(victim)
        self.workers[place] = new_worker(self.world, victim.orders.transport, victim.orders.seed + 1000)


def pause(seconds: float) -> None:
    _never.wait(seconds)


def new_worker(world: World, transport: str, seed: int) -> Worker:
    orders = Orders(str(world.cluster.connection), transport, seed, f"soak {SEED}", LENGTHS, KEYS, batch=12)
    # The manager may be stopped right now: then the client starts with misses.
    return Worker(orders)


@pytest.mark.timeout(SECONDS + 180)
def test_soak() -> None:
    print(f"POLARKV_SOAK_SEED={SEED}")
    chance = random.Random(SEED)
    with running(NODES, "16MiB", "48MiB") as world, world.caller(Chunks(f"soak {SEED}", LENGTHS)) as survivor:
        workers = [new_worker(world, transport, SEED % 10_000 + place) for place, transport in enumerate(TRANSPORTS)]
        chaos = Chaos(world, workers, chance)
        try:
            end = time.monotonic() + SECONDS
            while time.monotonic() < end:
                pause(chance.uniform(0.2, 1.2))
                chaos.strike()
                chaos.evict(survivor.chunks)
                survivor.load([chance.randrange(KEYS) for _ in range(8)])
            world.ready()
            took_s = recovers(survivor, list(range(KEYS, KEYS + 24)))  # the same client since before the first fault
            done = [worker.finish() for worker in workers]
            report(chaos, done, took_s)
            violations = [text for worker in [*chaos.ended, *workers] for text in worker.violations()]
            assert not violations, f"seed {SEED}: {len(violations)} violations:\n" + "\n".join(violations[:10])
            assert sum(words["reasons"].get("hit", 0) for words in done) > 100
            settled(world)
            assert world.metric("polarkv_tiering_cross_node_bytes_total") == 0
        finally:
            for worker in workers:
                worker.kill()


def report(chaos: Chaos, done: list[dict[str, object]], took_s: float) -> None:
    """The figures."""
    print(f"faults: {dict(sorted(chaos.faults.items()))}; serves again {took_s:.2f} s after the last")
    for worker, words in zip(chaos.workers, done, strict=True):
        slowest = f"slowest {words['slowest_s']:.3f} s"
        print(f"{worker.orders.transport}: {words['calls']} calls, {slowest}, {words['reasons']}")
