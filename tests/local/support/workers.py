"""Workers seen from the test: started, stopped, killed, and held to account for what they said."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from tests.local.support.oracle import Chunks
from tests.local.support.worker import Orders
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[3]


def environment() -> dict[str, str]:
    """This process's, with the tests importable."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}


class Worker:
    """One worker process. It may be stopped and killed; what it said stays."""

    def __init__(self, orders: Orders, start_s: float = 60.0) -> None:
        self.orders = orders
        # Beside the servers' logs: they are shown, and go, together.
        stem = Path(orders.connection).parent / "logs" / f"worker-{orders.seed}-{time.monotonic_ns()}"
        self._said, self._errors = stem.with_suffix(".said"), stem.with_suffix(".log")
        command = [sys.executable, "-m", "tests.local.support.worker", json.dumps(dataclasses.asdict(orders))]
        with self._said.open("wb") as said, self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=said, stderr=errors, cwd=ROOT,
                env=environment(),
            )  # fmt: skip
        self._stopped_at: float | None = None
        self._stops: list[tuple[float, float]] = []
        self.killed = False
        try:
            wait_until(self._started, "a worker to start", start_s)
        except BaseException:
            self.kill()
            raise

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def stop(self) -> None:
        """SIGSTOP."""
        self._stopped_at = time.monotonic()
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """SIGCONT."""
        self._process.send_signal(signal.SIGCONT)
        if self._stopped_at is not None:
            self._stops.append((self._stopped_at, time.monotonic()))
            self._stopped_at = None

    def kill(self) -> None:
        """SIGKILL, and collect it."""
        self.killed = True
        self._process.kill()
        self._process.wait(30)
        if self._process.stdin is not None:
            self._process.stdin.close()

    def finish(self, within_s: float = 60.0) -> dict[str, Any]:
        """Let it end by itself; return its last words (nothing when it was killed)."""
        if self.killed:
            return {}
        if self._stopped_at is not None:
            self.go_on()
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            code = self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"a worker did not end within {within_s} s: {self.errors()}") from None
        done = [line for line in self.said() if line["event"] == "done"]
        assert code == 0 and done, f"a worker ended with code {code}: {self.errors()}"
        return done[0]

    def said(self) -> list[dict[str, Any]]:
        """All that it said so far."""
        raw = self._said.read_bytes()
        return [json.loads(line) for line in raw.split(b"\n")[:-1]]

    def errors(self) -> str:
        """The end of its standard error."""
        return self._errors.read_bytes()[-4000:].decode(errors="replace")

    def violations(self) -> list[str]:
        """Everything that must not have happened. Time in which it was stopped is not the product's."""
        found = []
        for line in self.said():
            if line["event"] in {"wrong", "raised"}:
                found.append(f"worker {self.orders.seed} ({self.orders.transport}): {line['event']}: {line['text']}")
            elif line["event"] == "late":
                took_s = line["ended"] - line["began"]
                idle_s = sum(max(0.0, min(b, line["ended"]) - max(a, line["began"])) for a, b in self._stops)
                if took_s - idle_s > line["limit_s"]:
                    found.append(f"worker {self.orders.seed}: {took_s:.3f} s (stopped {idle_s:.3f} s of it), {line}")
            elif line["event"] == "done" and line["hung"]:
                found.append(f"worker {self.orders.seed}: {line['hung']} threads hang")
        return found

    def _started(self) -> bool:
        assert self._process.poll() is None, f"a worker ended at its start: {self.errors()}"
        return any(line["event"] == "ready" for line in self.said())


class Halted:
    """A :mod:`tests.local.support.halting` process, which has stopped itself right before the chosen call."""

    def __init__(self, connection: Path, chunks: Chunks, numbers: list[int], **orders: Any) -> None:
        orders |= {"connection": str(connection), "family": chunks.seed, "lengths": chunks.lengths, "numbers": numbers}
        orders.setdefault("deadline_ms", 30_000)
        command = [sys.executable, "-m", "tests.local.support.halting", json.dumps(orders)]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=ROOT,
            env=environment(),
        )
        try:
            wait_until(self._has_stopped, "the client to stop itself", 60)
        except BaseException:
            self.kill()
            raise

    def _has_stopped(self) -> bool:
        assert self.process.poll() is None, f"it ended before: {self.process.communicate()}"
        return psutil.Process(self.process.pid).status() == psutil.STATUS_STOPPED

    def go_on(self, within_s: float = 60.0) -> dict[str, Any]:
        """SIGCONT; what became of its operation."""
        self.process.send_signal(signal.SIGCONT)
        try:
            said, errors = self.process.communicate(timeout=within_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"a client that went on did not end within {within_s} s") from None
        assert self.process.returncode == 0, errors.decode()
        answer: dict[str, Any] = json.loads(said)
        return answer

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.communicate()
