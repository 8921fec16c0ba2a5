"""Plots of a sweep. Each takes rows (``tables.rows``) and returns a PNG, or None where there is nothing to compare."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib as mpl

from polarkv_dataplane.planner.report.tables import Row, less_percent

mpl.use("Agg")
from matplotlib.figure import Figure

_COLOURS = {"memory": "#4c72b0", "disk": "#8c8c8c", "paired": "#c44e52", "global": "#dd8452"}
_NAMES = {"memory": "memory pool", "disk": "disk pool", "paired": "paired tiers", "global": "tiers paired globally"}
ARTICLE = {"memory": (3, 58), "disk": (47, 58)}  # percent less TTFT that the article reports


def _figure(title: str, x: str, y: str) -> tuple[Figure, Any]:
    figure = Figure(figsize=(7.5, 4.6), dpi=130, layout="constrained")
    axes = figure.subplots()
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _png(figure: Figure) -> bytes:
    out = io.BytesIO()
    figure.savefig(out, format="png")
    return out.getvalue()


def _by_organisation(table: Sequence[Row], x: str, y: str) -> dict[str, list[tuple[float, float]]]:
    found: dict[str, list[tuple[float, float]]] = {}
    for row in table:
        found.setdefault(row["organisation"], []).append((row[x], row[y]))
    return {name: sorted(points) for name, points in found.items()}


def _at_one(table: Sequence[Row], *fixed: str) -> list[Row]:
    """The rows with the value of ``fixed`` that is nearest to the usual: the largest working set, normal speed."""
    kept = list(table)
    for name in fixed:
        values = {row[name] for row in kept}
        wanted = min(values, key=lambda value: abs(value - 1)) if name == "speed" else max(values)
        kept = [row for row in kept if row[name] == wanted]
    return kept


def _log_ticks(axes: Any, values: set[float]) -> None:
    """A logarithmic axis that names the values themselves."""
    axes.set_xscale("log")
    axes.set_xticks(sorted(values), labels=[f"{value:.2g}" for value in sorted(values)])
    axes.minorticks_off()


def _lines(axes: Any, series: dict[str, list[tuple[float, float]]]) -> None:
    for name, points in series.items():
        xs, ys = zip(*points, strict=True)
        axes.plot(xs, ys, marker="o", ms=4, color=_COLOURS[name], label=_NAMES[name])
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)


def ttft_by_budget(table: Sequence[Row]) -> bytes | None:
    """Mean TTFT over what a month costs at most."""
    kept = _at_one(table, "wanted", "speed")
    if not _several(kept, "budget"):
        return None
    figure, axes = _figure("TTFT against budget", f"budget, {kept[0]['currency']} a month", "mean TTFT, s")
    _lines(axes, _by_organisation(kept, "budget", "ttft_mean_s"))
    return _png(figure)


def ttft_by_working_set(table: Sequence[Row]) -> bytes | None:
    """Mean TTFT over the working set."""
    kept = _at_one(table, "budget", "speed")
    if not _several(kept, "working_set"):
        return None
    figure, axes = _figure("TTFT against working set", "working set, times the memory pool", "mean TTFT, s")
    _log_ticks(axes, {row["working_set"] for row in kept})
    _lines(axes, _by_organisation(kept, "working_set", "ttft_mean_s"))
    return _png(figure)


def less_by_working_set(table: Sequence[Row]) -> bytes | None:
    """How much less TTFT paired tiers have, beside what the article reports."""
    kept = _at_one(table, "budget", "speed")
    if not _several(kept, "working_set"):
        return None
    figure, axes = _figure(
        "TTFT of paired tiers, against the other organisations", "working set, times the memory pool", "less TTFT, %"
    )
    _log_ticks(axes, {row["working_set"] for row in kept})
    right = 1.3 * max(row["working_set"] for row in kept)
    for place, (other, (low, high)) in enumerate(ARTICLE.items()):
        points = sorted((row["working_set"], less) for row, less in less_percent(kept, "paired", other))
        if points:
            xs, ys = zip(*points, strict=True)
            axes.plot(xs, ys, marker="o", ms=4, color=_COLOURS[other], label=f"less than the {_NAMES[other]}")
            at, label = right * (1 + 0.12 * place), f"article: {low}–{high} % less than the {_NAMES[other]}"
            axes.plot((at, at), (low, high), color=_COLOURS[other], lw=5, solid_capstyle="butt", label=label)
    axes.axhline(0, color="black", lw=0.8)
    axes.legend(frameon=False, fontsize=8)
    return _png(figure)


def hits_by_capacity(table: Sequence[Row], lru: Sequence[tuple[float, float]] = ()) -> bytes | None:
    """Hit rate over capacity; ``lru``: (GiB, percent) of a plain LRU of the same trace."""
    kept = _at_one(table, "wanted", "speed")
    points: dict[str, list[tuple[float, float]]] = {}
    for row in kept:
        capacity = row["memory_gib"] if row["organisation"] == "memory" else row["disk_gib"]
        points.setdefault(row["organisation"], []).append((capacity, row["hit_percent"]))
    if not points:
        return None
    figure, axes = _figure("Hit rate against capacity", "capacity of the larger tier, GiB", "blocks found, %")
    axes.set_xscale("log")
    if lru:
        axes.plot(*zip(*lru, strict=True), color="black", lw=1, ls=":", label="plain LRU")
    _lines(axes, {name: sorted(found) for name, found in points.items()})
    return _png(figure)


def pareto(table: Sequence[Row]) -> bytes | None:
    """Cost and TTFT of every run of the largest working set; the line joins those that nothing beats in both."""
    kept = _at_one(table, "wanted", "speed")
    if not _several(kept, "cost_month"):
        return None
    figure, axes = _figure("Cost and TTFT", f"{kept[0]['currency']} a month", "mean TTFT, s")
    for name, points in _by_organisation(kept, "cost_month", "ttft_mean_s").items():
        axes.scatter(*zip(*points, strict=True), color=_COLOURS[name], label=_NAMES[name], zorder=3)
    axes.step(*zip(*front(kept), strict=True), where="post", color="black", lw=1, label="Pareto front")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    return _png(figure)


def front(table: Sequence[Row]) -> list[tuple[float, float]]:
    """(cost, TTFT) of the runs that no other beats in both, by cost."""
    best: list[tuple[float, float]] = []
    for cost, ttft in sorted((row["cost_month"], row["ttft_mean_s"]) for row in table):
        if not best or ttft < best[-1][1]:
            best.append((cost, ttft))
    return best


def network_by_load(table: Sequence[Row]) -> bytes | None:
    """Bytes over the network, for serving and for tiering, by load."""
    kept = [row for row in _at_one(table, "budget", "wanted") if row["organisation"] in ("paired", "global")]
    if len({row["organisation"] for row in kept}) < 2:
        return None
    figure, axes = _figure("What tiering moves over the network", "load, times the trace's", "TB over the network")
    for name in ("paired", "global"):
        of = sorted((row["speed"], row["serving_bytes"] / 1e12, row["tiering_bytes"] / 1e12)
                    for row in kept if row["organisation"] == name)  # fmt: skip
        speeds, serving, tiering = zip(*of, strict=True)
        axes.plot(speeds, serving, marker="o", ms=4, ls="--", color=_COLOURS[name], label=f"{_NAMES[name]}: serving")
        axes.plot(speeds, tiering, marker="s", ms=4, color=_COLOURS[name], label=f"{_NAMES[name]}: tiering")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=8)
    return _png(figure)


def _several(table: Sequence[Row], name: str) -> bool:
    return len({row[name] for row in table}) > 1


PLOTS: dict[str, Callable[[Sequence[Row]], bytes | None]] = {
    "ttft-by-budget": ttft_by_budget,
    "ttft-by-working-set": ttft_by_working_set,
    "less-ttft-by-working-set": less_by_working_set,
    "pareto": pareto,
    "network-by-load": network_by_load,
}
