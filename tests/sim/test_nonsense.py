"""Traces, sizes and flags that make no sense: said at once, by name, with a fix; an interrupted sweep ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from polarkv_client.cli.main import run
from polarkv_client.errors import ConfigurationError
from polarkv_dataplane.planner.sim.scenario import Engines, Hardware, Organisation, Scenario
from polarkv_dataplane.planner.sim.sweep import Job, run_all
from tests.support.traces import small_trace
from tests.support.waiting import wait_until

OWN = ["--model", "qwen3-8b", "--nodes", "2", "--jobs", "1", "--organisation", "paired"]


def line(**changed: Any) -> str:
    return json.dumps({"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [1, 2], **changed})


def error(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert run(["simulate", *arguments, "--json"]) == 2
    found: dict[str, Any] = json.loads(capsys.readouterr().out)["error"]
    return found


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        ([], "no request"),
        ([line(), '{"timestamp": 1'], "line 2"),
        ([line(timestamp=-1)], "$.timestamp"),
        ([line(input_length=1.5)], "$.input_length"),
        ([line(input_length=10**30)], "$.input_length"),
        ([line(hash_ids=[1 << 40])], "$.hash_ids"),
        ([line(timestamp=5000), line()], "must not go back"),
        ([line(), line(timestamp=10**15)], "time stamps in ms"),
        ([line(timestamp=n * 10**9) for n in range(9)], "time stamps in ms"),
        ([line(input_length=5_120_000_000, hash_ids=[1])], "10,000,000 blocks of 512"),
        ([line(input_length=1000, hash_ids=list(range(63)))], "blocks of that size"),
        ([line(input_length=0)], "request 1: hash_ids"),
        ([line(input_length=0, hash_ids=[])], "names no block"),
    ],
)
def test_bad_traces_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], lines: list[str], text: str
) -> None:
    (tmp_path / "t.jsonl").write_text("\n".join(lines))
    assert text in error(capsys, str(tmp_path / "t.jsonl"), *OWN, "--engines", "1")["text"]


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(line(timestamp=n * 1000, hash_ids=[1, 2 + n]) for n in range(20)))
    return str(path)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--speeds", "nan"], "--speeds='nan'"),
        (["--speeds", "1,inf"], "--speeds"),
        (["--speeds", "1e-308"], "--speeds"),
        (["--working-sets", "nan"], "--working-sets"),
        (["--working-sets", ""], "--working-sets"),
        (["--working-sets", "1000"], "the whole trace is"),
        (["--seed", "9" * 30], "--seed"),
        (["--node-network", "0"], "network_bytes_per_s=0"),
        (["--node-disk-bandwidth", "0"], "disk_bytes_per_s=0"),
        (["--node-disk", "0"], "disk_bytes=0"),
        (["--gpu-utilization", "nan"], "--gpu-utilization"),
        (["--gpu-utilization", "1e-300"], "--gpu-utilization"),
        (["--engines", "99999999"], "--engines"),
        (["--budget", "5000"], "--nodes describes"),
        (["--market", "gcp"], "--nodes describes"),
        (["--concurrency", "2", "--speeds", "2"], "--concurrency ignores"),
        (["--kv-bytes-per-token", "999999999"], "block_bytes"),
        (["--output", ""], "--output=''"),
        (["--output", "/proc/none"], "--output='/proc/none'"),
    ],
)
def test_what_makes_no_sense_is_named(
    trace: str, capsys: pytest.CaptureFixture[str], arguments: list[str], text: str
) -> None:
    assert text in error(capsys, trace, *OWN, *arguments)["text"]


@pytest.mark.parametrize("arguments", [["--node-disk", "1TiB"], ["--budget", "nan"], ["--budget", "1e300"]])
def test_of_a_bought_cluster_too(trace: str, capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    assert arguments[0] in error(capsys, trace, "--model", "qwen3-8b", *arguments)["text"]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{}", "has no prefill rate"),
        ('{"prefill_tokens_per_s": 1e-9}', "engines"),
        ('{"prefill": 1}', "no calibration"),
    ],
)
def test_calibrations_that_say_nothing(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, named: str
) -> None:
    (tmp_path / "c.json").write_text(text)
    assert named in error(capsys, trace, *OWN, "--calibration", str(tmp_path / "c.json"))["text"]


def test_an_output_that_is_a_file_is_said_before_the_work(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--output" in error(capsys, trace, *OWN, "--output", trace)["field"]


def test_an_error_of_a_worker_comes_back_as_it_was() -> None:
    """It used to break the pool: an error with three arguments is not made anew from its text."""
    scenario = Scenario(Organisation.PAIRED, Hardware(2, 1 << 30, 1 << 34, 1e9, 1e8), Engines(2), 1 << 20)
    trace = list(reversed(small_trace(40)))
    jobs = [Job(scenario, 1.0, {}), Job(scenario, 1.0, {})]
    with pytest.raises(ConfigurationError, match="must not go back") as caught:
        run_all(trace, jobs, 2)
    assert caught.value.fix == "time stamps must not go back"


def children(pid: int) -> set[int]:
    """Processes of a session, but its first."""
    found = set()
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal() and int(folder.name) != pid:
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == pid:
                found.add(int(folder.name))
    return found


def test_an_interrupted_sweep_ends_without_a_traceback(tmp_path: Path) -> None:
    options = ["--model", "qwen3-8b", "--nodes", "4", "--jobs", "2", "--speeds", "1,2,3,4", "-o", str(tmp_path)]
    command = [sys.executable, "-m", "polarkv_client.cli.main", "simulate", "--generate", "2", *options]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    # Two workers and the tracker of their resources.
    wait_until(lambda: len(children(process.pid)) >= 3 or None, "workers", 40)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all of them
    began = time.monotonic()
    out, err = process.communicate(timeout=40)
    assert (process.returncode, out) == (130, "")
    assert "Traceback" not in err
    assert time.monotonic() - began < 30
    wait_until(lambda: not children(process.pid) or None, "its workers to end")
