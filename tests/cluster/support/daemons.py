"""Long-running programs of a test cluster: each has a log, dies with whoever started it, and tells why it ended."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

LAST_WORDS = 2000


class DaemonError(RuntimeError):
    """A program ended, or was not ready in time; carries the end of its log."""


class Daemon:
    """One program; :meth:`start` may be called again after :meth:`stop`."""

    def __init__(self, name: str, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        self.name = name
        self.log = log
        self._command = list(command)
        self._environment = dict(environment)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """The process's id; None when it was not started or was stopped."""
        return self._process.pid if self._process else None

    def runs(self) -> bool:
        """Whether it was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start it. It is killed when the starting thread ends, however that ends."""
        # setpriv: what Python offers in a child between fork and exec is not safe beside threads.
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", "--", *self._command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=self._environment,
                cwd=self.log.parent,
            )

    def check(self) -> None:
        """Raise DaemonError when it has ended."""
        if self._process is not None and self._process.poll() is not None:
            raise self.error(f"ended with {self._process.returncode}")

    def error(self, what: str) -> DaemonError:
        """What went wrong, with the end of the log."""
        with self.log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - LAST_WORDS))
            said = file.read().decode(errors="replace")
        return DaemonError(f"{self.name} {what}; its log ends:\n{said}")

    def stop(self, with_signal: signal.Signals = signal.SIGTERM, grace_s: float = 5.0) -> None:
        """End it; what does not end within ``grace_s`` is killed. Nothing happens when it does not run."""
        if self._process is None:
            return
        self._process.send_signal(with_signal)
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(30)
        self._process = None
