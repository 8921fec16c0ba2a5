"""Settings of the embedded cluster (`polarkv up`), and the checks of them against this machine."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from pydantic import ByteSize, Field, field_validator

from polarkv_client.errors import ConfigurationError
from polarkv_client.settings_cli import show_size
from polarkv_dataplane.runtime.settings import Settings

MIN_MEMORY_BYTES = 16 << 20


class UpSettings(Settings):
    """What the embedded cluster is told. Sizes are of each cache node."""

    nodes: int = Field(1, ge=1, le=64, description="Cache nodes, each a slab server and a disk server.")
    memory_bytes: ByteSize = Field(ByteSize(1 << 30), ge=MIN_MEMORY_BYTES, description="Memory of each cache node.")
    disk_bytes: ByteSize = Field(
        ByteSize(8 << 30), ge=MIN_MEMORY_BYTES, description="Space that each cache node may use on disk."
    )
    dir: Path = Field(
        Path(".polarkv"),
        description="Directory of the cluster: files of the disk tier, metadata, secrets, logs, connection.json.",
    )
    metadata_url: str = Field(
        "", description="Metadata database (sqlite:///PATH, postgresql://…); empty: SQLite in the directory."
    )
    http_port: int = Field(
        0, ge=0, le=65535, description="Port of the admin API on 127.0.0.1; 0: the one of last time, or a free one."
    )
    wait_ready_seconds: float = Field(
        60, gt=0, le=3600, description="How long all cache nodes may take to become Active."
    )

    @field_validator("dir")
    @classmethod
    def _absolute(cls, value: Path) -> Path:
        return value.expanduser().absolute()


def check_machine(settings: UpSettings) -> None:
    """Refuse what this machine cannot give; the directory is there already.

    Raises:
        ConfigurationError: more memory than there is, or more disk than the file system has.
    """
    _check_room(
        "up.memory_bytes (--memory)",
        settings.nodes,
        settings.memory_bytes,
        free_memory_bytes(),
        "memory of this machine",
    )
    own_bytes = sum(used_bytes(path) for path in settings.dir.glob("node-*"))
    free_bytes = shutil.disk_usage(settings.dir).free + own_bytes
    _check_room(
        "up.disk_bytes (--disk)", settings.nodes, settings.disk_bytes, free_bytes, f"file system of {settings.dir}"
    )


def _check_room(field: str, nodes: int, each_bytes: int, free_bytes: int, what: str) -> None:
    if nodes * each_bytes <= free_bytes:
        return
    most = show_size(free_bytes // nodes // (1 << 20) * (1 << 20))
    fix = f"{nodes} × that exceeds the {show_size(free_bytes)} free in the {what}: use at most {most}, or fewer --nodes"
    raise ConfigurationError(field, show_size(each_bytes), fix)


def free_memory_bytes() -> int:
    """Memory that can be had: what the kernel calls available, less where a cgroup's limit is closer."""
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    return min([available, *_cgroup_room()])


def _cgroup_room() -> list[int]:
    """Room under the memory limit of this process's cgroup and of those above it (version 2; none elsewhere)."""
    rooms = []
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines()
        path = next(line.removeprefix("0::/") for line in lines if line.startswith("0::/"))
    except (OSError, StopIteration):
        return []
    root = Path("/sys/fs/cgroup")
    folder = root / path
    while True:
        try:
            limit = (folder / "memory.max").read_text(encoding="ascii").strip()
            if limit != "max":
                rooms.append(int(limit) - int((folder / "memory.current").read_text(encoding="ascii")))
        except (OSError, ValueError):
            pass
        if folder == root or root not in folder.parents:
            return rooms
        folder = folder.parent


def used_bytes(folder: Path) -> int:
    """Bytes that the files under a folder have allocated."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(parent, name)).st_blocks * 512
            except OSError:
                continue
    return total
