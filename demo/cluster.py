"""The demo's own cluster: `polarkv up` in a folder that goes away, and the `polarkv` command pointed at it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import httpx

from polarkv_client.cli.admin_api import AdminClient
from polarkv_client.config import CONNECTION_FILE, load_config
from polarkv_client.states import EntryState

ROOT = Path(__file__).parents[1]
_START_S = 60.0
_STOP_S = 30.0


class Cluster:
    """Two cache nodes and a manager while the ``with`` block lasts.

    Raises:
        SystemExit: it did not come up, with the end of its log.
    """

    def __init__(self, memory: str, disk: str, nodes: int = 2) -> None:
        self._command = ("up", "--nodes", str(nodes), "--memory", memory, "--disk", disk)
        # Short, because Unix sockets in it have at most 107 bytes for their path.
        self.folder = Path(tempfile.mkdtemp(prefix="polarkv-demo-"))
        self._log, self._said = self.folder / "up.log", self.folder / "up.json"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def connection(self) -> Path:
        """The connection file, which every client of this cluster reads."""
        return self.folder / "cluster" / CONNECTION_FILE

    @property
    def environment(self) -> dict[str, str]:
        """The environment in which `polarkv` commands reach this cluster."""
        return {**os.environ, "POLARKV_CONNECTION": str(self.connection)}

    def __enter__(self) -> Cluster:
        with self._log.open("wb") as log, self._said.open("wb") as said:
            self._process = subprocess.Popen(
                [_polarkv(), *self._command, "--dir", str(self.connection.parent), "--json"],
                stdin=subprocess.DEVNULL, stdout=said, stderr=log, start_new_session=True,
            )  # fmt: skip
        try:
            wait_until(self._is_ready, _START_S, "the cluster did not come up")
        except BaseException:
            for file in (self._said, self._log):
                sys.stderr.write(file.read_text(errors="replace")[-3000:])
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def admin(self) -> AdminClient:
        """A client of the admin API."""
        return AdminClient(load_config(self.connection))

    def move_memory_to_disk(self, seconds: float) -> None:
        """Wait until disk has every entry and drop the memory copies.

        Raises:
            SystemExit: some were still in memory after ``seconds``.
        """
        with self.admin() as admin:

            def only_on_disk() -> bool:
                admin.evict(None, purge=False)  # what disk does not have yet stays, for the next round
                counts = admin.stats()["entries_by_state"]
                return {state for state, count in counts.items() if count} == {EntryState.DISK.word}

            wait_until(only_on_disk, seconds, "the memory copies were not moved to disk")

    def metric(self, name: str) -> float:
        """The sum of a metric of the manager over its labels.

        Raises:
            SystemExit: there is no such metric.
        """
        known = load_config(self.connection)
        headers = {"Authorization": f"Bearer {known.admin_token.get_secret_value()}"}
        answer = httpx.get(f"{known.admin}/metrics", headers=headers, timeout=10, trust_env=False)
        text = answer.raise_for_status().text
        values = [line.rsplit(" ", 1)[1] for line in text.splitlines() if line.split("{")[0].split(" ")[0] == name]
        if not values:
            raise SystemExit(f"the manager exports no metric {name}")
        return sum(map(float, values))

    def _is_ready(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            raise SystemExit(f"`polarkv up` ended with exit code {self._process.returncode}")
        try:
            return bool(json.loads(self._said.read_bytes())["state"] == "ready")
        except (ValueError, KeyError):
            return False  # not said, or not all of it written yet

    def _stop(self) -> None:
        process = self._process
        if process is not None:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def wait_until(condition: Callable[[], bool], seconds: float, otherwise: str) -> None:
    """Poll ``condition`` until it holds.

    Raises:
        SystemExit: it did not hold in time; the text is ``otherwise``.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"{otherwise} within {seconds:.0f} s")
        time.sleep(0.1)


def _polarkv() -> str:
    """The `polarkv` of the environment that runs the demo."""
    return str(Path(sys.executable).parent / "polarkv")
