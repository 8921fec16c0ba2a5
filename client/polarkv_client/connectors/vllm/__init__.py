"""The connector for vLLM: ``kv_connector=PolarKVConnector, kv_connector_module_path=polarkv_client.connectors.vllm``.

``connector`` is what vLLM sees; ``scheduler`` and ``worker`` are its halves, which know nothing of vLLM; ``pages`` and
``copies`` are about memory. Design, contract and tests: docs/design/connectors.md; for users: docs/engines/vllm.md.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """The class that vLLM asks this module for. Found when asked, so that the rest can be used without vLLM."""
    if name == "PolarKVConnector":
        from polarkv_client.connectors.vllm.connector import PolarKVConnector

        return PolarKVConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
