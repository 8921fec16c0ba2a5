"""Which machine this is, so that peers know whether shared memory can reach them."""

from __future__ import annotations

import socket
from pathlib import Path


def host_id() -> str:
    """Names this machine's running kernel: equal for two processes, in containers too, if they can share memory."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()
