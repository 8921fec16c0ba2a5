"""The ratios that a run is judged by. A target that could not be measured is never a PASS."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bench.limits.memory import ONE_THREAD
from bench.results import Results, Summary
from bench.subject import KIB, MIB

Reading = Callable[[Results, int], Summary | None]
MEMORY, TCP, DISK = "memory copy", "TCP stream", "O_DIRECT"


@dataclass(frozen=True)
class Target:
    """`value / reference >= at_least`, for each of `points` (chunk sizes in bytes, or keys a lookup)."""

    text: str
    value: Reading
    reference: Reading
    at_least: float
    points: tuple[int, ...]
    lookup: bool = False


@dataclass(frozen=True)
class Verdict:
    """One target at one point. `ratio` is None when either side was not measured."""

    text: str
    point: str
    ratio: float | None
    at_least: float

    @property
    def word(self) -> str:
        if self.ratio is None:
            return "NOT MEASURED"
        return "PASS" if self.ratio >= self.at_least else "MISS"


def _rate(row: str, metric: str) -> Reading:
    return lambda results, size: results.rate(size, row, metric)


def _best(row: str, prefix: str = "") -> Reading:
    return lambda results, size: results.best_rate(size, row, prefix)


def _lookup(*rows: str) -> Reading:
    def read(results: Results, keys: int) -> Summary | None:
        found = [results.lookup_rate(row, keys) for row in rows]
        return max((one for one in found if one), key=lambda one: one.median, default=None)

    return read


SIZES = (MIB, 4 * MIB)
OURS = ("polarkv-shm", "polarkv-tcp")
MOONCAKES = ("mooncake-tcp", "mooncake-shm")
TARGETS = (
    Target("tcp get / single TCP stream", _rate("polarkv-tcp", "get"), _best(TCP), 0.8, SIZES),
    Target("tcp get / Mooncake TCP get", _rate("polarkv-tcp", "get"), _rate("mooncake-tcp", "get"), 3.0, SIZES),
    Target("tcp put / Mooncake TCP put", _rate("polarkv-tcp", "put"), _rate("mooncake-tcp", "put"), 3.0, SIZES),
    Target("shm get / one-thread memory copy", _rate("polarkv-shm", "get"), _rate(MEMORY, ONE_THREAD), 1.0, SIZES),
    Target("shm get / Mooncake same-host get", _rate("polarkv-shm", "get"), _rate("mooncake-shm", "get"), 1.5, SIZES),
    Target("shm put / Mooncake same-host put", _rate("polarkv-shm", "put"), _rate("mooncake-shm", "put"), 2.0, SIZES),
    Target("disk load / O_DIRECT read", _rate("polarkv-disk", "get"), _best(DISK, "read"), 0.8, (4 * MIB,)),
    Target("lookup keys/s / Mooncake batch_is_exist", _lookup(*OURS), _lookup(*MOONCAKES), 2.0, (512,), lookup=True),
    Target("lookup calls/s / Mooncake is_exist", _lookup(*OURS), _lookup(*MOONCAKES), 1.0, (1,), lookup=True),
)


def size_name(size_bytes: int) -> str:
    return f"{size_bytes // MIB} MiB" if size_bytes >= MIB else f"{size_bytes // KIB} KiB"


def judge(results: Results) -> list[Verdict]:
    verdicts = []
    for target in TARGETS:
        for point in target.points:
            value, reference = target.value(results, point), target.reference(results, point)
            ratio = value.median / reference.median if value and reference else None
            name = ("1 key" if point == 1 else f"{point} keys") if target.lookup else size_name(point)
            verdicts.append(Verdict(target.text, name, ratio, target.at_least))
    return verdicts
