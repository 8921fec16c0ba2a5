"""Memory for measurements: huge pages where the machine gives them, touched before anything is timed. Standard library
only, because it also runs inside the peers' environments."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

HUGE_PAGE_BYTES = 2 * 1024 * 1024

_libc = ctypes.CDLL(None, use_errno=True)
_libc.memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_libc.memcmp.restype = ctypes.c_int


@dataclass
class Region:
    """`size_bytes` of memory at `address`, aligned to a huge page. `owner` keeps the memory alive."""

    address: int
    size_bytes: int
    kind: str
    owner: object = field(repr=False)
    _whole: memoryview = field(init=False, repr=False)

    def __post_init__(self) -> None:
        # Made once: a view of a part is then a slice, and costs nothing beside a timed copy.
        self._whole = memoryview((ctypes.c_char * self.size_bytes).from_address(self.address)).cast("B")

    def view(self, offset: int = 0, length: int | None = None) -> memoryview:
        return self._whole[offset : None if length is None else offset + length]

    def fill(self, byte: int, length: int) -> None:
        ctypes.memset(self.address, byte, length)

    def fill_random(self, length: int) -> None:
        """Incompressible and different in every 4 KiB, so that a misplaced copy is always seen."""
        step = 8 * 1024 * 1024
        for offset in range(0, length, step):
            piece = os.urandom(min(step, length - offset))
            ctypes.memmove(self.address + offset, piece, len(piece))

    def equals(self, other: Region, length: int, offset: int = 0) -> bool:
        return bool(_libc.memcmp(self.address + offset, other.address + offset, length) == 0)


def _aligned(memory: mmap.mmap, size_bytes: int, kind: str) -> Region:
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    address = -(-start // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    region = Region(address, size_bytes, kind, memory)
    region.fill(1, size_bytes)
    return region


def anonymous_region(size_bytes: int) -> Region:
    """Private memory, transparent huge pages asked for, touched."""
    memory = mmap.mmap(-1, size_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return _aligned(memory, size_bytes, "anonymous, MADV_HUGEPAGE")


def pool_region(size_bytes: int) -> Region:
    """Shared memory as a cache node's pool would be: tmpfs with `huge=always` where this user may mount it."""
    mount_point = Path(tempfile.mkdtemp(prefix="polarkv-bench-pool-"))
    options = f"huge=always,size={size_bytes + 2 * HUGE_PAGE_BYTES},mode=0700"
    mounted = (
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "polarkv-bench", str(mount_point)], capture_output=True, check=False
        ).returncode
        == 0
    )
    try:
        if not mounted:
            return anonymous_region(size_bytes)
        descriptor = os.open(mount_point / "pool", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(descriptor, size_bytes + HUGE_PAGE_BYTES)
            return _aligned(mmap.mmap(descriptor, size_bytes + HUGE_PAGE_BYTES), size_bytes, "tmpfs huge=always")
        finally:
            os.close(descriptor)
    finally:
        if mounted:
            # Lazy: the mapping keeps the memory, and nothing is left behind however this process ends.
            subprocess.run(["umount", "-l", str(mount_point)], capture_output=True, check=False)
        mount_point.rmdir()
