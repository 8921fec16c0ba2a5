"""Settings of a client: declared once, read from arguments, the environment and a connection file, in this order.

A connection file is the JSON that ``polarkv up`` writes (``connection.json``): endpoint, token, admin, admin_token.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, ValidationError, field_validator

from polarkv_client.endpoints import parse_endpoint
from polarkv_client.errors import ConfigurationError

ENVIRONMENT_PREFIX = "POLARKV_"
CONNECTION_FILE = "connection.json"
CONNECTION_VARIABLE = "POLARKV_CONNECTION"
_SECRET_FIELDS = frozenset({"token", "admin_token"})
Config = TypeVar("Config", bound="ClientConfig")


def _names(value: object) -> object:
    """Names from one text, as in the environment."""
    if isinstance(value, str):
        return tuple(name for part in value.split(",") if (name := part.strip()))
    return value


class ClientConfig(BaseModel):
    """Everything a client can be told. Each field is also the variable ``POLARKV_<FIELD>``."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    endpoint: str = Field(description="Where the manager listens: unix:///PATH or tcp://HOST:PORT.")
    token: SecretStr = Field(SecretStr(""), description="The token that the manager knows this client by.")
    admin: str = Field("", description="The manager's admin address (http://HOST:PORT); only the command line uses it.")
    admin_token: SecretStr = Field(SecretStr(""), description="The token for the admin address.")
    client_name: str = Field(
        "", max_length=256, description="Name in the manager's logs; empty: host name and process id."
    )
    deadline_ms: int = Field(
        5000, ge=1, le=600_000, description="How long one operation may take, when the call does not say."
    )
    connect_timeout_ms: int = Field(1000, ge=1, le=60_000, description="How long connecting to one peer may take.")
    manager_timeout_ms: int = Field(
        1000,
        ge=1,
        le=60_000,
        description="How long the manager may take for one answer, beside what it was asked to wait.",
    )
    wait_for_space_ms: int = Field(
        0, ge=0, le=60_000, description="How long a store may wait for memory to be freed; 0: skip what has no room."
    )
    transport: Literal["auto", "shm", "rdma", "tcp"] = Field(
        "auto",
        description="How bytes may move: auto takes shared memory on the same host, else RDMA where both ends have it, "
        "else TCP.",
    )
    calibration: Path | None = Field(
        None,
        description="File with measured rates, from 'polarkv calibrate': loads that would take longer than computing "
        "are then skipped.",
    )
    recompute_gate: bool = Field(True, description="Skip such loads; false: load whatever is there.")
    threads: int = Field(8, ge=1, le=256, description="Threads that move bytes, shared by all operations of a client.")
    copy_threads: int = Field(
        0, ge=0, le=64, description="Threads that one operation uses for copies on this host; 0: one a core, at most 4."
    )
    shm_copies: Literal["auto", "calls"] = Field(
        "auto",
        description="How copies on this host are made: auto maps the cache node's memory where the compiled part of "
        "this package is there, calls always uses system calls.",
    )
    tcp_connections: int = Field(
        0,
        ge=0,
        le=16,
        description="Connections that one operation uses to a cache node over TCP; 0: two, or one below 4 cores.",
    )
    rdma_devices: Annotated[tuple[str, ...], BeforeValidator(_names)] = Field(
        (), description="RDMA devices to use, separated by commas, such as mlx5_0; none named: all whose port is up."
    )
    rdma_binding: Literal["auto", "ibverbs", "pyverbs"] = Field(
        "auto",
        description="Which Python binding of libibverbs to use; auto: the first of them that is there, in this order.",
    )
    rdma_gid_index: int | None = Field(
        None,
        ge=0,
        le=65_535,
        description="GID to use; none: the RoCE v2 entry of an IPv4 address, on InfiniBand the first.",
    )
    rdma_queue_pairs: int = Field(
        0,
        ge=0,
        le=16,
        description="Queue pairs of each device that one operation uses to a cache node; 0: two, or one below 4 cores.",
    )
    rdma_registered_bytes: int = Field(
        1 << 30,
        ge=0,
        description="Most bytes of callers' buffers that stay registered with each RDMA device, and so in memory, "
        "between calls.",
    )
    operations: int = Field(16, ge=1, le=1024, description="Operations that the asynchronous client runs at once.")
    queued_operations: int = Field(
        256, ge=0, le=65_536, description="Operations that may wait beyond those; more are misses at once."
    )
    inflight_bytes: int = Field(
        256 << 20, ge=1 << 20, description="Bytes that one operation may have asked for and not moved yet."
    )
    batch_keys: int = Field(1024, ge=1, le=16_384, description="Most keys in one message to the manager.")
    manager_connections: int = Field(8, ge=1, le=256, description="Most connections to one manager.")
    breaker_failures: int = Field(
        3, ge=1, le=1000, description="Failures in a row after which a peer is left alone until a probe succeeds."
    )
    breaker_first_ms: int = Field(
        100, ge=1, le=60_000, description="Wait before the first probe; it doubles each time."
    )
    breaker_longest_ms: int = Field(5000, ge=1, le=600_000, description="Longest wait between probes.")

    @field_validator("endpoint")
    @classmethod
    def _endpoint_form(cls, value: str) -> str:
        parse_endpoint(value)
        return value


