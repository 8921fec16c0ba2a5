"""Programs that look at devices and change them: in one language, without udev, never without end."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Sequence

LOOK_S = 60.0
_KILLED_S = 2.0


class ToolFailed(RuntimeError):
    """A program is missing, failed, or did not end; says which, and what it said."""


def run(argv: Sequence[str], timeout_s: float = LOOK_S, accepted: Sequence[int] = (0,)) -> str:
    """Run a program and return what it printed. ``accepted`` are the exit statuses that mean success.

    Raises:
        ToolFailed: it is missing, failed, or did not end in time.
    """
    words = " ".join(argv)
    path = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
    try:
        process = subprocess.Popen(
            argv,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            # mdadm would wait for device nodes that udev makes, and there is none in a container.
            env={**os.environ, "LC_ALL": "C", "PATH": path, "MDADM_NO_UDEV": "1"},
            stdin=subprocess.DEVNULL,
            # What ends this program in a terminal must not cut a step off.
            start_new_session=True,
        )
    except FileNotFoundError:
        raise ToolFailed(f"{argv[0]} is not there: install Debian's mdadm, e2fsprogs and util-linux") from None
    try:
        printed, complained = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        # Whoever waits for a device in the kernel is killed when that answers: it may be never.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=_KILLED_S)
        raise ToolFailed(f"{words} did not end within {timeout_s:.0f} s: a device does not answer") from None
    if process.returncode not in accepted:
        said = " | ".join((complained.strip() or printed.strip()).splitlines())
        raise ToolFailed(f"{words} failed ({process.returncode}): {said}")
    return printed
