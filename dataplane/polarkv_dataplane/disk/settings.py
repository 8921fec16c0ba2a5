"""Settings of a disk server."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, model_validator

from polarkv_client.errors import ConfigurationError
from polarkv_client.layout import ALIGNMENT_BYTES, MOST_VOLUMES
from polarkv_dataplane.runtime.settings import Settings, check_endpoint, check_node_name, check_unix_path


class DiskSettings(Settings):
    """What a disk server is told at its start."""

    node: str = Field(description="Name of the cache node; its slab server has the same one.")
    manager: str = Field(description="Endpoint of the manager: tcp://HOST:PORT or unix:///PATH.")
    secret_file: Path = Field(description="File that holds the cluster's secret.")
    slab_socket: str = Field(description="Path of the slab server's Unix socket.")
    directories: list[Path] = Field(description="Directories for files, one a disk; keys are spread over them.")
    capacity_bytes: int = Field(description="Bytes that all files together may take, in allocated blocks.")
    io_threads: int = Field(
        default=16, ge=1, le=256, description="Operations that run at a time: some wait for the disk, some verify."
    )
    io_depth: int = Field(
        default=8,
        ge=1,
        le=256,
        description="Transfers between memory and one directory's files at a time; fewer of 4 MiB and more.",
    )
    queue_length: int = Field(default=8192, ge=1, le=1 << 20, description="Operations that may wait; more are refused.")
    operation_timeout_ms: int = Field(
        default=5_000,
        ge=1,
        description="An operation that has waited this long is refused; less than the manager waits.",
    )
    require_mount: bool = Field(
        default=False, description="Refuse a directory that is not on a file system mounted for it."
    )
    metrics_host: str = Field(default="127.0.0.1", description="Address of the Prometheus exporter.")
    metrics_port: int | None = Field(
        default=None, ge=0, le=65535, description="Port of the Prometheus exporter; none turns it off."
    )

    @model_validator(mode="after")
    def _check(self) -> DiskSettings:
        check_node_name(self.node)
        check_endpoint("manager", self.manager)
        if not check_unix_path("slab_socket", self.slab_socket):
            raise ConfigurationError("slab_socket", self.slab_socket, "name the slab server's Unix socket")
        if not self.directories:
            raise ConfigurationError("directories", self.directories, "name at least one directory")
        if len(self.directories) > MOST_VOLUMES:
            raise ConfigurationError("directories", len(self.directories), f"name at most {MOST_VOLUMES}")
        resolved = [path.resolve() for path in self.directories]
        for index, path in enumerate(resolved):
            if path in resolved[:index]:
                raise ConfigurationError(f"directories.{index}", str(path), "it is named twice: one directory a disk")
        if self.capacity_bytes < ALIGNMENT_BYTES:
            raise ConfigurationError("capacity_bytes", self.capacity_bytes, "use at least 4096 bytes")
        return self
