"""`polarkv plan --trace --ttft`: the cheapest candidate whose simulation is good enough."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from polarkv_client.cli.main import run
from polarkv_dataplane.planner.goal import candidates, least_ttft_s
from polarkv_dataplane.planner.prices import load_prices, offers
from polarkv_dataplane.planner.search import Terms
from polarkv_dataplane.planner.shapes import shape
from polarkv_dataplane.planner.sim.scenario import Engines, Hardware, Organisation, Scenario
from tests.support.traces import small_trace

MODEL = ["--model", "qwen3-32b", "--market", "alibaba-cn", "--disk-path", "burst", "--engines", "3", "--jobs", "1"]


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("goal") / "trace.jsonl"
    path.write_bytes(b"\n".join(msgspec.json.encode(request) for request in small_trace(80)))
    return str(path)


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = run(["plan", *arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_candidates_are_distinct_and_by_cost() -> None:
    found = candidates(offers(load_prices(), "alibaba-cn")[0], small_trace(80), 512 * 262_144, Terms())
    assert len({fleet.key for fleet in found}) == len(found) > 10
    assert [fleet.key for fleet in found] == sorted(fleet.key for fleet in found)
    assert any(fleet.disk is None for fleet in found)
    assert any(fleet.disk is not None for fleet in found)


def test_the_first_that_is_good_enough_is_the_answer(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = plan(capsys, "--trace", trace, "--ttft", "1000", *MODEL)
    assert (code, found["met"], len(found["tried"])) == (0, True, 1)
    easy = found["tried"][0]["ttft_s"]
    code, found = plan(capsys, "--trace", trace, "--ttft", str(easy * 0.999), *MODEL, "--limit", "80")
    tried = found["tried"]
    assert len(tried) > 1
    assert [each["cost_month"] for each in tried] == sorted(each["cost_month"] for each in tried)
    assert found["met"] == (code == 0) == (tried[-1]["ttft_s"] <= easy * 0.999)
    assert all(each["ttft_s"] > easy * 0.999 for each in tried[:-1])


def test_a_goal_that_nothing_meets_is_said(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    limits = ["--budget", "20000", "--limit", "20"]
    code, found = plan(capsys, "--trace", trace, "--ttft", "1000", *MODEL, *limits)
    requests = list(small_trace(20))
    engines = Engines.of(shape("qwen3-32b"), 3)
    base = Scenario(Organisation.MEMORY, Hardware(1, 1 << 40, 0, 1e9, 0), engines, 512 * 262_144)
    least_s = least_ttft_s(requests, base, None)
    assert least_s < found["tried"][0]["ttft_s"]
    goal = str((3 * least_s + found["tried"][0]["ttft_s"]) / 4)  # no cluster of so little money comes near
    code, found = plan(capsys, "--trace", trace, "--ttft", goal, *MODEL, *limits)
    assert (code, found["met"], len(found["tried"])) == (1, False, found["candidates"])
    assert run(["plan", "--trace", trace, "--ttft", goal, *MODEL, *limits]) == 1
    assert "none meets the goal" in capsys.readouterr().out
    assert run(["plan", "--trace", trace, "--ttft", goal, *MODEL, *limits, "-o", "cr"]) == 1
    told = capsys.readouterr()
    assert told.out == ""  # nothing for kubectl
    assert "none meets the goal" in told.err


def test_a_goal_that_engines_alone_miss_is_not_looked_for(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = plan(capsys, "--trace", trace, "--ttft", "0.0001", *MODEL)
    assert (code, found["error"]["kind"]) == (1, "ClickException")
    assert "--ttft=0.0001: with everything in memory and endless bandwidth 3 engines need" in found["error"]["text"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--bandwidth", "1GB/s"], "--bandwidth='1GB/s': with --trace"),
        (["--maximize", "memory", "--budget", "9"], "--maximize"),
        (["--pool", "memory"], "--pool"),
    ],
)
def test_demands_beside_a_trace_are_refused(
    trace: str, capsys: pytest.CaptureFixture[str], arguments: list[str], text: str
) -> None:
    code, found = plan(capsys, "--trace", trace, "--ttft", "1", *MODEL, *arguments)
    assert code == 2
    assert text in found["error"]["text"]


def test_the_answer_can_be_a_custom_resource(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--trace", trace, "--ttft", "1000", *MODEL, "-o", "cr", "--disk", "PL0"]) in (0, 2)
    out = capsys.readouterr().out
    assert not out or list(yaml.safe_load_all(out))[-1]["kind"] == "PolarKVCluster"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--trace", "t"], "both --trace and --ttft"),
        (["--ttft", "1"], "both --trace and --ttft"),
        (["--trace", "t", "--ttft", "1"], "--model"),
        (["--trace", "nowhere", "--ttft", "1", "--model", "qwen3-8b"], "readable trace file"),
        (["--trace", "EMPTY", "--ttft", "1", "--model", "qwen3-8b"], "no request"),
    ],
)
def test_what_is_missing_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], text: str
) -> None:
    empty = tmp_path / "empty"
    empty.touch()
    code, found = plan(capsys, *(str(empty) if argument == "EMPTY" else argument for argument in arguments))
    assert code == 2
    assert text in found["error"]["text"]
