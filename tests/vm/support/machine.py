"""A guest: a kernel of its own over this machine's files, which it cannot change, for one command.

The guest sees the machine's root file system through a scratch layer in its memory, with RDMA's and the arrays' tools
laid over it: the clone, the virtual environment and every cache are where they are here. It runs as root, without
network. A folder shared with it carries the command in, its output and exit status out.
"""

from __future__ import annotations

import os
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import BinaryIO, Protocol

from polarkv_client.errors import ConfigurationError
from tests.vm.support import programs, qemu, uml

HERE = Path(__file__).parent
KINDS = {"uml": uml, "qemu": qemu}
KIND_VARIABLE = "POLARKV_VM_MACHINE"
MEMORY_BYTES = 4 << 30
SCRATCH_BYTES = 8 << 30
MAX_DISKS = 15
TIMED_OUT = 124
NEVER_RAN = 125
CONSOLE_LINES = 60
_TICK_S = 0.02
# A shell's own; and what would send a program in the guest to a place of the machine's.
_NOT_PASSED = {"PWD", "OLDPWD", "SHLVL", "_", "PATH", "TMPDIR", "PYTHONPATH", "XDG_RUNTIME_DIR"}


class Attends(Protocol):
    """Talks with a guest's command through the folder that is shared with it."""

    def look(self, share: Path) -> None:
        """Called again and again while the guest runs. What it raises ends the guest."""

    def ended(self, share: Path) -> None:
        """Called once the guest is off."""


@dataclass(frozen=True)
class Result:
    """What came of a guest: the command's exit status (124: out of time, 125: it never ran or the guest died)."""

    status: int
    output: str
    console: str
    seconds: float


def chosen() -> ModuleType:
    """The kind of guest that POLARKV_VM_MACHINE names; User-Mode Linux where it names none."""
    name = os.environ.get(KIND_VARIABLE, "uml")
    if name not in KINDS:
        raise ConfigurationError(KIND_VARIABLE, name, f"use one of {', '.join(KINDS)}")
    return KINDS[name]


def make_disk(path: Path, size: int) -> Path:
    """Make a disk's image of ``size`` bytes, which takes no room before it is written to."""
    with path.open("wb") as file:
        file.truncate(size)
    return path


def boot(
    command: Sequence[str],
    *,
    disks: Sequence[Path] = (),
    timeout_s: float,
    memory_bytes: int = MEMORY_BYTES,
    echo: BinaryIO | None = None,
    attendant: Attends | None = None,
) -> Result:
    """Run a command in a guest and return what came of it.

    ``disks`` are images that become block devices, in this order; the guest names them in ``POLARKV_VM_DISKS``. They
    hold afterwards what a disk would hold after the power went. ``echo`` gets the output as it comes; the attendant
    looks into the shared folder, which the guest has at ``/run/polarkv-vm``.
    """
    if len(disks) > MAX_DISKS:
        raise ValueError(f"{len(disks)} disks: a guest takes {MAX_DISKS} beside its own")
    kind = chosen()
    layers = kind.layers()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="polarkv-vm-", ignore_cleanup_errors=True) as name:
        share = Path(name)
        images = [make_disk(share / "scratch", SCRATCH_BYTES), *disks]
        _write_share(share, command, kind.disks(len(images)), layers)
        with (share / "console").open("wb") as console:
            process = subprocess.Popen(
                kind.arguments(share, images, memory_bytes),
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
                start_new_session=True,
                env=kind.environment(memory_bytes),
            )
        guard = _guard(process)
        try:
            timed_out = not _follow(process, share, began + timeout_s, echo, attendant)
        finally:
            _end(process, guard)
        if attendant is not None:
            attendant.ended(share)
        said = re.search(r"^exit (\d+)$", (share / "state").read_text(encoding="utf-8"), re.MULTILINE)
        status = TIMED_OUT if timed_out else int(said[1]) if said else NEVER_RAN
        return Result(
            status,
            (share / "output").read_text(encoding="utf-8", errors="replace"),
            (share / "console").read_text(encoding="utf-8", errors="replace"),
            time.monotonic() - began,
        )


def explain(result: Result, timeout_s: float) -> str:
    """Say why a guest's command failed, with the end of what the kernel had to say."""
    if result.status == TIMED_OUT:
        reason = f"it took longer than its {timeout_s:.0f} s"
    elif result.status == NEVER_RAN:
        reason = "the guest died, or never came to its command"
    else:
        reason = f"exit status {result.status}"
    last = "\n".join(result.console.splitlines()[-CONSOLE_LINES:]) or "(nothing)"
    return f"virtual machine: {reason}; the end of its console:\n{last}"


def _write_share(share: Path, command: Sequence[str], devices: Sequence[str], layers: Sequence[Path]) -> None:
    for script in ("guest.sh", "hosts.sh"):
        shutil.copy(HERE / script, share)
    passed = {
        name: value
        for name, value in os.environ.items()
        if name.isidentifier() and name.isascii() and name not in _NOT_PASSED
    }
    passed["PATH"] = f"{Path(sys.executable).parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    passed["POLARKV_VM_PYTHONPATH"] = str(programs.bindings())
    texts = {
        "environment": "".join(f"export {name}={shlex.quote(value)}\n" for name, value in passed.items()),
        "command": f"exec {shlex.join(command)}\n",
        "directory": f"{Path.cwd()}\n",
        "layers": "".join(f"{layer}\n" for layer in layers),
        "disks": f"{' '.join(devices)}\n",
        "output": "",
        "state": "",
    }
    for name, text in texts.items():
        (share / name).write_text(text, encoding="utf-8")


def _follow(
    process: subprocess.Popen[bytes], share: Path, deadline: float, echo: BinaryIO | None, attendant: Attends | None
) -> bool:
    """Pass the output on until the guest is off; whether that was before the deadline."""
    ended = os.pidfd_open(process.pid)
    try:
        with (share / "output").open("rb") as reader:
            while True:
                off = bool(select.select([ended], [], [], _TICK_S)[0])
                if echo is not None and (new := reader.read()):
                    echo.write(new)
                    echo.flush()
                if attendant is not None:
                    attendant.look(share)
                if off or time.monotonic() > deadline:
                    return off
    finally:
        os.close(ended)


def _guard(process: subprocess.Popen[bytes]) -> subprocess.Popen[bytes]:
    """Start what ends the guest should this process be killed: its input ends with it."""
    script = 'read -r _; kill -KILL "-$1"'
    return subprocess.Popen(
        ["sh", "-c", script, "guard", str(process.pid)], stdin=subprocess.PIPE, start_new_session=True
    )


def _end(process: subprocess.Popen[bytes], guard: subprocess.Popen[bytes]) -> None:
    """A guest's processes are processes here, of one group; those of a kernel that died would stay.

    The group's number is nobody else's for as long as its first process has not been waited for.
    """
    guard.kill()
    guard.communicate()
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
