"""Base of every process's settings: frozen, strict about unknown names, and wrong values are ConfigurationErrors."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from polarkv_client.endpoints import parse_endpoint
from polarkv_client.errors import ConfigurationError


class Settings(BaseModel):
    """A process's settings. Every field has a description, from which the command's options and the docs are made."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def __init__(self, **values: Any) -> None:
        """Check the values.

        Raises:
            ConfigurationError: the first value that is wrong, with its field and the fix.
        """
        try:
            super().__init__(**values)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            field = ".".join(str(part) for part in first["loc"]) or type(self).__name__
            raise ConfigurationError(field, first.get("input"), first["msg"]) from None


def check_endpoint(field: str, value: str, *, listening: bool = False) -> str:
    """Return ``value`` if it has the form of an endpoint; see :func:`parse_endpoint`.

    Raises:
        ConfigurationError: it has not.
    """
    try:
        parse_endpoint(value, listening=listening)
    except ValueError as error:
        raise ConfigurationError(field, value, str(error)) from None
    return value


def check_unix_path(field: str, value: str) -> str:
    """Return ``value`` if a Unix socket can be bound there ('' is allowed: none).

    Raises:
        ConfigurationError: it is relative or longer than the kernel takes.
    """
    if value and not value.startswith("/"):
        raise ConfigurationError(field, value, "use an absolute path")
    if len(value.encode()) > 107:
        raise ConfigurationError(field, value, "a Unix socket's path has at most 107 bytes: use a shorter directory")
    return value


def check_node_name(value: str) -> str:
    """Return ``value`` if it can name a cache node.

    Raises:
        ConfigurationError: it is empty, too long, or has characters that would need quoting in labels and file names.
    """
    if not 0 < len(value) <= 253 or not all(c.isascii() and (c.isalnum() or c in "-._") for c in value):
        raise ConfigurationError("node", value, "use 1 to 253 letters, digits, '-', '.' or '_'")
    return value
