"""A cluster whose files lie on an array: what an earlier life stored is loaded, and more is stored."""

from __future__ import annotations

import argparse
import os
import threading
from collections.abc import Callable
from pathlib import Path

from tests.local.support.oracle import Caller, Chunks
from tests.local.support.world import World, running
from tests.support.guest import SLOWNESS
from tests.support.waiting import wait_until

CHUNKS = Chunks("boots", (200_000, 70_000))
DEADLINE_MS = 20_000 * SLOWNESS


def live(files: Path, arguments: argparse.Namespace, cut: Callable[[], None]) -> dict[str, int]:
    """Do what the arguments of ``tests.vm.boots.life serve`` say; return how many chunks were served."""
    with running(1, "16MiB", "128MiB", files_at=files) as world, world.caller(CHUNKS) as caller:
        wait_until(lambda: all(node["inventory_complete"] for node in world.nodes()), "the inventory", 30)
        load, maybe = arguments.load, arguments.maybe
        loaded = caller.load(range(load), DEADLINE_MS).hits if load else 0
        more = caller.load(range(load, load + maybe), DEADLINE_MS).hits if maybe else 0
        if arguments.store:
            _store(world, caller, arguments.store)
        if arguments.end != "release":
            os.sync()
        if arguments.end == "cut while storing":
            threading.Timer(0.3, cut).start()
            for first in range(arguments.store, 100_000, 10):
                caller.store(range(first, first + 10), DEADLINE_MS)
    return {"loaded": loaded, "more": more}


def _store(world: World, caller: Caller, count: int) -> None:
    """Store chunks, until every one has a copy on disk."""
    caller.store(range(count), DEADLINE_MS)

    def on_disk() -> bool:
        states = [entry["state"] for entry in world.entries()]
        return len(states) >= count and set(states) <= {"MemoryAndDisk", "Disk"}

    wait_until(on_disk, "all chunks to be on disk", 30, 0.1)
