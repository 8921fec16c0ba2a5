"""Settings of a manager: declared once; options, environment, file and docs are made from them."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from pydantic import Field, SecretStr, model_validator

from polarkv_client.errors import ConfigurationError
from polarkv_dataplane.manager.records.model import Settings as CoreSettings
from polarkv_dataplane.runtime.settings import Settings, check_endpoint, check_unix_path

METADATA_SCHEMES = ("sqlite", "postgresql", "postgres", "mysql")
METADATA_FORMS = "sqlite:///PATH, postgresql://USER@HOST/NAME or mysql://USER@HOST/NAME"


class ManagerSettings(Settings):
    """What a manager is told at its start."""

    rpc: tuple[str, ...] = Field(
        default=("tcp://127.0.0.1:7700",),
        description="Endpoints for clients and cache nodes: tcp://HOST:PORT (0: any free port) or unix:///PATH.",
    )
    http_host: str = Field(default="127.0.0.1", description="Address of the admin API, health checks and metrics.")
    http_port: int = Field(default=7701, ge=0, le=65535, description="Port of the admin API; 0 lets the system choose.")
    secret_file: Path = Field(description="File that holds the cluster's secret.")
    tokens_file: Path = Field(
        description='JSON file: {"tenants": {"NAME": {"token": "...", "quota_bytes": 0}}, "admin_token": "..."}.'
    )
    metadata_url: SecretStr = Field(
        default=SecretStr(""),
        description=f"Where metadata is kept: {METADATA_FORMS}; empty: nowhere.",
    )
    metadata_timeout_ms: int = Field(
        default=3000, ge=10, description="How long one exchange with the metadata store may take, in milliseconds."
    )
    metadata_queue_keys: int = Field(
        default=200_000, ge=1000, description="Most keys that wait to be written to the metadata store."
    )
    ready_file: Path | None = Field(
        default=None, description="File to write the real addresses to, as JSON, once ready."
    )
    heartbeat_ms: int = Field(default=500, ge=10, description="How often cache nodes send heartbeats, in milliseconds.")
    max_connections: int = Field(default=1024, ge=1, description="Connections of clients and cache nodes at a time.")
    max_keys_per_call: int = Field(default=16_384, ge=1, le=262_144, description="Most keys in one call.")
    max_waiting_calls: int = Field(
        default=4096, ge=0, description="Most calls that wait for space or a load; beyond it the answer comes at once."
    )
    max_wait_ms: int = Field(default=30_000, ge=0, description="Longest that one call may wait, in milliseconds.")
    attach_timeout_ms: int = Field(
        default=5000, ge=10, description="How long a new connection may take to attach or register, in milliseconds."
    )
    read_lease_ms: int = Field(default=5000, ge=1, description="Length of a read lease, in milliseconds.")
    write_ticket_ms: int = Field(default=4000, ge=1, description="Length of a write ticket, in milliseconds.")
    quarantine_ms: int = Field(
        default=1000, ge=0, description="How long a slot rests after a grant that did not end cleanly, in milliseconds."
    )
    operation_timeout_ms: int = Field(
        default=10_000, ge=1, description="A cache node that owes an answer this long is lost, in milliseconds."
    )
    offload_retry_ms: int = Field(
        default=1000, ge=1, description="How long a disk that failed or was full is left alone, in milliseconds."
    )
    node_timeout_ms: int = Field(
        default=3000, ge=1, description="A cache node that is silent this long is lost, in milliseconds."
    )
    offload_ahead: bool = Field(default=True, description="Copy chunks to disk before memory is short.")
    memory_high_percent: int = Field(
        default=90, ge=1, le=100, description="Without offload_ahead: copy to disk once this much memory is used."
    )
    disk_high_percent: int = Field(
        default=98, ge=1, le=100, description="Delete old files once this much disk is used."
    )
    operations_per_node: int = Field(
        default=32, ge=1, description="Offloads under way on one cache node; loads may be four times as many."
    )
    operations_bytes: int = Field(
        default=256 << 20,
        ge=4096,
        description="Bytes of loads and offloads under way on one cache node; offloads stop at half.",
    )
    victim_scan: int = Field(default=128, ge=1, description="Entries looked at in search of one to evict.")
    max_keys: int = Field(default=10_000_000, ge=1, description="Most entries that the manager remembers.")
    pinned_percent: int = Field(default=50, ge=0, le=100, description="Most of the disk capacity that may be pinned.")

    @model_validator(mode="after")
    def _check(self) -> ManagerSettings:
        if not self.rpc:
            raise ConfigurationError("rpc", "", "name at least one endpoint: tcp://HOST:PORT or unix:///PATH")
        for endpoint in self.rpc:
            check_endpoint("rpc", endpoint, listening=True)
            if endpoint.startswith("unix://"):
                check_unix_path("rpc", endpoint.removeprefix("unix://"))
        if self.node_timeout_ms < 2 * self.heartbeat_ms:
            raise ConfigurationError(
                "node_timeout_ms", self.node_timeout_ms, f"use at least two heartbeats ({2 * self.heartbeat_ms})"
            )
        scheme, separator, rest = self.metadata_url.get_secret_value().partition("://")
        if (scheme or rest) and (scheme not in METADATA_SCHEMES or not separator or not rest.strip("/")):
            raise ConfigurationError("metadata_url", f"{scheme}://…", f"use {METADATA_FORMS}, or leave it empty")
        return self

    def core(self) -> CoreSettings:
        """What of this the core is told."""
        return CoreSettings(**{field.name: getattr(self, field.name) for field in fields(CoreSettings)})
