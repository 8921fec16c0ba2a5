"""`polarkv up` and everything that a person does to a cluster, through the command itself and real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from polarkv_client.cli.main import ExitCode, run
from polarkv_client.config import load_config
from tests.support.processes import alive
from tests.support.waiting import wait_until

# Several processes start in each, perhaps on a busy machine.
pytestmark = pytest.mark.timeout(180)
COMMAND = [sys.executable, "-m", "polarkv_dataplane.cli"]
START_S = 45.0  # of several processes, on a machine that may be busy
FILE_BYTES = 3_000_001  # no multiple of anything


@dataclass
class Up:
    """A running `polarkv up`."""

    process: subprocess.Popen[str]
    directory: Path

    @property
    def connection(self) -> str:
        return str(self.directory / "connection.json")

    def state(self) -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads((self.directory / "supervisor.json").read_text())
        return loaded

    def pids(self) -> dict[str, int]:
        state = self.state()
        return {"supervisor": state["pid"], **{name: child["pid"] for name, child in state["children"].items()}}


def start(directory: Path, *arguments: str) -> Up:
    """Start a cluster in the foreground and wait for its banner."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("POLARKV_")}
    process = subprocess.Popen(
        [*COMMAND, "up", "--dir", str(directory), "--memory", "32MiB", "--disk", "256MiB", *arguments, "--json"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip
    assert process.stdout is not None and process.stderr is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line == "}\n":
            break
    said = "".join(lines)
    assert process.poll() is None and json.loads(said)["state"] == "ready", said + process.stderr.read()
    return Up(process, directory)


def stop(up: Up, number: signal.Signals = signal.SIGTERM) -> tuple[float, list[dict[str, Any]]]:
    """Send a signal; return how many seconds the end took, and the events that were told on standard error."""
    begun = time.monotonic()
    if up.process.poll() is None:
        up.process.send_signal(number)
    said = up.process.communicate(timeout=60)[1]
    return time.monotonic() - begun, [json.loads(line) for line in said.splitlines()]


def all_gone(pids: dict[str, int]) -> bool:
    return not alive(pids.values())


@pytest.fixture(scope="module")
def up() -> Iterator[Up]:
    # A short path: sockets lie in it, and theirs have at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="polarkv-cli-") as folder:
        cluster = start(Path(folder) / "c", "--nodes", "2")
        try:
            yield cluster
        finally:
            if cluster.process.poll() is None:
                stop(cluster)


@pytest.fixture
def say(up: Up, capfd: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Run a subcommand against the cluster in this process; return what its --json says."""

    def command(*arguments: str, code: int = ExitCode.OK) -> Any:
        capfd.readouterr()
        assert run([*arguments, "--connection", up.connection, "--json"]) == code, capfd.readouterr()
        return json.loads(capfd.readouterr().out)

    return command


def make_file(folder: Path, name: str) -> Path:
    path = folder / name
    path.write_bytes(os.urandom(FILE_BYTES))
    return path


def settled(say: Callable[..., Any]) -> bool:
    """Whether disk has everything that memory has."""
    return all(entry["state"] in {"MemoryAndDisk", "Disk"} for entry in say("ls"))


def test_put_and_get_through_the_command(up: Up, tmp_path: Path) -> None:
    source, target = make_file(tmp_path, "words.bin"), tmp_path / "back.bin"
    environment = {**os.environ, "POLARKV_CONNECTION": str(up.directory)}

    def polarkv(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [*COMMAND, *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=90, check=False)

    put = polarkv("put", str(source), "--chunk", "256KiB")
    assert (put.returncode, "12 stored" in put.stdout) == (0, True), put
    get = polarkv("get", "words.bin", "-o", str(target))
    assert (get.returncode, "12 memory" in get.stdout) == (0, True), get
    assert target.read_bytes() == source.read_bytes()
    again = polarkv("get", "words.bin", "-o", str(target))
    assert again.returncode == ExitCode.USAGE
    assert "--force" in again.stderr
    missing = polarkv("get", "other.bin")
    assert (missing.returncode, "never put" in missing.stderr) == (ExitCode.FAILED, True)


def test_files_are_replaced_only_when_asked(say: Callable[..., Any], tmp_path: Path) -> None:
    path, target = make_file(tmp_path, "a.bin"), tmp_path / "back.bin"
    assert say("put", str(path))["outcome"] == "stored"
    assert say("put", str(path))["outcome"] == "exists"
    make_file(tmp_path, "a.bin")
    refused = say("put", str(path), code=ExitCode.FAILED)["error"]
    assert "--replace" in refused["text"]
    assert say("put", str(path), "--replace")["outcome"] == "stored"
    say("get", "a.bin", "-o", str(target))
    assert target.read_bytes() == path.read_bytes()
    empty = tmp_path / "empty.bin"
    empty.touch()
    assert say("put", str(empty))["chunks"] == 0
    assert say("get", "empty.bin", "-o", str(target), "--force")["size_bytes"] == 0
    assert target.read_bytes() == b""


def test_a_file_survives_in_the_disk_tier(say: Callable[..., Any], tmp_path: Path) -> None:
    source, target = make_file(tmp_path, "cold.bin"), tmp_path / "back.bin"
    say("put", str(source), "--chunk", "512KiB")
    wait_until(lambda: settled(say), "chunks to be on disk")
    assert say("evict", "--file", "cold.bin")["done"] == 7
    assert {entry["state"] for entry in say("ls") if entry["length_bytes"] == 512 << 10} == {"Disk"}
    assert say("get", "cold.bin", "-o", str(target))["outcomes"] == {"disk": 6}
    assert target.read_bytes() == source.read_bytes()
    assert say("evict", "--file", "cold.bin", "--tier", "all")["done"] == 7
    wait_until(lambda: not [e for e in say("ls") if e["length_bytes"] == 512 << 10], "the entries to go")
    assert "never put" in say("get", "cold.bin", "--force", code=ExitCode.FAILED)["error"]["text"]


def test_status_and_top(say: Callable[..., Any], up: Up, capfd: pytest.CaptureFixture[str]) -> None:
    status = say("status")
    assert status["healthy"] is True
    assert [(node["name"], node["state"]) for node in status["nodes"]] == [("node-0", "Active"), ("node-1", "Active")]
    assert status["stats"]["cross_node_bytes"] == 0
    assert run(["status", "--connection", up.connection]) == 0
    assert "node-1" in capfd.readouterr().out
    assert run(["top", "--count", "2", "--interval", "0.1", "--connection", up.connection]) == 0
    assert "hit rate" in capfd.readouterr().out
    assert run(["top", "--count", "2", "--interval", "0.1", "--connection", up.connection, "--json"]) == 0
    assert [json.loads(line)["healthy"] for line in capfd.readouterr().out.splitlines()] == [True, True]


def test_pins_hold_entries(say: Callable[..., Any], tmp_path: Path) -> None:
    say("put", str(make_file(tmp_path, "pinned.bin")), "--chunk", "1MiB")
    wait_until(lambda: settled(say), "chunks to be on disk")
    assert say("pin", "--file", "pinned.bin", "--ttl", "10m")["done"] == 4
    pinned = [entry for entry in say("ls") if entry["pinned_ms"]]
    assert len(pinned) == 4
    assert say("ls", "--prefix", pinned[0]["key"][:8])[0]["key"] == pinned[0]["key"]
    assert say("pin", pinned[0]["key"][:16], "--remove")["done"] == 1
    assert say("pin", "--all", "--remove")["done"] >= 3
    assert not [entry for entry in say("ls") if entry["pinned_ms"]]
    assert "ttl" in say("pin", "--all", "--ttl", "long", code=ExitCode.USAGE)["error"]["field"]
    assert say("evict", "xyz", code=ExitCode.USAGE)["error"]["field"] == "KEY"
    assert "0f0f0f0f" in say("evict", "0f0f0f0f", code=ExitCode.FAILED)["error"]["text"]


def test_drain_and_cancel(say: Callable[..., Any]) -> None:
    assert say("drain", "node-1", "--wait", "--timeout", "60")["state"] == "Drained"
    assert say("status", code=ExitCode.FAILED)["healthy"] is False
    assert say("drain", "node-1", "--cancel", "--wait", "--timeout", "60")["state"] == "Active"
    assert say("status")["healthy"] is True
    assert "node-0, node-1" in say("drain", "node-9", code=ExitCode.USAGE)["error"]["fix"]


def test_bench_and_doctor(say: Callable[..., Any], tmp_path: Path) -> None:
    for transport in ("shm", "tcp"):
        bench = say("bench", "--chunk", "64KiB", "--batch", "8", "--rounds", "3", "--transport", transport)
        assert (bench["corrupted"], bench["missed"], bench["not_stored"]) == (0, 0, 0)
        assert set(bench["transports"].values()) == {transport}
        assert bench["median"]["load_gb_per_s"] > 0
    levels = {check["check"]: check["level"] for check in say("doctor", "--dir", str(tmp_path))["checks"]}
    assert (levels["connection"], levels["cache nodes"]) == ("ok", "ok")


def keys(say: Callable[..., Any]) -> set[str]:
    """All entries' keys: other tests leave some in this cluster."""
    return {entry["key"] for entry in say("ls", "--limit", "100000")}


def test_both_tiers_are_calibrated_and_nothing_stays(say: Callable[..., Any], up: Up) -> None:
    """Memory and, through the admin API, disk; chunks are removed, also when somebody interrupts it."""
    before = keys(say)
    found = say("calibrate", "--chunk", "64KiB", "--batch", "8", "--rounds", "3", "--prefill", "1000")
    assert min(found["store_bytes_per_s"], found["memory_bytes_per_s"], found["disk_bytes_per_s"]) > 0
    assert found["disk_not_measured_because"] == ""
    say("bench", "--chunk", "64KiB", "--batch", "8", "--rounds", "3")
    wait_until(lambda: keys(say) <= before, "files to be deleted")
    process = subprocess.Popen(
        [*COMMAND, "calibrate", "--chunk", "64KiB", "--batch", "8", "--rounds", "1000", "--connection", up.connection],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    wait_until(lambda: not keys(say) <= before, "it to have begun", START_S)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=40)
    assert (process.returncode, out) == (ExitCode.INTERRUPTED, "")
    assert "Traceback" not in err
    wait_until(lambda: keys(say) <= before, "files to be deleted")


def test_a_wrong_token_is_told(up: Up, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    known = json.loads(Path(up.connection).read_text())
    wrong = tmp_path / "connection.json"
    wrong.write_text(json.dumps({**known, "token": "wrong-token-here", "admin_token": "wrong-too-and-long"}))
    for command in (["status"], ["get", "x"]):
        assert run([*command, "--connection", str(wrong)]) == ExitCode.USAGE
        said = capfd.readouterr().err
        assert "token" in said and "wrong-to" not in said


def test_a_second_cluster_in_the_same_directory_is_refused(up: Up, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["up", "--dir", str(up.directory), "--memory", "32MiB"]) == ExitCode.USAGE
    said = capfd.readouterr().err
    assert str(up.pids()["supervisor"]) in said and "polarkv down --dir" in said
    assert up.process.poll() is None


def test_secrets_are_the_owners_alone(up: Up) -> None:
    for name in ("connection.json", "secret", "tokens.json", "supervisor.json"):
        assert (up.directory / name).stat().st_mode & 0o777 == 0o600, name
    known = load_config(up.connection)
    secret = known.token.get_secret_value(), known.admin_token.get_secret_value()
    for pid in up.pids().values():
        shown = " ".join(psutil.Process(pid).cmdline())
        assert not any(part in shown for part in secret)
    for path in (up.directory / "logs").glob("*.log"):
        assert not any(part in path.read_text() for part in secret), path


@pytest.mark.parametrize("name", ["disk-1", "slab-0", "manager"])
def test_a_killed_server_comes_back(say: Callable[..., Any], up: Up, tmp_path: Path, name: str) -> None:
    before = json.loads(Path(up.connection).read_text())
    pid = up.pids()[name]
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: up.pids()[name] not in {pid, None}, f"{name} to be started again", START_S)
    path, target = make_file(tmp_path, f"after-{name}.bin"), tmp_path / "back.bin"

    def round_trip() -> bool:
        target.unlink(missing_ok=True)
        return run(["put", str(path), "--connection", up.connection]) == 0 and (
            run(["get", path.name, "-o", str(target), "--connection", up.connection]) == 0
        )

    wait_until(round_trip, "a round trip", START_S)
    assert target.read_bytes() == path.read_bytes()
    wait_until(lambda: run(["status", "--connection", up.connection]) == 0, "all nodes to be Active", START_S)
    assert json.loads(Path(up.connection).read_text()) == before
    child = up.state()["children"][name]
    assert (child["starts"], "SIGKILL" in child["last_end"]) == (2, True)


def test_ctrl_c_leaves_nothing(up: Up) -> None:
    """The last test of this module: it ends the cluster."""
    pids = up.pids()
    os.kill(pids["slab-1"], signal.SIGSTOP)
    seconds, events = stop(up, signal.SIGINT)
    assert seconds < 5.5
    assert up.process.returncode == 0
    restarts = [event["text"].split()[0] for event in events if event["event"] == "restart"]
    assert restarts == ["disk-1", "slab-0", "manager"]
    wait_until(lambda: all_gone(pids), "every process to be gone")
    mounts = Path("/proc/self/mounts").read_text()
    assert str(up.directory) not in mounts and "polarkv" not in mounts
    assert not list((up.directory / "run").glob("slab-0*"))
    assert up.state()["state"] == "stopped"
