"""Server processes of a peer: die with the worker, and are waited for with a deadline."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.subject import SubjectError

START_SECONDS = 30.0
STOP_SECONDS = 10.0
POLL_SECONDS = 0.05


class Servers:
    """The processes that one subject started."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._processes: list[tuple[str, subprocess.Popen[bytes]]] = []

    def start(self, name: str, command: Sequence[str], ready: Callable[[], bool]) -> None:
        """Start and wait until `ready`. SubjectError with the end of its log when it ends or never gets there."""
        log_path = self._directory / f"{name}.log"
        # The kernel ends the server when the worker dies, however it dies.
        prefix = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                [*prefix, *command], stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=self._directory
            )
        self._processes.append((name, process))
        deadline = time.monotonic() + START_SECONDS
        while not ready():
            if process.poll() is not None or time.monotonic() > deadline:
                tail = " | ".join(log_path.read_text(errors="replace").strip().splitlines()[-3:])
                state = "ended" if process.poll() is not None else f"not ready after {START_SECONDS:.0f} s"
                raise SubjectError(f"{name} {state}: {tail}")
            time.sleep(POLL_SECONDS)

    def stop(self) -> None:
        for _, process in reversed(self._processes):
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_SECONDS)
            process.kill()
            process.wait()
        self._processes.clear()


def port_open(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1.0):
        return True
    return False


def prepare_namespace() -> None:
    """Bring up loopback in this worker's own network namespace. Its default congestion control becomes reno: cubic may
    not be chosen inside a namespace everywhere, bbr is slow over loopback, and reno and cubic reach the same rate."""
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True, capture_output=True)
    with contextlib.suppress(OSError):
        Path("/proc/sys/net/ipv4/tcp_congestion_control").write_text("reno")
