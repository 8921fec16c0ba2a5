"""`polarkv simulate` as it is typed, and what it leaves in its folder."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from polarkv_client.cli.main import run
from polarkv_dataplane.planner.report.plots import front
from polarkv_dataplane.planner.report.tables import COLUMNS, less_percent

BASE = ["simulate", "--generate", "2", "--no-progress", "--jobs", "1"]
SMALL = [*BASE, "--limit", "120", "--kv-bytes-per-token", "20000", "--model", "qwen3-235b-a22b"]
MACHINES = ["--nodes", "8", "--node-memory", "1GiB", "--node-disk", "8GiB", "--engines", "4"]


def simulate(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    code = run([*arguments, "--json"])
    out = capsys.readouterr().out
    assert code == 0, out
    found: dict[str, Any] = json.loads(out)
    return found


def test_machines_of_ones_own(capsys: pytest.CaptureFixture[str]) -> None:
    found = simulate(capsys, *SMALL, *MACHINES, "--organisation", "paired", "--organisation", "global")
    paired, away = found["rows"]
    assert (paired["organisation"], paired["requests"], paired["tiering_bytes"]) == ("paired", 120, 0)
    assert away["tiering_bytes"] > 0
    assert (paired["memory_gib"], paired["disk_gib"]) == (8, 64)
    assert found["assumptions"]["engines.count"] == 4
    assert found["assumptions"]["block_bytes"] == 512 * 20_000


def test_the_gate_and_a_calibration(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_text('{"prefill_tokens_per_s": 1e9, "memory_bytes_per_s": 2e9}')
    found = simulate(capsys, *SMALL, *MACHINES, "--organisation", "paired", "--gate", "--calibration", str(path))
    assert found["assumptions"]["engines.prefill_tokens_per_s"] == 1e9
    assert found["assumptions"]["engines.network_bytes_per_s"] == 2e9
    assert found["rows"][0]["skipped"] > 10  # nothing is as fast as that


def test_clusters_of_one_budget_and_every_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    options = ["--budget", "9000,18414", "--bandwidth", "4GB/s", "--nominal", "--working-sets", "0.05,0.1"]
    model = ["--model", "qwen3-235b-a22b", "--tensor-parallel", "4"]
    limits = ["--limit", "70", "--speeds", "1,2", "--organisation", "paired", "--organisation", "memory"]
    extra = ["--organisation", "global", "--market", "alibaba-cn", "--output", str(tmp_path / "out")]
    rows = simulate(capsys, *BASE, *model, *limits, *options, *extra)["rows"]
    assert len(rows) == 2 * 2 * 2 * 3
    for budget in (9000, 18414):
        costs = {row["organisation"]: row["cost_month"] for row in rows if row["budget"] == budget}
        assert all(0.8 * budget < cost <= budget for cost in costs.values())
    files = {path.name for path in (tmp_path / "out").iterdir()}
    plots = {"ttft-by-budget", "ttft-by-working-set", "less-ttft-by-working-set", "pareto", "network-by-load"}
    assert files == {"results.json", "results.csv", "report.html", "hits-by-capacity.png", *(f"{p}.png" for p in plots)}
    for path in (tmp_path / "out").glob("*.png"):
        assert path.read_bytes().startswith(b"\x89PNG\r\n") and path.stat().st_size > 5000
    written = list(csv.DictReader((tmp_path / "out" / "results.csv").read_text().splitlines()))
    assert [float(row["ttft_mean_s"]) for row in written] == [row["ttft_mean_s"] for row in rows]
    assert list(written[0]) == list(COLUMNS)
    assert json.loads((tmp_path / "out" / "results.json").read_text())["rows"] == rows
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.count("<img") == 6
    assert "load_deadline_s" in page
    assert "than the memory pool" in page


def test_text_has_a_line_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*SMALL, *MACHINES, "--organisation", "paired", "--organisation", "memory"]) == 0
    out = capsys.readouterr().out
    assert "paired" in out and "memory" in out and "than the memory pool's" in out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["simulate"], "name a TRACE"),
        (["simulate", "nowhere.jsonl", "--model", "qwen3-8b"], "readable trace file"),
        ([*BASE, "--limit", "5"], "--model"),
        ([*BASE, "--limit", "5", "--kv-bytes-per-token", "5", *MACHINES], "--calibration"),
        ([*SMALL, "--budget", "1"], "does not buy"),
        ([*SMALL, "--budget", "much"], "positive numbers"),
        ([*SMALL, *MACHINES, "--speeds", "0"], "--speeds"),
        ([*SMALL, *MACHINES, "--node-memory", "1MiB"], "must hold a block"),
    ],
)
def test_what_cannot_be_simulated_says_why(
    capsys: pytest.CaptureFixture[str], arguments: list[str], text: str
) -> None:
    assert run([*arguments, "--json"]) == 2
    assert text in json.loads(capsys.readouterr().out)["error"]["text"]


def row(organisation: str, cost: float, ttft: float) -> dict[str, Any]:
    labels = {"budget": 1, "wanted": 0, "speed": 1.0, "organisation": organisation}
    return {**labels, "cost_month": cost, "ttft_mean_s": ttft}


def test_the_front_is_what_nothing_beats_in_both() -> None:
    rows = [row("a", 1, 9), row("b", 2, 10), row("c", 3, 5), row("d", 3, 6), row("e", 4, 5)]
    assert front(rows) == [(1, 9), (3, 5)]


def test_less_is_of_the_other() -> None:
    rows = [row("paired", 1, 1.0), row("memory", 1, 4.0)]
    assert [less for _, less in less_percent(rows, "paired", "memory")] == [75.0]
    assert less_percent(rows, "paired", "disk") == []
