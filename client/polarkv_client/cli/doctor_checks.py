"""What `polarkv doctor` looks at on a machine; each check says what it found, how bad that is, and the exact fix."""

from __future__ import annotations

import importlib.util
import mmap
import os
import platform
import re
import resource
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from polarkv_client.cli.doctor_rdma import rdma_findings
from polarkv_client.cli.findings import Finding, Level, has_capability
from polarkv_client.host import read_text
from polarkv_client.layout import ALIGNMENT_BYTES
from polarkv_client.settings_cli import show_size

_CAP_SYS_ADMIN = 21
_THP = Path("/sys/kernel/mm/transparent_hugepage")
_CONGESTION = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")
_GOOD_CONGESTION = ("cubic", "reno")
_DOCKER_SHM_BYTES = 64 << 20
_LOW_SPACE_BYTES = 1 << 30
_MANY_FILES = 4096


def check_python() -> Finding:
    """Its version."""
    version = platform.python_version()
    if tuple(sys.version_info) >= (3, 11):
        return Finding("python", Level.OK, version)
    return Finding("python", Level.FAIL, version, "install Python 3.11 or newer and make the environment anew with it")


def check_data_plane() -> Finding:
    """Whether `polarkv up` and the servers are installed."""
    needed = ("polarkv_dataplane", "fastapi", "uvicorn", "uvloop", "prometheus_client")
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if not missing:
        return Finding("data plane", Level.OK, "installed")
    fix = "to run a cluster from here: pip install 'polarkv-cluster[dataplane]'"
    return Finding("data plane", Level.WARN, f"{', '.join(missing)} not installed", fix)


def check_kernel(release: str | None = None) -> Finding:
    """Its version: pidfd_open came with 5.3, populating mappings with 5.14."""
    release = release or platform.release()
    match = re.match(r"(\d+)\.(\d+)", release)
    version = (int(match[1]), int(match[2])) if match else (0, 0)
    if platform.system() != "Linux" or version < (5, 3):
        return Finding("kernel", Level.FAIL, f"{platform.system()} {release}", "use Linux 5.3 or newer")
    if version < (5, 14):
        fix = "Linux 5.14 or newer gives memory its pages ahead of the first request"
        return Finding("kernel", Level.WARN, release, fix)
    return Finding("kernel", Level.OK, release)


def _chosen(text: str) -> str:
    match = re.search(r"\[(\w+)\]", text)
    return match[1] if match else "unknown"


def check_huge_pages() -> Finding:
    """Whether the slab server can have huge pages: two to three times the bandwidth of every one-sided path."""
    shmem, enabled = _chosen(read_text(_THP / "shmem_enabled")), _chosen(read_text(_THP / "enabled"))
    reserved = re.search(r"HugePages_Free:\s*(\d+)", read_text("/proc/meminfo"))
    found = f"shmem_enabled={shmem}, enabled={enabled}, {reserved[1] if reserved else 0} reserved pages free"
    if has_capability(_CAP_SYS_ADMIN) and shmem not in {"deny", "unknown"}:
        return Finding("huge pages", Level.OK, f"private tmpfs with huge pages (CAP_SYS_ADMIN); {found}")
    if shmem in {"always", "within_size", "advise", "force"} or (reserved and int(reserved[1])):
        return Finding("huge pages", Level.OK, found)
    fix = (
        f"as root: echo advise > {_THP / 'shmem_enabled'}, or give the slab server CAP_SYS_ADMIN or reserved pages "
        "(sysctl vm.nr_hugepages=N); without, shared memory has 4 KiB pages at a half to a third of the bandwidth"
    )
    return Finding("huge pages", Level.WARN, f"none for shared memory ({found})", fix)


def check_shm() -> Finding:
    """The size of /dev/shm, which matters when a pool is put there by path."""
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError as error:
        return Finding("/dev/shm", Level.WARN, f"{error.strerror}", "mount -t tmpfs tmpfs /dev/shm")
    found = f"{show_size(usage.free)} of {show_size(usage.total)} free"
    if usage.total <= _DOCKER_SHM_BYTES:
        fix = "only needed for --pool-path: docker run --shm-size=8g, or in Kubernetes an emptyDir with medium: Memory"
        return Finding("/dev/shm", Level.WARN, found, fix)
    return Finding("/dev/shm", Level.OK, found)


def check_open_files() -> Finding:
    """How many descriptors a process may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= _MANY_FILES:
        return Finding("open files", Level.OK, str(soft))
    highest = "unlimited" if hard == resource.RLIM_INFINITY else hard
    return Finding("open files", Level.WARN, f"{soft} (hard limit {highest})", f"ulimit -n {_MANY_FILES} or more")


def check_congestion() -> Finding:
    """Whether a socket may choose cubic or reno: on short paths bbr takes a third of TCP's bandwidth."""
    default = read_text("/proc/sys/net/ipv4/tcp_congestion_control") or "unknown"
    found = f"default {default}, allowed {read_text(_CONGESTION) or 'unknown'}"
    with socket.socket() as probe:
        for name in _GOOD_CONGESTION:
            try:
                probe.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())
            except OSError:
                continue
            return Finding("tcp congestion", Level.OK, f"{name} can be chosen for each socket; {found}")
    fix = 'as root: modprobe tcp_cubic; sysctl -w net.ipv4.tcp_allowed_congestion_control="reno cubic"'
    return Finding("tcp congestion", Level.WARN, f"neither cubic nor reno; {found}", fix)


def check_directory(directory: Path) -> Iterator[Finding]:
    """Whether a directory can be written, with O_DIRECT, and its free space."""
    folder = next(path for path in (directory, *directory.absolute().parents) if path.is_dir())
    place = str(folder) if folder == directory else f"{folder} (where {directory.name} would be)"
    try:
        with tempfile.NamedTemporaryFile(prefix=".polarkv-doctor-", dir=folder) as file:
            yield _direct(place, file.name)
    except OSError as error:
        fix = f"make it writable for user {os.geteuid()}, or name another --dir"
        yield Finding("directory", Level.FAIL, f"{place}: {error.strerror}", fix)
        return
    free = shutil.disk_usage(folder).free
    level = Level.OK if free >= _LOW_SPACE_BYTES else Level.WARN
    fix = "" if level is Level.OK else "free some space, or name a --dir on a larger file system"
    yield Finding("free space", level, f"{show_size(free)} at {place}", fix)


def _direct(place: str, name: str) -> Finding:
    fix = "use ext4 or xfs (tmpfs and some overlays lack it); files then go through the page cache, at half the speed"
    try:
        descriptor = os.open(name, os.O_WRONLY | os.O_DIRECT)
    except OSError as error:
        return Finding("O_DIRECT", Level.WARN, f"{place}: {error.strerror}", fix)
    try:
        with mmap.mmap(-1, ALIGNMENT_BYTES) as aligned:
            os.write(descriptor, aligned)
    except OSError as error:
        return Finding("O_DIRECT", Level.WARN, f"{place}: {error.strerror}", fix)
    finally:
        os.close(descriptor)
    return Finding("O_DIRECT", Level.OK, place)


def machine_findings(directory: Path) -> Iterator[Finding]:
    """Everything but the connection."""
    yield check_python()
    yield check_data_plane()
    yield check_kernel()
    yield check_huge_pages()
    yield check_shm()
    yield check_open_files()
    yield check_congestion()
    yield from rdma_findings()
    yield from check_directory(directory)
