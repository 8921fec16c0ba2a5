"""What engines are told, so that they use the client library: one place for the webhook and the connection.

Source of the names: vLLM's ``KVTransferConfig`` and SGLang's dynamic HiCache backend, as the engines' tests run them.
"""

from __future__ import annotations

import json
from enum import StrEnum
from types import MappingProxyType


class Engine(StrEnum):
    """An inference engine that has a connector."""

    VLLM = "vllm"
    SGLANG = "sglang"


VLLM_FLAG = "--kv-transfer-config"
SGLANG_ENABLE = "--enable-hierarchical-cache"
SGLANG_BACKEND = "--hicache-storage-backend"
SGLANG_CONFIG = "--hicache-storage-backend-extra-config"

# Recompute: with vLLM's default, a chunk that cannot be loaded would fail the request instead of being computed.
VLLM_TRANSFER_CONFIG = MappingProxyType(
    {
        "kv_connector": "PolarKVConnector",
        "kv_connector_module_path": "polarkv_client.connectors.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
    }
)
SGLANG_EXTRA_CONFIG = MappingProxyType(
    {
        "backend_name": "polarkv",
        "module_path": "polarkv_client.connectors.sglang",
        "class_name": "PolarKVStorage",
        "interface_v1": 1,
    }
)


def vllm_transfer_config() -> str:
    """The JSON that vLLM's ``--kv-transfer-config`` takes."""
    return json.dumps(dict(VLLM_TRANSFER_CONFIG))


def sglang_extra_config() -> str:
    """The JSON that SGLang's ``--hicache-storage-backend-extra-config`` takes."""
    return json.dumps(dict(SGLANG_EXTRA_CONFIG))


def arguments(engine: Engine) -> tuple[str, ...]:
    """All arguments that make an engine use the cache, as separate words."""
    if engine is Engine.VLLM:
        return (VLLM_FLAG, vllm_transfer_config())
    return (SGLANG_ENABLE, SGLANG_BACKEND, "dynamic", SGLANG_CONFIG, sglang_extra_config())
