"""Which machine this is, so that peers know whether shared memory can reach them; what its kernel says."""

from __future__ import annotations

import socket
from pathlib import Path


def read_text(path: str | Path) -> str:
    """A small file's text, of the kernel's for one; empty when it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def host_id() -> str:
    """Names this machine's running kernel: equal for two processes, in containers too, if they can share memory."""
    return read_text("/proc/sys/kernel/random/boot_id") or socket.gethostname()
