"""The metadata store: an optimisation, never the truth. Nothing waits for it, and nothing is believed because of it."""

from __future__ import annotations

from polarkv_client.errors import ConfigurationError
from polarkv_dataplane.manager.settings import METADATA_FORMS
from polarkv_dataplane.manager.shell.metadata.store import MetadataStore, NoStore


def make_store(url: str) -> MetadataStore:
    """The store that a URL names; nothing is opened yet.

    Raises:
        ConfigurationError: there is no such kind, or its driver is not installed.
    """
    scheme, _, rest = url.partition("://")
    if not url:
        return NoStore()
    if scheme == "sqlite":
        from polarkv_dataplane.manager.shell.metadata.sqlite import SqliteStore

        return SqliteStore(rest)
    if scheme in ("postgresql", "postgres"):
        try:
            from polarkv_dataplane.manager.shell.metadata.postgres import PostgresStore
        except ImportError as error:
            raise ConfigurationError("metadata_url", f"{scheme}://…", "install polarkv-cluster[postgres]") from error
        return PostgresStore(url)
    if scheme == "mysql":
        try:
            from polarkv_dataplane.manager.shell.metadata.mysql import MysqlStore
        except ImportError as error:
            raise ConfigurationError("metadata_url", f"{scheme}://…", "install polarkv-cluster[mysql]") from error
        return MysqlStore(url)
    raise ConfigurationError("metadata_url", f"{scheme}://…", f"use {METADATA_FORMS}")
