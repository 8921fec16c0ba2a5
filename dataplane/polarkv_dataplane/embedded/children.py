"""The supervisor's children: how each is started, when it is started again, and what its log said last."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from polarkv_dataplane.cli.lifetime import PARENT_VARIABLE
from polarkv_dataplane.embedded.places import Places
from polarkv_dataplane.embedded.settings import UpSettings

FIRST_WAIT_S = 0.1
LONGEST_WAIT_S = 5.0
STABLE_S = 10.0
LOG_LIMIT_BYTES = 16 << 20
_TAIL_BYTES = 4096


@dataclass
class Child:
    """One server of the cluster. ``failures`` counts ends in a row, none of them after a stable life."""

    name: str
    arguments: list[str]
    log: Path
    environment: dict[str, str]
    process: subprocess.Popen[bytes] | None = None
    started_at: float = 0.0
    due_at: float = 0.0
    failures: int = 0
    starts: int = 0
    last_end: str = ""
    pidfd: int = field(default=-1, repr=False)

    @property
    def pid(self) -> int | None:
        """Its process id while it lives."""
        return self.process.pid if self.process else None

    def start(self) -> int:
        """Start it; return a descriptor that becomes readable when it ends."""
        command = [sys.executable, "-m", "polarkv_dataplane.cli", *self.arguments]
        environment = {**os.environ, **self.environment, PARENT_VARIABLE: str(os.getpid())}
        self.trim_log()
        with self.log.open("ab", buffering=0) as log:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)
        self.pidfd = os.pidfd_open(self.process.pid)
        self.started_at = time.monotonic()
        self.starts += 1
        return self.pidfd

    def ended(self, now: float) -> int:
        """Collect it after its end, plan the next start; return its exit code (negative: a signal)."""
        assert self.process is not None
        code = self.process.wait()
        os.close(self.pidfd)
        self.process, self.pidfd = None, -1
        if now - self.started_at >= STABLE_S:
            self.failures = 0
        self.due_at = now + self.wait_s()
        self.failures += 1
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        self.last_end = f"{how} after {now - self.started_at:.1f} s"
        return code

    def wait_s(self) -> float:
        """How long to wait before the next start, after this many failures in a row."""
        return min(FIRST_WAIT_S * 2.0 ** min(self.failures, 16), LONGEST_WAIT_S)

    def signal(self, number: int) -> None:
        """Send it a signal, if it lives."""
        if self.process is not None:
            self.process.send_signal(number)

    def tail(self, lines: int = 8) -> str:
        """The last lines of its log."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
                text = file.read().decode("utf-8", "replace")
        except OSError:
            return ""
        return "\n".join(text.strip().splitlines()[-lines:])

    def trim_log(self) -> None:
        """Keep the log below its limit: what it holds becomes ``<name>.log.1``, in place of what was there."""
        try:
            if self.log.stat().st_size <= LOG_LIMIT_BYTES:
                return
            content = self.log.read_bytes()
            self.log.with_suffix(".log.1").write_bytes(content[-LOG_LIMIT_BYTES:])
            # The child appends: it goes on at the new end.
            os.truncate(self.log, 0)
        except OSError:
            return


def plan_children(
    settings: UpSettings, places: Places, http_port: int, config: Path | None, log_level: str
) -> list[Child]:
    """The processes of the cluster: a manager, and a slab server and a disk server for each cache node."""
    common = ["--log-level", log_level, "--secret-file", str(places.secret)]
    common += ["--config", str(config)] if config else []
    endpoint = f"unix://{places.socket('manager')}"
    manager = ["--rpc", endpoint, "--http-host", "127.0.0.1", "--http-port", str(http_port)]
    plans = [("manager", ["manager", *common, *manager, "--tokens-file", str(places.tokens)])]
    for node in range(settings.nodes):
        shared = [*common, "--node", f"node-{node}", "--manager", endpoint]
        unix_socket = str(places.socket(f"slab-{node}"))
        slab = ["--memory", str(int(settings.memory_bytes)), "--unix-socket", unix_socket]
        disk = ["--directories", str(places.disk(node)), "--slab-socket", unix_socket]
        disk += ["--capacity", str(int(settings.disk_bytes))]
        plans += [(f"slab-{node}", ["slab", *shared, *slab]), (f"disk-{node}", ["disk", *shared, *disk])]
    return [Child(name, arguments, places.log(name), {}) for name, arguments in plans]
