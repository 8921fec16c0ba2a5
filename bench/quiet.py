"""Which rounds were disturbed by other work on this machine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

PROBE_SECONDS = 0.1
QUIET_BUSY_SHARE = 0.1
MINIMUM_ROUNDS = 3


def _cpu_times() -> tuple[int, int]:
    """(busy, all) clock ticks of all processors since boot; stolen time counts as busy."""
    fields = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    idle = fields[3] + fields[4]
    return sum(fields) - idle, sum(fields)


def busy_share() -> float:
    """Share of all processors used by others, seen while this run is idle for a moment."""
    busy, every = _cpu_times()
    time.sleep(PROBE_SECONDS)
    busy_after, every_after = _cpu_times()
    return (busy_after - busy) / max(1, every_after - every)


def wait_for_quiet(patience_seconds: float) -> float:
    """Wait until others leave the processors alone, for at most `patience_seconds`; return the last share seen."""
    deadline = time.monotonic() + patience_seconds
    while (share := busy_share()) > QUIET_BUSY_SHARE and time.monotonic() < deadline:
        pass
    return share


def quiet_rounds(shares: Sequence[float]) -> list[int]:
    """Indices of the rounds to use: all quiet ones, and the quietest three when there are fewer."""
    quiet = [index for index, share in enumerate(shares) if share <= QUIET_BUSY_SHARE]
    if len(quiet) >= MINIMUM_ROUNDS:
        return quiet
    return sorted(sorted(range(len(shares)), key=lambda index: shares[index])[:MINIMUM_ROUNDS])
