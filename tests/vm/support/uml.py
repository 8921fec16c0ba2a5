"""A guest's kernel as an ordinary program: User-Mode Linux."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.vm.support import programs

INIT = Path(__file__).with_name("init-uml.sh")
# Each of the guest's system calls and page faults is a change from one process to another and back: on two processors
# the one would wait for the other to wake up, twice as long as the work takes.
ONE_PROCESSOR = True


def layers() -> list[Path]:
    """What lies over the machine's root."""
    programs.kernel()
    return [programs.tools()]


def disks(count: int) -> list[str]:
    """The names of so many disks in the guest."""
    return [f"/dev/ubd{chr(ord('a') + index)}" for index in range(count)]


def arguments(share: Path, images: Sequence[Path], memory_bytes: int) -> list[str]:
    """The command that boots."""
    return [
        str(programs.kernel()),
        f"mem={memory_bytes >> 20}M",
        "root=none", "rootfstype=hostfs", "rootflags=/", "ro",
        f"init={INIT}", f"polarkv_share={share}", f"uml_dir={share}",
        "con=null", "con0=null,fd:1", "ssl=null", "quiet", "panic=-1", "raid=noautodetect",
        *(f"ubd{chr(ord('a') + index)}={image}" for index, image in enumerate(images)),
    ]  # fmt: skip


def environment(memory_bytes: int) -> dict[str, str]:
    """The environment of that command: it keeps the guest's memory in a file below TMPDIR.

    The file is mapped: beyond the end of the room that there is, a touch kills.
    """
    shared = Path("/dev/shm")
    fits = shared.is_dir() and os.access(shared, os.W_OK) and shutil.disk_usage(shared).free >= memory_bytes
    return {**os.environ, "TMPDIR": str(shared) if fits else tempfile.gettempdir()}
