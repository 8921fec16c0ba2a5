"""How much one volume transfers at a time: so many transfers, fewer of long ones, and all of them in the end."""

from __future__ import annotations

import contextlib
import random
import threading

import pytest

from polarkv_dataplane.disk.transfers import Transfers
from tests.support.waiting import wait_until

MIB = 1 << 20
DEPTH = 8


@pytest.mark.parametrize(
    ("size_bytes", "at_a_time"),
    [(0, DEPTH), (4096, DEPTH), (MIB, DEPTH), (2 * MIB, DEPTH), (4 * MIB + 4096, 4), (16 * MIB, 1), (1 << 30, 1)],
)
def test_long_transfers_are_fewer_at_a_time(size_bytes: int, at_a_time: int) -> None:
    transfers = Transfers(DEPTH)
    ends = threading.Semaphore(0)
    inside: list[int] = []

    def transfer(number: int) -> None:
        with transfers.under_way(size_bytes):
            inside.append(number)
            ends.acquire()

    threads = [threading.Thread(target=transfer, args=(number,), daemon=True) for number in range(at_a_time + 1)]
    for thread in threads[:-1]:
        thread.start()
    wait_until(lambda: len(inside) == at_a_time, "as many as may")
    threads[-1].start()
    wait_until(transfers._turn.locked, "one more to wait")
    assert len(inside) == at_a_time
    ends.release()
    wait_until(lambda: len(inside) == at_a_time + 1, "it, after another one has ended")
    ends.release(at_a_time)
    for thread in threads:
        thread.join(30)


def test_transfers_of_all_sizes_that_meet_all_end_also_when_some_fail() -> None:
    transfers = Transfers(DEPTH)
    lock = threading.Lock()
    under_way, most, ended = 0, 0, 0

    def work(seed: int) -> None:
        nonlocal under_way, most, ended
        chosen = random.Random(seed)
        for _ in range(300):
            with (
                contextlib.suppress(OSError),
                transfers.under_way(chosen.choice([4096, MIB, 4 * MIB, 7 * MIB, 64 * MIB])),
            ):
                with lock:
                    under_way += 1
                    most = max(most, under_way)
                with lock:
                    under_way -= 1
                    ended += 1
                if chosen.random() < 0.1:
                    raise OSError("a disk's")

    threads = [threading.Thread(target=work, args=(seed,), daemon=True) for seed in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert (ended, under_way) == (16 * 300, 0)
    assert 1 <= most <= DEPTH
