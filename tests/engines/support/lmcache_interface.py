"""Runs in LMCache's environment: prints, as JSON, how the plug-in differs from the installed interface.

Twice: as it is, and after a change of LMCache has been planted.
"""

from __future__ import annotations

import json
from typing import Any

from lmcache.v1.storage_backend.connector import ConnectorAdapter
from lmcache.v1.storage_backend.connector.base_connector import RemoteConnector

from polarkv_client.connectors.lmcache import PolarKVAdapter, PolarKVRemote
from tests.engines.support.signatures import differences


def tell() -> None:
    """Print all differences."""
    pairs = ((PolarKVAdapter, ConnectorAdapter), (PolarKVRemote, RemoteConnector))
    # Both are made by us: the adapter without an argument, the connector by the adapter.
    found = [each for ours, theirs in pairs for each in differences(ours, theirs) if not each.startswith("__init__:")]
    print("INTERFACE", json.dumps(found))


def main() -> None:
    async def get(self: Any, key: Any, location: Any) -> None:
        """Has one parameter more."""

    tell()
    RemoteConnector.get = get
    tell()


if __name__ == "__main__":
    main()
