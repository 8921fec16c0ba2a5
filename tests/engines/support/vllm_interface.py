"""Runs in vLLM's environment: how the connector differs from the installed interface, in sentences."""

from __future__ import annotations

from typing import Any

from polarkv_client.connectors.vllm.facts import OF_IMAGES
from tests.engines.support.signatures import differences, parameters

# What else of vLLM the connector reaches into: where, name, parameters (None: any).
REACHES: tuple[tuple[str, str, list[str] | None], ...] = (
    (
        "vllm.v1.core.kv_cache_utils", "generate_block_hash_extra_keys",
        ["request", "start_token_idx", "end_token_idx", "start_mm_idx"],
    ),
    ("vllm.v1.kv_cache_interface", "FullAttentionSpec.real_page_size_bytes", None),
    ("vllm.v1.kv_cache_interface", "MLAAttentionSpec.real_page_size_bytes", None),
    ("vllm.v1.kv_cache_interface", "UniformTypeKVCacheSpecs", None),
    ("vllm.v1.core.sched.output", "KVConnectorBlockState.get_block_ids", ["self", "req_id"]),
    ("vllm.distributed.parallel_state", "get_pp_group", []),
    ("vllm.distributed.parallel_state", "get_tensor_model_parallel_rank", []),
    (
        "vllm.v1.attention.backends.cpu_attn", "_get_attn_isa",
        ["dtype", "block_size", "head_size=None", "kv_cache_dtype=None"],
    ),
    ("vllm.v1.metrics.cache_hit_source", "CacheHitSource.DISK", None),
    ("vllm.config", "ModelConfig.is_prefix_caching_supported", None),
    ("vllm.config", "ModelConfig.architecture", None),
)  # fmt: skip
FIELDS: dict[str, tuple[str, set[str]]] = {
    "SchedulerOutput": (
        "vllm.v1.core.sched.output", {"num_scheduled_tokens", "preempted_req_ids", "kv_connector_block_state"},
    ),
    "KVConnectorOutput": ("vllm.v1.outputs", {"finished_recving", "invalid_block_ids"}),
    "KVConnectorTransferResults": (
        "vllm.distributed.kv_transfer.kv_connector.v1.base", {"finished_sending", "finished_recving"},
    ),
    "LoRARequest": ("vllm.lora.request", {"lora_path"}),
    "ModelConfig": (
        "vllm.config", {"hf_config_path", "multimodal_config", "pooler_config", "model_impl", "code_revision"},
    ),
    "SchedulerConfig": ("vllm.config", {"async_scheduling"}),
    "MultiModalConfig": ("vllm.config", {"mm_processor_cache_gb", *OF_IMAGES}),
}  # fmt: skip
REQUEST = (
    "request_id", "all_token_ids", "num_tokens", "num_computed_tokens", "num_in_flight_tokens",
    "skip_reading_prefix_cache", "resumable", "lora_request", "mm_features", "cache_salt", "prompt_embeds",
)  # fmt: skip


def reached() -> list[str]:
    """What the connector uses beside the interface, and is not as it was."""
    from importlib import import_module

    found = []
    for module, path, expected in REACHES:
        thing: Any = import_module(module)
        try:
            for name in path.split("."):
                thing = getattr(thing, name)
        except AttributeError:
            found.append(f"{module}.{path}: is gone")
            continue
        if expected is not None and parameters(thing) != expected:
            found.append(f"{module}.{path}: was ({', '.join(expected)}), is ({', '.join(parameters(thing))})")
    for kind, (module, names) in FIELDS.items():
        annotations = set(getattr(getattr(import_module(module), kind), "__annotations__", {}))
        found += [f"{kind}.{name}: is gone" for name in sorted(names - annotations)]
    from vllm import SamplingParams
    from vllm.v1.request import Request

    request = Request("r", [1, 2, 3], SamplingParams(), None)
    found += [f"Request.{name}: is gone" for name in REQUEST if not hasattr(request, name)]
    return found


def change_the_engine() -> None:
    """Plant a difference, as a newer version could bring it."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    def request_finished(self: Any, request: Any, block_ids: Any, reason: str) -> None:
        """Has one parameter more."""

    KVConnectorBase_V1.request_finished = request_finished
    del KVConnectorBase_V1.shutdown


def interface() -> list[str]:
    """All differences; none when the connector fits."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA

    from polarkv_client.connectors.vllm import PolarKVConnector

    found = differences(PolarKVConnector, KVConnectorBase_V1) + reached()
    if issubclass(PolarKVConnector, SupportsHMA):
        found.append("SupportsHMA: the engine would give it several groups of blocks, and it handles one")
    return found
