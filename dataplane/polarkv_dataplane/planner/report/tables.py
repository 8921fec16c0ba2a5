"""Results of a sweep as rows."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any

from polarkv_dataplane.planner.sim.run import Result
from polarkv_dataplane.planner.sim.scenario import GIB
from polarkv_dataplane.planner.sim.sweep import Job

Row = dict[str, Any]
# ``wanted`` is the working set that was asked for (0: the whole trace), ``working_set`` what came of it.
COLUMNS = (
    "budget", "wanted", "working_set", "blocks", "speed", "organisation", "cost_month", "currency", "memory_gib",
    "disk_gib", "requests", "hit_percent", "memory_hit_percent", "disk_hit_percent", "ttft_mean_s", "ttft_p50_s",
    "ttft_p90_s", "ttft_p99_s", "serving_bytes", "tiering_bytes", "disk_bytes", "gpu_seconds_saved", "cut_short",
    "skipped", "wall_s",
)  # fmt: skip


def rows(jobs: Sequence[Job], results: Sequence[Result]) -> list[Row]:
    """One row a run: its place in the sweep, and what it found."""
    made = []
    for job, result in zip(jobs, results, strict=True):
        hardware = job.scenario.hardware
        found = {**result.as_json(), **job.labels}
        found["memory_gib"] = round(hardware.nodes * hardware.memory_bytes / GIB, 1)
        found["disk_gib"] = round(hardware.nodes * hardware.disk_bytes / GIB, 1)
        made.append({column: found[column] for column in COLUMNS})
    return made


def as_csv(table: Sequence[Row]) -> str:
    """With a heading."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)
    return text.getvalue()


def less_percent(table: Sequence[Row], of: str, than: str) -> list[tuple[Row, float]]:
    """By how many percent the mean TTFT of organisation ``of`` is below that of ``than``, run by run."""
    points = ("budget", "wanted", "speed")
    others = {tuple(row[name] for name in points): row for row in table if row["organisation"] == than}
    found = []
    for row in table:
        other = others.get(tuple(row[name] for name in points))
        if row["organisation"] == of and other is not None and other["ttft_mean_s"]:
            found.append((row, round(100 * (1 - row["ttft_mean_s"] / other["ttft_mean_s"]), 1)))
    return found
