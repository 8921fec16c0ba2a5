"""What the guest promises the tests that run in it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.guest import SLOWNESS
from tests.support.waiting import wait_until


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=30 * SLOWNESS, check=False)
    assert done.returncode == 0, (command, done.stdout, done.stderr)
    return done.stdout


def sent_bytes(link: str) -> int:
    return int(Path(f"/sys/class/net/{link}/statistics/tx_bytes").read_text(encoding="ascii"))


def test_the_root_is_a_layer_over_the_machines_own() -> None:
    mounts = [line.split() for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines()]
    assert [kind for _, where, kind, *_ in mounts if where == "/"] == ["overlay"]
    shared = [(where, options) for _, where, kind, options, *_ in mounts if kind in ("hostfs", "9p")]
    writable = [where for where, options in shared if "rw" in options.split(",")]
    assert writable == ["/run/polarkv-vm"]


def test_the_scratch_file_system_takes_direct_transfers(tmp_path: Path) -> None:
    assert tmp_path.is_relative_to("/scratch")
    descriptor = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    os.close(descriptor)


@pytest.mark.parametrize(("server", "client"), [("rxe0", "rxe1"), ("rxe1", "rxe0")])
def test_rdma_between_the_two_hosts_crosses_their_link(server: str, client: str) -> None:
    before = {link: sent_bytes(link) for link in ("host0", "host1")}
    size, iterations = 65536, 20
    arguments = ["-g", "1", "-s", str(size), "-n", str(iterations), "-e"]
    listening = subprocess.Popen(["ibv_rc_pingpong", "-d", server, *arguments], stdout=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: run("ss", "-Hltn", "sport = 18515"), "the server of ibv_rc_pingpong to listen")
        run("ibv_rc_pingpong", "-d", client, *arguments, "127.0.0.1")
        assert listening.wait(timeout=10 * SLOWNESS) == 0
    finally:
        listening.kill()
        listening.communicate()
    for link, value in before.items():
        assert sent_bytes(link) - value >= size * iterations
