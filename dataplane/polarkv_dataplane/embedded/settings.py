"""Settings of the embedded cluster (`polarkv up`), and the checks of them against this machine."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from pydantic import ByteSize, Field, field_validator

from polarkv_client.errors import ConfigurationError
from polarkv_client.settings_cli import show_size
from polarkv_dataplane.runtime.settings import Settings
from polarkv_dataplane.slab.machine import memory_limit

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
        validate_default=True,
        description="Directory of the cluster: files of the disk tier, metadata, secrets, logs, connection.json.",
    )
    metadata_url: str = Field(
        "", description="Metadata database (sqlite:///PATH, postgresql://…, mysql://…); empty: SQLite in the directory."
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
    free_bytes, reason = memory_limit()
    _check_room("up.memory_bytes (--memory)", settings.nodes, settings.memory_bytes, free_bytes, reason)
    own_bytes = sum(used_bytes(path) for path in settings.dir.glob("node-*"))
    free_bytes = shutil.disk_usage(settings.dir).free + own_bytes
    reason = f"the free space of the file system of {settings.dir}"
    _check_room("up.disk_bytes (--disk)", settings.nodes, settings.disk_bytes, free_bytes, reason)


def _check_room(field: str, nodes: int, each_bytes: int, free_bytes: int, reason: str) -> None:
    if nodes * each_bytes <= free_bytes:
        return
    most = show_size(free_bytes // nodes // (1 << 20) * (1 << 20))
    fix = f"{nodes} × that exceeds {reason}, {show_size(free_bytes)}: use at most {most}, or fewer --nodes"
    raise ConfigurationError(field, show_size(each_bytes), fix)


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
