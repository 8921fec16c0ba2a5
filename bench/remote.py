"""The harness's end of a worker: starts it, asks with a deadline, and ends it with everything that it started."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.subject import SubjectError

REPOSITORY = Path(__file__).resolve().parent.parent
START_SECONDS = 120.0
CALL_SECONDS = 120.0
CLOSE_SECONDS = 20.0


@dataclass(frozen=True)
class WorkerSpec:
    """How to start the worker of one subject. `isolated`: in a network namespace of its own, because the peer listens
    on every interface."""

    name: str
    python: str
    environment: dict[str, str] = field(default_factory=dict)
    isolated: bool = False


def _isolation() -> list[str]:
    prefix = ["unshare", "--net"]
    return prefix if os.geteuid() == 0 else [*prefix, "--user", "--map-root-user"]


class RemoteSubject:
    """One running worker. Any failure is a SubjectError, and the worker is gone afterwards."""

    def __init__(self, spec: WorkerSpec, log_path: Path) -> None:
        self.name = spec.name
        self._log_path = log_path
        command = [*(_isolation() if spec.isolated else []), spec.python, "-m", "bench.worker", spec.name]
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONUNBUFFERED": "1", **spec.environment}
        with log_path.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=REPOSITORY,
                env=environment,
                start_new_session=True,
            )
        self._buffer = b""

    def call(self, command: str, timeout_seconds: float = CALL_SECONDS, **arguments: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"command": command, **arguments}).encode() + b"\n")
            self._process.stdin.flush()
            answer: dict[str, Any] = json.loads(self._read_line(timeout_seconds))
        except (OSError, ValueError) as error:
            self.kill()
            raise SubjectError(f"worker ended during {command!r}: {error}; {self._last_words()}") from error
        if "error" in answer:
            raise SubjectError(str(answer["error"]))
        return answer

    def start(self, region_bytes: int) -> None:
        self.call("start", START_SECONDS, region_bytes=region_bytes)

    def close(self) -> None:
        """Ask it to stop its servers, then make sure of it."""
        with contextlib.suppress(SubjectError):
            self.call("close", CLOSE_SECONDS)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(CLOSE_SECONDS)
        self.kill()

    def kill(self) -> None:
        """The worker leads a process group of its own; servers it started also die with it (see `peers.server`)."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _read_line(self, timeout_seconds: float) -> bytes:
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                if not selector.select(timeout_seconds):
                    raise OSError(f"no answer within {timeout_seconds:.0f} s")
                piece = os.read(self._process.stdout.fileno(), 65536)
                if not piece:
                    raise OSError("end of output")
                self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _last_words(self) -> str:
        lines = self._log_path.read_text(errors="replace").strip().splitlines()
        return f"last line of its log: {lines[-1]!r}" if lines else "its log is empty"
