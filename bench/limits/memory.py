"""Plain one-thread memory copy, chunk by chunk, from a pool like a cache node's into a touched huge-page buffer."""

from __future__ import annotations

import ctypes
import platform
import time
from pathlib import Path

from bench.buffers import Region, anonymous_region, pool_region

# One pass takes 30 ms: too short to tell whether other work disturbed it.
PASSES = 6


class MemoryCopy:
    """libc's memmove at its default settings, through ctypes: the same routine that numpy and memoryview copies use."""

    name = "memory copy"

    def __init__(self) -> None:
        self._pool: Region
        self._target: Region
        self._total_bytes = 0

    def start(self, total_bytes: int, directory: Path) -> None:
        self._total_bytes = total_bytes
        self._pool = pool_region(total_bytes)
        self._target = anonymous_region(total_bytes)

    def measure(self, value_bytes: int) -> dict[str, float]:
        source, target = self._pool.address, self._target.address
        move = ctypes.memmove
        began = time.perf_counter()
        for _ in range(PASSES):
            for offset in range(0, self._total_bytes, value_bytes):
                move(target + offset, source + offset, value_bytes)
        return {"one thread": PASSES * self._total_bytes / (time.perf_counter() - began) / 1e9}

    def describe(self) -> dict[str, str]:
        return {"pool": self._pool.kind, "target": self._target.kind, "libc": " ".join(platform.libc_ver())}

    def close(self) -> None:
        del self._pool, self._target
