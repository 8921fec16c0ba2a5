"""How much memory this machine and its control groups leave, and the few system calls that Python lacks."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

TMPFS_MAGIC = 0x01021994
HUGETLBFS_MAGIC = 0x958458F6
HUGE_PAGE_BYTES = 2 << 20
HUGE_PAGES = Path("/sys/kernel/mm/hugepages")

# New mount calls have these numbers on every architecture.
_FSOPEN, _FSCONFIG, _FSMOUNT = 430, 431, 432
_CLOEXEC = 1
_SET_STRING, _CREATE = 1, 6
_UNLIMITED = 1 << 60

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def _call(number: int, *arguments: int | bytes | None) -> int:
    result: int = _libc.syscall(ctypes.c_long(number), *arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def mount_tmpfs(size_bytes: int, huge: bytes) -> int:
    """A tmpfs that is mounted nowhere, so that nothing stays however its process ends; a descriptor of its root.

    Raises:
        OSError: not allowed (it takes CAP_SYS_ADMIN), or the kernel is older than 5.2.
    """
    context = _call(_FSOPEN, b"tmpfs", _CLOEXEC)
    try:
        for name, value in ((b"huge", huge), (b"size", b"%d" % size_bytes), (b"mode", b"0700")):
            _call(_FSCONFIG, context, _SET_STRING, name, value, 0)
        _call(_FSCONFIG, context, _CREATE, None, None, 0)
        return _call(_FSMOUNT, context, _CLOEXEC, 0)
    finally:
        os.close(context)


def filesystem_type(path: Path) -> int:
    """The magic number of the file system that ``path`` lies on.

    Raises:
        OSError: as the system says.
    """
    buffer = (ctypes.c_long * 32)()
    if _libc.statfs(os.fsencode(path), ctypes.byref(buffer)):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(path))
    return int(buffer[0]) & 0xFFFF_FFFF


def advise(address: int, size_bytes: int, advice: int) -> bool:
    """``madvise`` without the interpreter's lock; whether the kernel took the advice."""
    return not _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size_bytes), ctypes.c_int(advice))


def free_huge_bytes(page_bytes: int) -> int:
    """Bytes in free reserved pages of one size; the machine's default size is only one of several."""
    try:
        text = (HUGE_PAGES / f"hugepages-{page_bytes // 1024}kB" / "free_hugepages").read_text(encoding="ascii")
        return int(text) * page_bytes
    except (OSError, ValueError):
        return 0


def meminfo_bytes(name: str) -> int:
    """A line of /proc/meminfo in bytes (page counts as they are); 0 when it is not there."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        label, _, rest = line.partition(":")
        if label == name:
            words = rest.split()
            return int(words[0]) * (1024 if words[1:] == ["kB"] else 1)
    return 0


def _cgroup_limits() -> Iterator[int]:
    """Memory limits of every control group that this process is in, both versions, as far as they can be seen."""
    for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            roots, name = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"], "memory.max"
        elif "memory" in controllers.split(","):
            roots, name = ["/sys/fs/cgroup/memory"], "memory.limit_in_bytes"
        else:
            continue
        for root in roots:
            # In a container the path may be the host's: then only the root's own file is there, which is the right one.
            group = Path(root + path)
            for folder in (group, *group.parents):
                if not folder.is_relative_to(root):
                    break
                try:
                    text = (folder / name).read_text(encoding="ascii").strip()
                except OSError:
                    continue
                if text.isdigit():
                    yield int(text)


def memory_limit() -> tuple[int, str]:
    """(bytes that a pool may have at most on this machine, what sets that limit)."""
    available = meminfo_bytes("MemAvailable") or _UNLIMITED
    try:
        cgroup = min(_cgroup_limits(), default=_UNLIMITED)
    except (OSError, ValueError):
        cgroup = _UNLIMITED
    if cgroup < available:
        return cgroup, "the control group's memory limit"
    return available, "the memory that the machine has available"
