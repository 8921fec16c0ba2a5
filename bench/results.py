"""What a run recorded, and its medians over quiet rounds."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.quiet import quiet_rounds


@dataclass(frozen=True)
class Summary:
    """Median and range of the rounds used."""

    median: float
    low: float
    high: float
    rounds: int


@dataclass
class Results:
    """`samples[size][row][metric]` has one value a round (None where it failed), in GB/s; `lookups[row][keys]` has
    calls a second. `busy[size]` and `lookup_busy` are the shares of the processors that others used in each round."""

    machine: dict[str, Any] = field(default_factory=dict)
    about: dict[str, dict[str, str]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    samples: dict[int, dict[str, dict[str, list[float | None]]]] = field(default_factory=dict)
    busy: dict[int, list[float]] = field(default_factory=dict)
    lookups: dict[str, dict[int, list[float | None]]] = field(default_factory=dict)
    lookup_busy: list[float] = field(default_factory=list)

    def add(self, size: int, row: str, values: dict[str, float], round_index: int) -> None:
        metrics = self.samples.setdefault(size, {}).setdefault(row, {})
        for metric, value in values.items():
            _put(metrics.setdefault(metric, []), round_index, value)

    def add_lookup(self, row: str, keys: int, calls_per_second: float, round_index: int) -> None:
        _put(self.lookups.setdefault(row, {}).setdefault(keys, []), round_index, calls_per_second)

    def rate(self, size: int, row: str, metric: str) -> Summary | None:
        series = self.samples.get(size, {}).get(row, {}).get(metric, [])
        return _summary(series, self.busy.get(size, []))

    def best_rate(self, size: int, row: str, prefix: str = "") -> Summary | None:
        """The metric of `row` with the highest median, of those whose name begins with `prefix`."""
        metrics = self.samples.get(size, {}).get(row, {})
        found = [self.rate(size, row, metric) for metric in metrics if metric.startswith(prefix)]
        return max((one for one in found if one), key=lambda one: one.median, default=None)

    def used_rounds(self, size: int) -> list[int]:
        return quiet_rounds(self.busy.get(size, []))

    def lookup_rate(self, row: str, keys: int) -> Summary | None:
        return _summary(self.lookups.get(row, {}).get(keys, []), self.lookup_busy)

    def as_json(self) -> dict[str, Any]:
        rates = {
            str(size): {
                row: {metric: vars(one) for metric in metrics if (one := self.rate(size, row, metric))}
                for row, metrics in rows.items()
            }
            for size, rows in self.samples.items()
        }
        return {**vars(self), "rates_gbps": rates}


def _put(series: list[float | None], index: int, value: float) -> None:
    series.extend([None] * (index + 1 - len(series)))
    series[index] = value


def _summary(series: Sequence[float | None], busy: Sequence[float]) -> Summary | None:
    used = [value for index in quiet_rounds(busy) if index < len(series) and (value := series[index]) is not None]
    if not used:
        return None
    return Summary(statistics.median(used), min(used), max(used), len(used))