def load_config(
    connection: str | os.PathLike[str] | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    **explicit: object,
) -> ClientConfig:
    """Settings from ``explicit``, then the environment, then the connection file, then the defaults.

    Args:
        connection: a connection file, or the folder that holds one; without it, the one that POLARKV_CONNECTION names.

    Raises:
        ConfigurationError: names the field, the value (never a secret's) and the fix.
    """
    return load_as(ClientConfig, explicit, connection, environment)


def load_as(
    model: type[Config],
    explicit: Mapping[str, object],
    connection: str | os.PathLike[str] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Config:
    """As :func:`load_config`, for a model that declares more settings."""
    env = os.environ if environment is None else environment
    values: dict[str, object] = {}
    path = connection if connection is not None else env.get(CONNECTION_VARIABLE)
    if path:
        # A newer `polarkv up` may write more than this client knows.
        values.update({name: value for name, value in read_file(Path(path)).items() if name in model.model_fields})
    for name in model.model_fields:
        if (text := env.get(ENVIRONMENT_PREFIX + name.upper())) is not None:
            values[name] = text
    values.update({name: value for name, value in explicit.items() if value is not None})
    for name in explicit:
        if name not in model.model_fields:
            close = difflib.get_close_matches(name, model.model_fields, 1)
            known = f"did you mean {close[0]}?" if close else f"there are {', '.join(model.model_fields)}"
            raise ConfigurationError(name, "…", f"there is no such setting; {known}")
    if not values.get("endpoint"):
        raise ConfigurationError(
            "endpoint", "", "pass endpoint=, set POLARKV_ENDPOINT, or name the connection file that `polarkv up` wrote"
        )
    try:
        return model.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        field = str(first["loc"][0]) if first["loc"] else "config"
        value = "…" if field in _SECRET_FIELDS else values.get(field)
        raise ConfigurationError(field, value, first["msg"].removeprefix("Value error, ")) from None


def read_file(path: Path) -> dict[str, object]:
    """What a connection file says, or the one in a folder.

    Raises:
        ConfigurationError: it cannot be read, or is no JSON object.
    """
    if path.is_dir():
        path = path / CONNECTION_FILE
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise ConfigurationError(
            "connection", str(path), f"cannot be read ({error.strerror}): is the cluster up?"
        ) from error
    except ValueError as error:
        raise ConfigurationError("connection", str(path), f"is not JSON ({error})") from error
    if not isinstance(content, dict):
        raise ConfigurationError("connection", str(path), "must hold one JSON object")
    return content
