"""Runs in LMCache's environment: prints, as JSON, how the plug-in differs from the installed interface.

With an argument, a change of LMCache is planted first.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from lmcache.v1.storage_backend.connector import ConnectorAdapter
from lmcache.v1.storage_backend.connector.base_connector import RemoteConnector

from polarkv_client.connectors.lmcache import PolarKVAdapter, PolarKVRemote
from tests.engines.support.signatures import differences


def main() -> None:
    if sys.argv[1:]:

        async def get(self: Any, key: Any, location: Any) -> None:
            """Has one parameter more."""

        RemoteConnector.get = get
    pairs = ((PolarKVAdapter, ConnectorAdapter), (PolarKVRemote, RemoteConnector))
    # Both are made by us: the adapter without an argument, the connector by the adapter.
    found = [each for ours, theirs in pairs for each in differences(ours, theirs) if not each.startswith("__init__:")]
    print("INTERFACE", json.dumps(found))


if __name__ == "__main__":
    main()
