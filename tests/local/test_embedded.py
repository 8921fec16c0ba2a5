"""The embedded cluster's life: nothing outlives it, its directory keeps what was on disk, trouble at start is told."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from polarkv_client.cli.admin_api import AdminClient
from polarkv_client.cli.main import ExitCode, run
from polarkv_client.config import load_config
from polarkv_client.errors import ConfigurationError
from polarkv_client.keys import Namespace, chunk_keys
from polarkv_client.states import Tier
from polarkv_client.sync import SyncClient
from polarkv_dataplane.embedded import Cluster, StartFailed
from tests.support.processes import alive
from tests.support.waiting import wait_until

# Several processes start in each, perhaps on a busy machine.
pytestmark = pytest.mark.timeout(180)
SIZES: dict[str, Any] = {"memory": "16MiB", "disk": "64MiB"}
KEYS = chunk_keys(Namespace(model_id="embedded", chunk_tokens=1), range(8))
CHUNK_BYTES = 100_000


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder whose path is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="polarkv-emb-") as name:
        yield Path(name)


def payloads() -> list[bytes]:
    return [bytes([number]) * CHUNK_BYTES for number in range(len(KEYS))]


def test_a_killed_supervisor_leaves_nothing_but_what_is_on_disk(folder: Path) -> None:
    with Cluster(directory=folder / "c", **SIZES) as cluster:
        with SyncClient.connect(cluster.connection) as client:
            assert client.store(KEYS, payloads()).stored == len(KEYS)
        with AdminClient(load_config(cluster.connection)) as admin:
            wait_until(lambda: all(e["state"] == "MemoryAndDisk" for e in admin.entries(100)), "offloads")
        first = json.loads(cluster.connection.read_text())
        pids = list(cluster.pids().values())
        assert len(alive(pids)) == 4
        cluster.signal("disk-0", signal.SIGSTOP)
        cluster.signal("supervisor", signal.SIGKILL)
        wait_until(lambda: not alive(pids), "every process to be gone")
    with Cluster(directory=folder / "c", **SIZES) as cluster:
        assert json.loads(cluster.connection.read_text()) == first
        with SyncClient.connect(cluster.connection) as client:
            wait_until(lambda: all(client.exists(KEYS)), "the disk's inventory")
            buffers = [bytearray(CHUNK_BYTES) for _ in KEYS]
            loaded = client.load(KEYS, buffers, 10_000)
            assert [chunk.tier for chunk in loaded.chunks] == [Tier.DISK] * len(KEYS)
            assert [bytes(buffer) for buffer in buffers] == payloads()


def test_nothing_outlives_its_maker(folder: Path) -> None:
    script = (
        "import sys, time; from polarkv_dataplane.embedded import Cluster\n"
        f"c = Cluster(directory={str(folder / 'c')!r}, memory='16MiB', disk='64MiB'); c.start()\n"
        "print(*c.pids().values(), flush=True); sys.stdin.read()\n"
    )
    maker = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert maker.stdout is not None
    pids = [int(word) for word in maker.stdout.readline().split()]
    try:
        assert len(alive(pids)) == 4
    finally:
        maker.kill()
        maker.communicate(timeout=30)
    wait_until(lambda: not alive(pids), "every process to be gone")


def test_restart_gives_a_new_life(folder: Path) -> None:
    with Cluster(directory=folder / "c", **SIZES) as cluster:
        before = cluster.pids()
        cluster.restart("slab-0", 90)
        after = cluster.pids()
        assert {name for name in before if before[name] != after[name]} == {"slab-0"}
        with pytest.raises(ConfigurationError, match=str(before["supervisor"])):
            Cluster(directory=folder / "c", **SIZES).start()


def test_detached_stays_until_down(folder: Path) -> None:
    command = [sys.executable, "-m", "polarkv_dataplane.cli"]
    up = [*command, "up", "--detach", "--dir", str(folder / "c"), "--memory", "16MiB", "--disk", "64MiB", "--json"]
    started = subprocess.run(up, capture_output=True, text=True, timeout=150, check=True)
    supervisor = json.loads(started.stdout)["pid"]
    try:
        assert alive([supervisor])
        assert run(["status", "--connection", str(folder / "c")]) == ExitCode.OK
    finally:
        assert run(["down", "--dir", str(folder / "c")]) == ExitCode.OK
    assert not alive([supervisor])
    assert run(["down", "--dir", str(folder / "c")]) == ExitCode.FAILED


def test_a_server_that_cannot_start_is_told_with_its_last_words(folder: Path) -> None:
    config = folder / "polarkv.toml"
    config.write_text("[disk]\nrequire_mount = true\n")
    cluster = Cluster(directory=folder / "c", config=config, **SIZES)
    with pytest.raises(StartFailed) as caught:
        cluster.start()
    assert "disk-0 ended with code 2" in str(caught.value)
    assert "directories" in str(caught.value) and "mount" in str(caught.value)
    assert cluster.state()["state"] == "failed"
    assert not alive([pid for pid in cluster.pids().values() if pid != cluster.state()["pid"]])


def test_a_server_that_keeps_dying_is_told(folder: Path) -> None:
    """A directory where the manager's socket belongs: it ends with an error at each start."""
    (folder / "c" / "run" / "manager.sock").mkdir(parents=True)
    with pytest.raises(StartFailed, match=r"manager ended with code"):
        Cluster(directory=folder / "c", **SIZES).start()


@pytest.mark.postgres
def test_metadata_may_be_in_postgresql(folder: Path, postgres_url: str) -> None:
    with Cluster(directory=folder / "c", metadata_url=postgres_url, **SIZES) as cluster:
        with SyncClient.connect(cluster.connection) as client:
            assert client.store(KEYS, payloads()).stored == len(KEYS)
        with AdminClient(load_config(cluster.connection)) as admin:
            wait_until(lambda: admin.stats()["counts"].get("metadata_rows", 0) >= len(KEYS), "rows to be written")
            assert admin.stats()["metadata_connected"] is True
        assert not (cluster.directory / "metadata.db").exists()
        # It may hold a password.
        assert not any(postgres_url in " ".join(psutil.Process(pid).cmdline()) for pid in cluster.pids().values())
