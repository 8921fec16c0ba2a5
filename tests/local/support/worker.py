"""A client process under load: random stores, loads, look-ups and prefetches, every byte and every deadline checked.

Its orders come as one JSON object in ``argv[1]`` (:class:`Orders`); it runs until standard input ends. What it has to
say goes to standard output, one JSON object a line, when it happens: a process that is killed has said all it knew.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from polarkv_client.sync import SyncClient
from tests.local.support.oracle import GRACE_S, Caller, Chunks, Result, TooLate, WrongBytes


@dataclasses.dataclass(frozen=True)
class Orders:
    """What a worker does. ``keys``: how many different chunks there are; ``batch``: how many a call names at most."""

    connection: str
    transport: str
    seed: int
    family: str
    lengths: tuple[int, ...]
    keys: int
    batch: int = 16
    deadline_ms: int = 2000
    threads: int = 2
    stores: bool = True

    def settings(self) -> dict[str, object]:
        """The client's."""
        return {"transport": self.transport, "deadline_ms": self.deadline_ms, "client_name": f"worker-{self.seed}"}


def say(**what: object) -> None:
    """One line, whole: lines of several threads do not mix."""
    os.write(1, json.dumps(what).encode() + b"\n")


class TimedCaller(Caller):
    """Tells of late calls rather than raising: the process may have been stopped meanwhile, which only others know."""

    def timed(self, call: Callable[[], Result], limit_ms: int) -> Result:
        """See :meth:`Caller.timed`."""
        began = time.monotonic()
        try:
            return super().timed(call, limit_ms)
        except TooLate:
            say(event="late", began=began, ended=time.monotonic(), limit_s=limit_ms / 1000 + GRACE_S)
            raise


def work(orders: Orders, client: SyncClient, number: int, ending: threading.Event, callers: list[TimedCaller]) -> None:
    """One thread's life."""
    chance = random.Random(orders.seed * 1000 + number)
    chunks = Chunks(orders.family, tuple(orders.lengths))
    caller = TimedCaller(client, chunks, orders.deadline_ms)
    callers.append(caller)
    while not ending.is_set():
        first = int(orders.keys * chance.random() ** 2)  # some are asked for much more often
        numbers = [(first + step) % orders.keys for step in range(chance.randint(1, orders.batch))]
        try:
            act(caller, chance, numbers, stores=orders.stores)
        except WrongBytes as error:
            say(event="wrong", text=str(error), at=time.monotonic())
        except TooLate:
            continue
        except Exception as error:  # nothing may be raised at a caller, whatever happens to the cache
            logging.exception("raised at the caller")
            say(event="raised", text=repr(error), at=time.monotonic())


def act(caller: TimedCaller, chance: random.Random, numbers: Sequence[int], *, stores: bool) -> None:
    """One operation."""
    dice = chance.random()
    keys = caller.chunks.keys(numbers)
    if dice < 0.35 and stores:
        caller.store(numbers)
    elif dice < 0.85:
        caller.load(numbers)
    elif dice < 0.9:
        caller.timed(lambda: caller.client.match_prefix(keys, deadline_ms=caller.deadline_ms), caller.deadline_ms)
    elif dice < 0.95:
        caller.timed(lambda: caller.client.exists(keys, deadline_ms=caller.deadline_ms), caller.deadline_ms)
    else:
        caller.timed(lambda: caller.client.prefetch(keys, deadline_ms=caller.deadline_ms), caller.deadline_ms)


def main() -> int:
    """Run until standard input ends."""
    raw = json.loads(sys.argv[1])
    orders = Orders(**{**raw, "lengths": tuple(raw["lengths"])})
    logging.basicConfig(level=logging.ERROR)
    client = SyncClient.connect(Path(orders.connection), **orders.settings())
    ending = threading.Event()
    callers: list[TimedCaller] = []
    threads = [
        threading.Thread(target=work, args=(orders, client, number, ending, callers), daemon=True)
        for number in range(orders.threads)
    ]
    for thread in threads:
        thread.start()
    say(event="ready", pid=os.getpid())
    while os.read(0, 4096):
        pass
    ending.set()
    for thread in threads:
        thread.join(orders.deadline_ms / 1000 + 5)
    reasons: dict[str, int] = {}
    for caller in callers:
        for name, count in caller.reasons.items():
            reasons[name] = reasons.get(name, 0) + count
    say(
        event="done",
        hung=sum(thread.is_alive() for thread in threads),
        calls=sum(caller.calls for caller in callers),
        slowest_s=max(caller.slowest_s for caller in callers),
        reasons=reasons,
    )
    os._exit(0)  # a thread that hangs has been reported; it must not hang the report


if __name__ == "__main__":
    sys.exit(main())
