"""Memory copies, chunk by chunk, between a pool like a cache node's and a touched huge-page buffer.

The plain one of one thread is what targets are measured against. The other, with the checksum, past the caches and on
every processor, is the most that a same-host client could reach if there were no protocol at all.
"""

from __future__ import annotations

import ctypes
import os
import platform
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench.buffers import Region, anonymous_region, pool_region
from polarkv_client import native

# One pass takes 30 ms: too short to tell whether other work disturbed it.
PASSES = 6
ONE_THREAD = "one thread"


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

        def plain(offset: int) -> None:
            move(target + offset, source + offset, value_bytes)

        def put(offset: int) -> None:
            native.Move(value_bytes).gather([self._target.view(offset, value_bytes)], source + offset)

        rates = {ONE_THREAD: self._rate(value_bytes, plain, 1)}
        processors = len(os.sched_getaffinity(0))
        if native.compiled is not None and processors > 1:
            rates[f"with checksum, {processors} threads"] = self._rate(value_bytes, put, processors)
        return rates

    def _rate(self, value_bytes: int, copy: Callable[[int], None], threads: int) -> float:
        def part(number: int) -> None:
            for _ in range(PASSES):
                for offset in range(number * value_bytes, self._total_bytes, threads * value_bytes):
                    copy(offset)

        with ThreadPoolExecutor(threads) as pool:
            began = time.perf_counter()
            list(pool.map(part, range(threads)))
            return PASSES * self._total_bytes / (time.perf_counter() - began) / 1e9

    def describe(self) -> dict[str, str]:
        return {"pool": self._pool.kind, "target": self._target.kind, "libc": " ".join(platform.libc_ver())}

    def close(self) -> None:
        del self._pool, self._target
