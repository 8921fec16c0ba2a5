"""The cluster's one secret, and what is derived from it.

Each use has a key of its own, so that a node token that leaks cannot sign grants.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass, field
from pathlib import Path

from polarkv_client.errors import ConfigurationError

MIN_SECRET_BYTES = 16
_MAX_SECRET_BYTES = 4096


@dataclass(frozen=True)
class Secrets:
    """Keys derived from the cluster's secret; not shown by ``repr``."""

    grant_key: bytes = field(repr=False)
    node_token: str = field(repr=False)


def derive(secret: bytes) -> Secrets:
    """Derive the keys of the cluster whose secret this is."""
    return Secrets(
        grant_key=hmac.digest(secret, b"polarkv grant", "sha256"),
        node_token=hmac.digest(secret, b"polarkv node", "sha256").hex(),
    )


def load(path: Path, field_name: str = "secret_file") -> Secrets:
    """Read the secret's file (white space at its ends does not count) and derive the keys.

    Raises:
        ConfigurationError: the file cannot be read, or what it holds is too short or too long.
    """
    fix = f"name a readable file of {MIN_SECRET_BYTES} to {_MAX_SECRET_BYTES} bytes, the same one for the whole cluster"
    try:
        with path.open("rb") as file:
            secret = file.read(_MAX_SECRET_BYTES + 2).strip()
    except OSError as error:
        raise ConfigurationError(field_name, str(path), f"{error.strerror}: {fix}") from error
    if not MIN_SECRET_BYTES <= len(secret) <= _MAX_SECRET_BYTES:
        raise ConfigurationError(field_name, str(path), f"it holds {len(secret)} bytes: {fix}")
    return derive(secret)
