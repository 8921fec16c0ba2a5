"""The whole suite: guests side by side, as processors allow, and beside them what boots guests itself."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import BinaryIO

import click

from tests.vm.support import machine
from tests.vm.support.sharing import Attendant, Sharing

DISKS = 4
DISK_BYTES = 256 << 20
# A guest has one processor, and all its memory while it runs.
MOST_LANES = 2
NONE_SELECTED = 5
# Tests that boot guests; all others run in them.
BOOTS = "tests/vm/boots"
PYTEST = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider")
PLUGIN = ("-p", "tests.vm.support.sharing_plugin")
_TICK_S = 0.5


class Stopped(Exception):
    """The run was interrupted: guests end at once."""


class Suite:
    """One run of it."""

    def __init__(self, options: Sequence[str], in_guests: Sequence[str], here: Sequence[str], timeout_s: float) -> None:
        """Options go to pytest; ``in_guests`` and ``here`` are paths to be run there, each guest in ``timeout_s``."""
        self._options = options
        self._in_guests = in_guests
        self._here = here
        self._timeout_s = timeout_s
        self._sharing = Sharing()
        self._stopping = threading.Event()
        self._statuses: dict[str, int] = {}

    def run(self) -> int:
        """Run it, and say how it went; the worst exit status."""
        processors = sorted(os.sched_getaffinity(0))[:MOST_LANES]
        machine.chosen().layers()
        with tempfile.TemporaryDirectory(prefix="polarkv-vm-said-") as name:
            # What the second lane says is held back: two outputs at once cannot be read.
            kept = Path(name) / "said"
            work = [lambda: self._guest("guest 1", sys.stdout.buffer), lambda: self._second(kept)]
            if len(processors) == 1:
                work = [lambda: self._only(sys.stdout.buffer)]
            with ThreadPoolExecutor(MOST_LANES) as pool:
                lanes = [pool.submit(self._lane, *each) for each in zip(work, processors, strict=True)]
                try:
                    wait(lanes, return_when=FIRST_EXCEPTION)
                finally:
                    # If a lane failed, or this was interrupted, the other need not go on.
                    self._stopping.set()
            if kept.exists():
                sys.stdout.buffer.write(kept.read_bytes())
                sys.stdout.buffer.flush()
        errors = [error for error in (lane.exception() for lane in lanes) if error is not None]
        for error in sorted(errors, key=lambda error: isinstance(error, Stopped)):
            raise error
        return self._conclusion()

    def _lane(self, work: Callable[[], None], processor: int) -> None:
        if machine.chosen().ONE_PROCESSOR:
            os.sched_setaffinity(threading.get_native_id(), {processor})
        work()

    def _only(self, said: BinaryIO) -> None:
        self._boots(said)
        self._guest("guest 1", said)

    def _second(self, kept: Path) -> None:
        with kept.open("wb") as said:
            self._boots(said)
            while not self._sharing.known.wait(_TICK_S):
                self._check()
            if self._sharing.left() > 1:
                self._guest("guest 2", said)

    def _guest(self, name: str, said: BinaryIO) -> None:
        if not self._in_guests:
            self._sharing.known.set()
            return
        _title(said, name)
        command = [*PYTEST, *PLUGIN, *self._options, *self._in_guests]
        attendant = Attendant(self._sharing, name, self._check)
        with tempfile.TemporaryDirectory(prefix="polarkv-vm-disks-") as folder:
            disks = [machine.make_disk(Path(folder) / str(index), DISK_BYTES) for index in range(DISKS)]
            try:
                result = machine.boot(command, disks=disks, timeout_s=self._timeout_s, echo=said, attendant=attendant)
            finally:
                self._sharing.known.set()
        self._statuses[name] = result.status
        if result.status not in (0, NONE_SELECTED):
            said.write(f"{machine.explain(result, self._timeout_s)}\n".encode())

    def _boots(self, said: BinaryIO) -> None:
        if not self._here:
            return
        _title(said, "on this machine, booting guests")
        environment = {**os.environ, "POLARKV_VM_BOOTS": "1"}
        command = [*PYTEST, *self._options, *self._here]
        process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=said, stderr=said)
        deadline = time.monotonic() + self._timeout_s
        try:
            while process.poll() is None:
                self._check()
                if time.monotonic() > deadline:
                    said.write(f"longer than its {self._timeout_s:.0f} s\n".encode())
                    self._statuses["boots"] = machine.TIMED_OUT
                    return
                self._stopping.wait(_TICK_S)
        finally:
            # The guests that it has booted end with it.
            process.kill()
            process.wait()
        self._statuses["boots"] = process.returncode

    def _check(self) -> None:
        if self._stopping.is_set():
            raise Stopped

    def _conclusion(self) -> int:
        sharing = self._sharing
        counts = ", ".join(f"{name} ran {count}" for name, count in sorted(sharing.counts.items()))
        said = ", ".join(f"{name}: {status}" for name, status in self._statuses.items())
        click.echo(f"== {sharing.total()} tests in guests ({counts}); exit statuses: {said}")
        for line in (wrong := sharing.wrong()):
            click.echo(line, err=True)
        statuses = [abs(status) for status in self._statuses.values() if status != NONE_SELECTED]
        worst = max(statuses, default=NONE_SELECTED)
        return worst or int(bool(wrong))


def _title(said: BinaryIO, text: str) -> None:
    said.write(f"== {text}\n".encode())
    said.flush()
