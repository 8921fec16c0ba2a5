"""Which machine this is, so that peers know whether shared memory can reach them."""

from __future__ import annotations

import socket
from pathlib import Path


def host_id() -> str:
    """Return an id that every process of this machine's present boot computes alike, in containers too."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()
