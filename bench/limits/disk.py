"""O_DIRECT reads and writes of preallocated files, as `fio --direct=1 --rw=read|write --numjobs=N` does them."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench.buffers import Region, anonymous_region
from bench.subject import SubjectError

THREADS = (4, 8)


class DirectDisk:
    """Each thread owns one file and one stretch of a huge-page buffer, and goes through both in order."""

    name = "O_DIRECT"

    def __init__(self) -> None:
        self._directory: Path | None = None
        self._descriptors: list[int] = []
        self._buffer: Region
        self._total_bytes = 0
        self._executor = ThreadPoolExecutor(max(THREADS))

    def start(self, total_bytes: int, directory: Path) -> None:
        self._total_bytes = total_bytes
        self._buffer = anonymous_region(total_bytes)
        self._buffer.fill_random(total_bytes)
        self._directory = Path(tempfile.mkdtemp(prefix="limit-", dir=directory))
        for index in range(max(THREADS)):
            path = self._directory / f"file-{index}"
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
            self._descriptors.append(descriptor)
            os.posix_fallocate(descriptor, 0, total_bytes // min(THREADS))
            # Written once, so that no measured write converts unwritten extents.
            self._move(os.pwritev, index, total_bytes // min(THREADS), 4 * 1024 * 1024, base=0)
            os.fsync(descriptor)

    def measure(self, value_bytes: int) -> dict[str, float]:
        rates = {}
        for threads in THREADS:
            rates[f"write, {threads} threads"] = self._run(os.pwritev, threads, value_bytes)
            rates[f"read, {threads} threads"] = self._run(os.preadv, threads, value_bytes)
        return rates

    def _run(self, call: Callable[..., int], threads: int, value_bytes: int) -> float:
        share = self._total_bytes // threads
        began = time.perf_counter()
        jobs = [
            self._executor.submit(self._move, call, index, share, value_bytes, base=index * share)
            for index in range(threads)
        ]
        for job in jobs:
            job.result()
        return self._total_bytes / (time.perf_counter() - began) / 1e9

    def _move(self, call: Callable[..., int], index: int, share_bytes: int, value_bytes: int, *, base: int) -> None:
        descriptor = self._descriptors[index]
        view = self._buffer.view()
        for offset in range(0, share_bytes, value_bytes):
            moved = call(descriptor, [view[base + offset : base + offset + value_bytes]], offset)
            if moved != value_bytes:
                raise SubjectError(f"short transfer: {moved} of {value_bytes} bytes")

    def describe(self) -> dict[str, str]:
        assert self._directory is not None
        status = os.statvfs(self._directory)
        return {"buffers": self._buffer.kind, "free": f"{status.f_bavail * status.f_frsize / 1e9:.0f} GB"}

    def close(self) -> None:
        self._executor.shutdown()
        for descriptor in self._descriptors:
            os.close(descriptor)
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
