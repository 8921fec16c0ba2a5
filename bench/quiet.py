"""How much other work ran on this machine while something was measured, and which samples to use because of it."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path

PROBE_SECONDS = 0.1
QUIET_BUSY_SHARE = 0.1
MINIMUM_SAMPLES = 3


def _processor_ticks() -> tuple[int, int]:
    """(used by processes or stolen, all) clock ticks since boot, over all processors. Interrupts are left out: those
    of loopback and disk are this run's own."""
    user, nice, system, idle, wait, hard, soft, stolen = (
        int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    )
    used = user + nice + system + stolen
    return used, used + idle + wait + hard + soft


def _own_ticks() -> int:
    """Clock ticks of this process and everything below it, dead children included."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
            parents[int(name)] = int(fields[1])
            ticks[int(name)] = sum(int(word) for word in fields[11:15])
    own = os.getpid()
    total = 0
    for pid, spent in ticks.items():
        ancestor = pid
        while ancestor not in (own, 0):
            ancestor = parents.get(ancestor, 0)
        total += spent if ancestor == own else 0
    return total


class OtherWork:
    """Share of all processors that others used since this object was made."""

    def __init__(self) -> None:
        self._own = _own_ticks()
        self._used, self._all = _processor_ticks()

    def share(self) -> float:
        used, every = _processor_ticks()
        others = (used - self._used) - (_own_ticks() - self._own)
        return max(0.0, others / max(1, every - self._all))


def wait_for_quiet(patience_seconds: float) -> None:
    """Wait until others leave the processors alone, for at most `patience_seconds`."""
    deadline = time.monotonic() + patience_seconds
    while time.monotonic() < deadline:
        work = OtherWork()
        time.sleep(PROBE_SECONDS)
        if work.share() <= QUIET_BUSY_SHARE:
            return


def usable(shares: Sequence[float | None]) -> list[int]:
    """Indices of the samples to use: all quiet ones, and the quietest three when there are fewer. None: no sample."""
    taken = {index: share for index, share in enumerate(shares) if share is not None}
    quiet = [index for index, share in taken.items() if share <= QUIET_BUSY_SHARE]
    if len(quiet) >= MINIMUM_SAMPLES:
        return quiet
    return sorted(sorted(taken, key=lambda index: taken[index])[:MINIMUM_SAMPLES])
