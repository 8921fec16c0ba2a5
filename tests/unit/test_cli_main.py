"""The command itself: exit codes, errors as text and JSON, subcommands that are not installed, where the cluster is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest

from polarkv_client import errors
from polarkv_client.cli import common
from polarkv_client.cli.main import BUILT_IN, DATA_PLANE, ExitCode, cli, exit_code_of, run

ROOT = Path(__file__).parents[2]
# Imports as on a machine with the client alone: nothing of the data plane, none of its dependencies.
CLIENT_ALONE = """
import sys
for name in ("polarkv_dataplane", "polarkv_operator", "fastapi", "uvicorn", "uvloop", "prometheus_client", "numpy"):
    sys.modules[name] = None
from polarkv_client.cli.main import main
main()
"""


@pytest.fixture(autouse=True)
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No cluster of the user's may be found."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in list(os.environ):
        if name.startswith("POLARKV_"):
            monkeypatch.delenv(name)


def client_alone(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", CLIENT_ALONE, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.ConfigurationError("f", 1, "x"), ExitCode.USAGE),
        (errors.Unauthorized("x"), ExitCode.USAGE),
        (click.UsageError("x"), ExitCode.USAGE),
        (errors.Unavailable("x"), ExitCode.UNREACHABLE),
        (errors.BreakerOpen("x"), ExitCode.UNREACHABLE),
        (errors.DeadlineExceeded("x"), ExitCode.UNREACHABLE),
        (errors.Refused("x"), ExitCode.FAILED),
        (errors.Damaged("x"), ExitCode.FAILED),
        (KeyboardInterrupt(), ExitCode.INTERRUPTED),
    ],
)
def test_exit_codes(error: BaseException, code: ExitCode) -> None:
    assert exit_code_of(error) == code


def test_every_command_has_help_with_json(capsys: pytest.CaptureFixture[str]) -> None:
    context = click.Context(cli)
    for name in cli.list_commands(context):
        assert run([name, "--help"]) == 0, name
        assert "--json" in capsys.readouterr().out, name


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["stauts"], ExitCode.USAGE, ["stauts", "'status'"]),
        (["status", "--nodes"], ExitCode.USAGE, ["--nodes"]),
        (["put", "missing.bin"], ExitCode.USAGE, ["missing.bin"]),
        (["status"], ExitCode.USAGE, ["--connection", "polarkv up", "POLARKV_CONNECTION"]),
        (["status", "--connection", "gone.json"], ExitCode.USAGE, ["gone.json", "is the cluster up?"]),
        (["down", "--dir", "gone"], ExitCode.USAGE, ["gone", "polarkv up"]),
        (["up", "--nodes", "0"], ExitCode.USAGE, ["up.nodes", "--nodes", "greater than or equal to 1"]),
        (["up", "--memory", "much"], ExitCode.USAGE, ["up.memory_bytes", "much", "512MiB"]),
        (["up", "--memory", "900TiB"], ExitCode.USAGE, ["--memory", "900TiB", "use at most"]),
        (["up", "--memory", "64MiB", "--disk", "900PiB"], ExitCode.USAGE, ["--disk", "file system", "use at most"]),
        (["up", "--dir", "x" * 120], ExitCode.USAGE, ["--dir", "107 bytes"]),
        (["slab", "--memory", "1GiB"], ExitCode.USAGE, ["slab.node", "--node", "POLARKV_SLAB_NODE"]),
    ],
)
def test_wrong_usage_says_what_to_do(
    arguments: list[str], code: int, words: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == code
    text = " ".join(capfd.readouterr().err.split())
    for word in words:
        assert word in text
    assert "Traceback" not in text


def test_errors_are_json_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["up", "--memory", "much", "--json"]) == ExitCode.USAGE
    error = json.loads(capsys.readouterr().out)["error"]
    assert (error["kind"], error["exit_code"], error["value"]) == ("ConfigurationError", 2, "much")
    assert "512MiB" in error["fix"]


def test_nobody_listens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    connection = {"endpoint": f"unix://{tmp_path}/gone.sock", "token": "t", "admin": "http://127.0.0.1:1"}
    path = tmp_path / "connection.json"
    path.write_text(json.dumps(connection))
    for command in (["status"], ["ls"], ["get", "x"], ["evict", "--all"]):
        assert run([*command, "--connection", str(path)]) == ExitCode.UNREACHABLE
        assert "cannot" in capsys.readouterr().err
    assert run(["doctor", "--connection", str(path)]) == ExitCode.FAILED
    assert "fail" in capsys.readouterr().out


def test_client_alone_runs_its_own_commands() -> None:
    shown = client_alone("--help")
    assert shown.returncode == 0, shown.stderr
    for name in (*BUILT_IN, *DATA_PLANE):
        assert name in shown.stdout
    assert client_alone("doctor").returncode == 0


def test_client_alone_says_what_to_install() -> None:
    done = client_alone("up", "--nodes", "2")
    assert done.returncode == ExitCode.USAGE
    assert "pip install 'polarkv-cluster[dataplane]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_where_the_connection_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert common.find_connection(None) is None
    here, home = tmp_path / "here", tmp_path / "home"
    for folder in (here, home):
        (folder / ".polarkv").mkdir(parents=True)
    monkeypatch.chdir(here)
    monkeypatch.setenv("HOME", str(home))
    (home / ".polarkv" / "connection.json").write_text("{}")
    assert common.find_connection(None) == home / ".polarkv" / "connection.json"
    (here / ".polarkv" / "connection.json").write_text("{}")
    assert common.find_connection(None) == Path(".polarkv/connection.json")
    monkeypatch.setenv("POLARKV_CONNECTION", "/named/in/environment")
    assert common.find_connection(None) == Path("/named/in/environment")
    assert common.find_connection(Path("/flag")) == Path("/flag")


def test_client_settings_beat_the_connection_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    connection, config = tmp_path / "connection.json", tmp_path / "polarkv.toml"
    connection.write_text(json.dumps({"endpoint": "unix:///file", "deadline_ms": 1, "threads": 1, "operations": 1}))
    config.write_text("[client]\ndeadline_ms = 2\nthreads = 2\noperations = 2\n")
    monkeypatch.setenv("POLARKV_THREADS", "3")
    monkeypatch.setenv("POLARKV_OPERATIONS", "3")
    found = common.Session(False, connection, config).settings(operations=4)
    assert (found.endpoint, found.deadline_ms, found.threads, found.operations) == ("unix:///file", 2, 3, 4)
