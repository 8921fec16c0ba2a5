"""Programs that look at devices and change them: in one language, without udev, never without end."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence

LOOK_S = 60.0


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
        done = subprocess.run(
            argv,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
            # mdadm would wait for device nodes that udev makes, and there is none in a container.
            env={**os.environ, "LC_ALL": "C", "PATH": path, "MDADM_NO_UDEV": "1"},
            stdin=subprocess.DEVNULL,
            # What ends this program in a terminal must not cut a step off.
            start_new_session=True,
        )
    except FileNotFoundError:
        raise ToolFailed(f"{argv[0]} is not there: install Debian's mdadm, e2fsprogs and util-linux") from None
    except subprocess.TimeoutExpired:
        raise ToolFailed(f"{words} did not end within {timeout_s:.0f} s: a device does not answer") from None
    if done.returncode not in accepted:
        said = " | ".join((done.stderr.strip() or done.stdout.strip()).splitlines())
        raise ToolFailed(f"{words} failed ({done.returncode}): {said}")
    return done.stdout
