"""One configuration for all connectors: the client's settings, and what only a connector needs.

A value comes from the first of these that has one: the engine's flag (vLLM's ``kv_connector_extra_config``, SGLang's
extra config, LMCache's), the environment (``POLARKV_<FIELD>``), the connection file, the default.
"""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import ByteSize, Field, TypeAdapter, ValidationError

from polarkv_client.config import CONNECTION_VARIABLE, ENVIRONMENT_PREFIX, ClientConfig, load_as, read_file
from polarkv_client.errors import ConfigurationError

log = logging.getLogger(__name__)
_CONNECTION = "connection"
_ENABLED = "enabled"
_TYPO = 0.8  # likeness from which an unknown name is a slip, not a newer version's


class ConnectorConfig(ClientConfig):
    """Everything that an engine's connector can be told."""

    enabled: bool = Field(True, description="false: the engine runs as if there were no cache.")
    chunk_tokens: int = Field(
        256,
        ge=1,
        le=65_536,
        description="Tokens in a chunk, a multiple of vLLM's block size. SGLang's chunk is its page.",
    )
    load: Literal["async", "sync", "off"] = Field(
        "async",
        description="How vLLM loads: async while other requests are computed, sync inside the step (not with async "
        "scheduling or pipeline ranks), off not at all.",
    )
    store: bool = Field(True, description="Store what the engine computes; false: only load.")
    lookup_deadline_ms: int = Field(
        200, ge=1, le=60_000, description="How long a lookup may take; without an answer by then it is a miss."
    )
    load_deadline_ms: int = Field(
        5000, ge=1, le=600_000, description="How long one request's load may take; what is missing then is computed."
    )
    patience: float = Field(
        0.5,
        ge=0,
        le=100,
        description="How long a request may wait for the cache, as a part of the time that computing what it would "
        "load takes on this engine, within the deadlines; 0: the deadlines alone.",
    )
    store_deadline_ms: int = Field(10_000, ge=1, le=600_000, description="How long one store may take.")
    store_queue_bytes: Annotated[ByteSize, Field(ge=1 << 20)] = Field(
        ByteSize(1 << 30), description="Bytes that may wait to be stored in one process; what comes on top is skipped."
    )
    local_cache_bytes: Annotated[ByteSize, Field(ge=1 << 20)] = Field(
        ByteSize(512 << 20),
        description="Memory of this host that a process may hold chunks in on their way from and to a GPU (pinned).",
    )
    weights_may_change: bool = Field(
        True,
        description="vLLM's weights may be replaced while it runs: once its caches are reset (sleep, pause, "
        "reset_prefix_cache with reset_connector) it shares no chunks with others; false: they never are.",
    )
    namespace_model_id: str = Field(
        "", max_length=1024, description="Name of the model in keys; empty: the engine's, of a folder its last part."
    )
    namespace_weights_fingerprint: str = Field(
        "", max_length=1024, description="Says which weights; empty: taken from the configuration and weights on disk."
    )
    namespace_tenant_salt: str = Field(
        "", max_length=1024, description="Enters every key: engines with another salt never share chunks."
    )


def load_connector_config(
    flags: Mapping[str, object] | None = None, environment: Mapping[str, str] | None = None
) -> ConnectorConfig | None:
    """The configuration; None: it is switched off (``enabled`` is false), and then nothing else is looked at.

    Args:
        flags: the engine's flag as an object, without what is the engine's own. ``connection`` in it names a connection
            file or the folder that holds one, and goes before POLARKV_CONNECTION.

    Raises:
        ConfigurationError: names the field, the value (never a secret's) and the fix.
    """
    env = os.environ if environment is None else environment
    explicit = dict(flags or {})
    connection = explicit.pop(_CONNECTION, None) or env.get(CONNECTION_VARIABLE) or None
    if connection is not None and not isinstance(connection, str | os.PathLike):
        raise ConfigurationError(_CONNECTION, connection, "name a connection file or the folder that holds one")
    if not _enabled(explicit, env):
        return None
    if connection is not None:
        _check_names(Path(connection))
    return load_as(ConnectorConfig, explicit, connection, env)


def _enabled(explicit: Mapping[str, object], env: Mapping[str, str]) -> bool:
    value = explicit.get(_ENABLED)
    if value is None:
        value = env.get(ENVIRONMENT_PREFIX + _ENABLED.upper(), True)
    try:
        return TypeAdapter(bool).validate_python(value)
    except ValidationError:
        raise ConfigurationError(_ENABLED, value, "use true or false") from None


def _check_names(path: Path) -> None:
    """A slip is an error, as it is in a flag; a name that is like none of ours is a newer version's, and only said."""
    for name in read_file(path):
        if name in ConnectorConfig.model_fields:
            continue
        close = difflib.get_close_matches(name, ConnectorConfig.model_fields, 1, _TYPO)
        if close:
            raise ConfigurationError(f"{path}: {name}", "…", f"there is no such setting; did you mean {close[0]}?")
        log.warning("%s: %s is no setting of this version, and is ignored", path, name)
