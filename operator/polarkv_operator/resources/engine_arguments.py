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
SGLANG_PAGE = "--page-size"
SGLANG_PAGE_TOKENS = 64  # a page is a chunk, and SGLang's default on most GPUs is one token

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


def arguments(engine: Engine, chunk_tokens: int) -> tuple[str, ...]:
    """All arguments that make an engine use a cache whose chunks have ``chunk_tokens`` tokens, as separate words.

    Where the cache is and with which token it is used is said by the environment.
    """
    if engine is Engine.VLLM:
        config = {**VLLM_TRANSFER_CONFIG, "kv_connector_extra_config": {"chunk_tokens": chunk_tokens}}
        return (VLLM_FLAG, json.dumps(config))
    # SGLang's chunk is its page: its size is the engine's to choose.
    return (SGLANG_ENABLE, SGLANG_BACKEND, "dynamic", SGLANG_CONFIG, json.dumps(dict(SGLANG_EXTRA_CONFIG)))
