"""The memory of a cache node: one shared file without a name, on the largest pages that this machine gives."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import logging
import mmap
import os
import stat
import threading
import uuid
from collections.abc import Callable
from pathlib import Path

from polarkv_client.errors import ConfigurationError
from polarkv_dataplane.slab import machine
from polarkv_dataplane.slab.settings import SlabSettings

# Of first touches of huge pages 32 MiB take about a millisecond and a half, of small ones about 20.
PREFAULT_PIECE_BYTES = 32 << 20
_MADV_HUGEPAGE, _MADV_POPULATE_WRITE = 14, 23
_log = logging.getLogger(__name__)


class Pool:
    """A descriptor, a mapping of it, and what kind of pages it has.

    ``id`` is new for every pool: memory of an earlier life has another one. ``view`` is the whole of it, as bytes.
    """

    def __init__(self, fd: int, size_bytes: int, kind: str) -> None:
        self.fd = fd
        self.size_bytes = size_bytes
        self.kind = kind
        self.id = uuid.uuid4().hex
        self._map = mmap.mmap(fd, size_bytes)
        self.view = memoryview(self._map)
        # hugetlbfs can neither be spliced nor written by system calls, only mapped.
        self.can_sendfile = not kind.startswith("hugetlb")
        self.prefaulted_bytes = 0

    def prefault(self, stopping: Callable[[], bool]) -> None:
        """Give every page its memory, piece by piece.

        Raises:
            ConfigurationError: there is no memory for it. Without this a later touch would kill the process.
        """
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        while self.prefaulted_bytes < self.size_bytes and not stopping():
            start = self.prefaulted_bytes
            length = min(PREFAULT_PIECE_BYTES, self.size_bytes - start)
            try:
                os.posix_fallocate(self.fd, start, length)
            except OSError as error:
                fix = f"{error.strerror} after {start} bytes: use less memory, or free some on this machine"
                raise ConfigurationError("memory_bytes", self.size_bytes, fix) from error
            # Page tables as well, so that no request pays for them; older kernels do it at the first touch.
            machine.advise(address + start, length, _MADV_POPULATE_WRITE)
            self.prefaulted_bytes = start + length

    def prefault_in_background(self, stopping: Callable[[], bool], failed: Callable[[BaseException], None]) -> None:
        """Run :meth:`prefault` in a thread."""

        def run() -> None:
            try:
                self.prefault(stopping)
            except ConfigurationError as error:
                failed(error)

        threading.Thread(target=run, name="prefault", daemon=True).start()


def create(settings: SlabSettings) -> Pool:
    """Make the pool that the settings ask for.

    Raises:
        ConfigurationError: more than this machine has, or the way asked for is not possible here.
    """
    size_bytes = settings.pool_bytes
    limit_bytes, reason = machine.memory_limit()
    if size_bytes > limit_bytes and size_bytes > _free_huge_bytes(settings):
        raise ConfigurationError(
            "memory_bytes", settings.memory_bytes, f"{reason} is {limit_bytes} bytes: use less, or give it more"
        )
    if settings.pool_path is not None:
        return _from_path(settings.pool_path, size_bytes)
    ways: dict[str, Callable[[int], Pool]] = {
        "tmpfs": _tmpfs,
        "hugetlb": _hugetlb,
        "off": functools.partial(_plain, advised=False),
    }
    if settings.huge_pages != "auto":
        return ways[settings.huge_pages](size_bytes)
    for name in ("tmpfs", "hugetlb"):
        try:
            return ways[name](size_bytes)
        except ConfigurationError as error:
            _log.info("no pool of kind %s: %s", name, error)
    return _plain(size_bytes)


def _free_huge_bytes(settings: SlabSettings) -> int:
    """Reserved pages that the pool could take: limits on memory do not count them. 0: it asks for none."""
    path = settings.pool_path
    if path is None:
        return machine.free_huge_bytes(machine.HUGE_PAGE_BYTES) if settings.huge_pages == "hugetlb" else 0
    folder = path if path.is_dir() else path.parent
    try:
        if machine.filesystem_type(folder) == machine.HUGETLBFS_MAGIC:
            return machine.free_huge_bytes(os.statvfs(folder).f_bsize)
    except OSError:
        pass  # said when the file is made
    return 0


def _tmpfs(size_bytes: int) -> Pool:
    whole_bytes = -(-size_bytes // machine.HUGE_PAGE_BYTES) * machine.HUGE_PAGE_BYTES
    try:
        root = machine.mount_tmpfs(whole_bytes, b"always")
    except OSError as error:
        fix = f"{error.strerror}: it takes CAP_SYS_ADMIN and Linux 5.2; else mount a tmpfs with huge=always "
        raise ConfigurationError("huge_pages", "tmpfs", fix + "and give its path as pool_path") from error
    try:
        # The file keeps its file system alive; when the last descriptor and mapping are gone, so are both.
        fd = os.open("pool", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=root)
    finally:
        os.close(root)
    return _mapped(fd, size_bytes, "tmpfs-huge")


def _hugetlb(size_bytes: int) -> Pool:
    pages = -(-size_bytes // machine.HUGE_PAGE_BYTES)
    try:
        fd = os.memfd_create("polarkv-pool", os.MFD_CLOEXEC | os.MFD_HUGETLB | os.MFD_HUGE_2MB)
        return _mapped(fd, size_bytes, "hugetlb")
    except OSError as error:
        fix = f"{error.strerror}: reserve {pages} huge pages (sysctl vm.nr_hugepages)"
        raise ConfigurationError("huge_pages", "hugetlb", fix) from error


def _plain(size_bytes: int, *, advised: bool = True) -> Pool:
    pool = _mapped(os.memfd_create("polarkv-pool", os.MFD_CLOEXEC), size_bytes, "memfd")
    if advised:  # takes effect where shmem_enabled is "advise"
        machine.advise(ctypes.addressof(ctypes.c_char.from_buffer(pool.view)), size_bytes, _MADV_HUGEPAGE)
    return pool


def _mapped(fd: int, size_bytes: int, kind: str) -> Pool:
    try:
        unit = machine.HUGE_PAGE_BYTES if kind.startswith("hugetlb") else 1
        os.ftruncate(fd, -(-size_bytes // unit) * unit)
        return Pool(fd, size_bytes, kind)
    except BaseException:
        os.close(fd)
        raise


def _from_path(path: Path, size_bytes: int) -> Pool:
    """A file at ``path``, or without a name in it; its name is removed at once, so that it ends with its users.

    A file of an earlier life is never used again: that life's clients and disk server may still have it mapped.
    """
    folder = path if path.is_dir() else path.parent
    try:
        kind = machine.filesystem_type(folder)
        free = os.statvfs(folder)
    except OSError as error:
        raise ConfigurationError("pool_path", str(path), f"{error.strerror}: name one on tmpfs or hugetlbfs") from error
    if kind not in (machine.TMPFS_MAGIC, machine.HUGETLBFS_MAGIC):
        raise ConfigurationError("pool_path", str(path), "it is neither on tmpfs nor on hugetlbfs: name a path on one")
    free_bytes = free.f_bavail * free.f_frsize
    if free.f_blocks and size_bytes > free_bytes:
        fix = f"the file system at pool_path {str(path)!r} has {free_bytes} bytes free: use less, or enlarge it"
        raise ConfigurationError("memory_bytes", size_bytes, fix)
    try:
        fd = _unnamed(path)
        return _mapped(fd, size_bytes, "hugetlbfs-path" if kind == machine.HUGETLBFS_MAGIC else "tmpfs-path")
    except OSError as error:
        fix = f"{error.strerror}: name a path that can be written, with {size_bytes} bytes free"
        raise ConfigurationError("pool_path", str(path), fix) from error


def _unnamed(path: Path) -> int:
    if path.is_dir():
        try:
            return os.open(path, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT):
                raise
            path = path / f"polarkv-{uuid.uuid4().hex}"
    with contextlib.suppress(FileNotFoundError):
        found = os.lstat(path)
        if not stat.S_ISREG(found.st_mode) or found.st_blocks:
            raise ConfigurationError("pool_path", str(path), "a file with content lies there: name another path")
        os.unlink(path)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    os.unlink(path)
    return fd
