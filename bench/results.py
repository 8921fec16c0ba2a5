"""What a run recorded, and its medians over quiet samples."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.quiet import QUIET_BUSY_SHARE, usable


@dataclass(frozen=True)
class Summary:
    """Median and range of the samples used; `busy` is the most that other work took of the processors in them."""

    median: float
    low: float
    high: float
    used: int
    busy: float


@dataclass
class Series:
    """Samples of one row: `values[metric][i]` was taken while other work had the share `busy[i]` of the processors."""

    values: dict[str, list[float]] = field(default_factory=dict)
    busy: list[float | None] = field(default_factory=list)

    def add(self, values: dict[str, float], busy: float) -> None:
        for metric, value in values.items():
            self.values.setdefault(metric, []).append(value)
        self.busy.append(busy)

    def summary(self, metric: str) -> Summary | None:
        series: Sequence[float] = self.values.get(metric, [])
        indices = [index for index in usable(self.busy) if index < len(series)]
        if not indices:
            return None
        used = [series[index] for index in indices]
        busy = max(share for index in indices if (share := self.busy[index]) is not None)
        return Summary(statistics.median(used), min(used), max(used), len(used), busy)

    @property
    def quiet(self) -> int:
        return sum(share is not None and share <= QUIET_BUSY_SHARE for share in self.busy)


@dataclass
class Results:
    """`rates[size][row]` in GB/s; `lookups[row]` in calls a second, with the number of keys as the metric."""

    machine: dict[str, Any] = field(default_factory=dict)
    about: dict[str, dict[str, str]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    rates: dict[int, dict[str, Series]] = field(default_factory=dict)
    lookups: dict[str, Series] = field(default_factory=dict)

    def series(self, size: int, row: str) -> Series:
        return self.rates.setdefault(size, {}).setdefault(row, Series())

    def rate(self, size: int, row: str, metric: str) -> Summary | None:
        found = self.rates.get(size, {}).get(row)
        return found.summary(metric) if found else None

    def best_rate(self, size: int, row: str, prefix: str = "") -> Summary | None:
        """The metric of `row` with the highest median, of those whose name begins with `prefix`."""
        found = self.rates.get(size, {}).get(row, Series())
        summaries = [found.summary(metric) for metric in found.values if metric.startswith(prefix)]
        return max((one for one in summaries if one), key=lambda one: one.median, default=None)

    def lookup_rate(self, row: str, keys: int) -> Summary | None:
        found = self.lookups.get(row)
        return found.summary(str(keys)) if found else None

    def all_series(self) -> list[Series]:
        return [one for rows in self.rates.values() for one in rows.values()] + list(self.lookups.values())

    def as_json(self) -> dict[str, Any]:
        def shown(one: Series) -> dict[str, Any]:
            medians = {metric: vars(found) for metric in one.values if (found := one.summary(metric))}
            return {"summary": medians, "samples": one.values, "others_busy_share": one.busy}

        return {
            "machine": self.machine,
            "about": self.about,
            "failures": self.failures,
            "rates_gbps": {
                str(size): {row: shown(one) for row, one in rows.items()} for size, rows in self.rates.items()
            },
            "lookup_calls_per_second": {row: shown(one) for row, one in self.lookups.items()},
        }
