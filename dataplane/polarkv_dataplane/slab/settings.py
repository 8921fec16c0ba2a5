"""Settings of a slab server."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from polarkv_client.errors import ConfigurationError
from polarkv_client.layout import ALIGNMENT_BYTES
from polarkv_dataplane.runtime.settings import Settings, check_endpoint, check_node_name, check_unix_path

MIN_SLAB_BYTES = 1 << 20
MAX_SLAB_BYTES = 1 << 30


def default_slab_bytes(memory_bytes: int) -> int:
    """An eighth of the memory, from 1 MiB to 1 GiB, a multiple of 4 KiB."""
    return max(MIN_SLAB_BYTES, min(MAX_SLAB_BYTES, memory_bytes // 8)) // ALIGNMENT_BYTES * ALIGNMENT_BYTES


class SlabSettings(Settings):
    """What a slab server is told at its start."""

    node: str = Field(description="Name of the cache node; its disk server has the same one.")
    manager: str = Field(description="Endpoint of the manager: tcp://HOST:PORT or unix:///PATH.")
    secret_file: Path = Field(description="File that holds the cluster's secret.")
    memory_bytes: int = Field(description="Memory to serve, in bytes.")
    slab_bytes: int = Field(default=0, description="Bytes of one slab; 0: an eighth of the memory, 1 MiB to 1 GiB.")
    listen_host: str = Field(default="127.0.0.1", description="Address the TCP path listens on; empty turns it off.")
    listen_port: int = Field(default=0, ge=0, le=65535, description="Port of the TCP path; 0 lets the system choose.")
    advertise_host: str = Field(
        default="", description="Host that clients are told to connect to; empty means the one listened on."
    )
    unix_socket: str = Field(
        default="", description="Path of the Unix socket that hands out the memory on this machine; empty turns it off."
    )
    rdma: Literal["auto", "only", "off"] = Field(
        default="auto",
        description="RDMA beside the other ways, where there is a device; only: it and nothing else, or the server "
        "does not start; off.",
    )
    rdma_devices: tuple[str, ...] = Field(
        default=(), description="RDMA devices to offer, such as mlx5_0; none named: all whose port is up."
    )
    rdma_binding: Literal["auto", "ibverbs", "pyverbs"] = Field(
        default="auto",
        description="Which Python binding of libibverbs to use; auto: the first of them that is there, in this order.",
    )
    rdma_gid_index: int | None = Field(
        default=None,
        ge=0,
        le=65535,
        description="GID to use; none: the RoCE v2 entry of an IPv4 address, on InfiniBand the first.",
    )
    huge_pages: Literal["auto", "tmpfs", "hugetlb", "off"] = Field(
        default="auto",
        description="Where the memory comes from: a private tmpfs with huge pages, reserved huge pages, or plain "
        "pages; auto takes the best that this machine allows.",
    )
    pool_path: Path | None = Field(
        default=None, description="File or directory on tmpfs or hugetlbfs to take the memory from."
    )
    max_connections: int = Field(
        default=256,
        ge=1,
        le=65536,
        description="Connections served at a time by each socket; a client process on the same host keeps one.",
    )
    stall_timeout_ms: int = Field(
        default=5000, ge=1, description="How long a peer may make no progress within a request, in milliseconds."
    )
    metrics_host: str = Field(default="127.0.0.1", description="Address of the Prometheus exporter.")
    metrics_port: int | None = Field(
        default=None, ge=0, le=65535, description="Port of the Prometheus exporter; none turns it off."
    )

    @model_validator(mode="after")
    def _check(self) -> SlabSettings:
        check_node_name(self.node)
        check_endpoint("manager", self.manager)
        check_unix_path("unix_socket", self.unix_socket)
        if not self.listen_host and not self.unix_socket:
            raise ConfigurationError("listen_host", self.listen_host, "give it or unix_socket: clients need one")
        if self.rdma == "only" and not self.listen_host:
            raise ConfigurationError("listen_host", "", "give it: RDMA sessions are opened over TCP")
        if self.memory_bytes < MIN_SLAB_BYTES:
            raise ConfigurationError("memory_bytes", self.memory_bytes, f"use at least {MIN_SLAB_BYTES} bytes (1 MiB)")
        slab = self.slab_bytes
        if slab and (slab % ALIGNMENT_BYTES or not ALIGNMENT_BYTES <= slab <= self.memory_bytes):
            raise ConfigurationError("slab_bytes", slab, "use a multiple of 4096 that is not larger than memory_bytes")
        return self

    @property
    def slab_size_bytes(self) -> int:
        """Bytes of one slab, the default filled in."""
        return self.slab_bytes or default_slab_bytes(self.memory_bytes)

    @property
    def pool_bytes(self) -> int:
        """Bytes of memory in whole slabs."""
        return self.memory_bytes // self.slab_size_bytes * self.slab_size_bytes
