"""What the connector has to know of a vLLM engine: its blocks, its ranks, and all that decides what is in a block.

What is not understood is refused when the engine starts, with the reason.
"""

from __future__ import annotations

import logging
import platform
from dataclasses import dataclass
from typing import Any

from polarkv_client.connectors.identity import Adapters, engine_namespace, fingerprint
from polarkv_client.connectors.settings import ConnectorConfig
from polarkv_client.connectors.vllm.pages import Pages
from polarkv_client.connectors.vllm.plan import RankIdentity
from polarkv_client.errors import ConfigurationError
from polarkv_client.keys import Namespace

log = logging.getLogger(__name__)
# Of how an engine reads images, what decides their KV.
OF_IMAGES = (
    "mm_processor_kwargs", "media_io_kwargs", "video_pruning_rate", "video_pruning_method", "mm_encoder_attn_dtype",
)  # fmt: skip
_OFF = "run without this connector, or set enabled=false"


@dataclass(frozen=True)
class Blocks:
    """The engine's blocks. ``page_bytes`` is for one block of one layer, by layer."""

    tokens: int
    count: int
    page_bytes: dict[str, int]
    is_mla: bool
    kv_dtype: str
    spec: str


def read_blocks(kv_cache_config: Any) -> Blocks:
    """The blocks of a model with attention over all tokens.

    Raises:
        ConfigurationError: there are layers of another kind; handling some of several would give wrong tokens.
    """
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, UniformTypeKVCacheSpecs

    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        names = ", ".join(type(group.kv_cache_spec).__name__ for group in groups)
        raise ConfigurationError(
            "kv_cache_groups", names, f"one group is supported: set disable_hybrid_kv_cache_manager, or {_OFF}"
        )
    spec = groups[0].kv_cache_spec
    several = isinstance(spec, UniformTypeKVCacheSpecs)
    specs = spec.kv_cache_specs if several else dict.fromkeys(groups[0].layer_names, spec)
    for name, each in specs.items():
        # Not isinstance: a kind that is derived from these keeps other things in its blocks.
        if type(each) not in {FullAttentionSpec, MLAAttentionSpec}:
            raise ConfigurationError("kv_cache_spec", f"{name}: {type(each).__name__}", f"is not supported: {_OFF}")
    one = next(iter(specs.values()))
    return Blocks(
        tokens=spec.block_size,
        count=kv_cache_config.num_blocks,
        page_bytes={name: each.real_page_size_bytes for name, each in specs.items()},
        is_mla=isinstance(one, MLAAttentionSpec),
        kv_dtype=str(one.dtype).removeprefix("torch."),
        spec=" ".join(sorted({repr(each) for each in specs.values()})),
    )


def check_model(vllm_config: Any) -> None:
    """Refuse models whose answers need every token of a prompt computed: vLLM's own prefix cache is off for them too.

    Raises:
        ConfigurationError: the pooler is over all tokens, or attention is not over what came before.
    """
    model = vllm_config.model_config
    if not getattr(model, "is_prefix_caching_supported", True):
        pooler = getattr(model, "pooler_config", None)
        found = getattr(pooler, "seq_pooling_type", None) or getattr(model, "attn_type", "")
        raise ConfigurationError("model", found, f"its answers need every token of a prompt computed: {_OFF}")


def check(config: ConnectorConfig, vllm_config: Any, blocks: Blocks) -> None:
    """Refuse what does not go together.

    Raises:
        ConfigurationError: names the setting and the fix.
    """
    parallel = vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if (size := getattr(parallel, name, 1)) > 1:
            raise ConfigurationError(name, size, f"KV split over contexts is not supported: use 1, or {_OFF}")
    check_way_of_loading(config, vllm_config)
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        raise ConfigurationError("calculate_kv_scales", True, f"scales would differ from engine to engine: {_OFF}")
    if config.chunk_tokens % blocks.tokens:
        fitting = -(-config.chunk_tokens // blocks.tokens) * blocks.tokens
        raise ConfigurationError(
            "chunk_tokens", config.chunk_tokens, f"use a multiple of the block size {blocks.tokens}, such as {fitting}"
        )
    policy = getattr(vllm_config.kv_transfer_config, "kv_load_failure_policy", "recompute")
    if policy != "recompute":
        log.warning(
            "kv_load_failure_policy is %r: a chunk that cannot be loaded fails its request; use 'recompute'", policy
        )


def check_way_of_loading(config: ConnectorConfig, vllm_config: Any) -> None:
    """Refuse loads inside a step where the next step begins before this one's result is known.

    vLLM then computes on with what a load that failed has left in its blocks, and keeps the token that comes of it.

    Raises:
        ConfigurationError: names the fix.
    """
    ahead = getattr(vllm_config.scheduler_config, "async_scheduling", False)
    if config.load == "sync" and (ahead or vllm_config.parallel_config.pipeline_parallel_size > 1):
        why = "vLLM's next step would begin before it knows that a load has failed, and take its token for right"
        fix = "use async, or start vLLM with --no-async-scheduling and one pipeline rank"
        raise ConfigurationError("load", config.load, f"{why}: {fix}")


def ranks(vllm_config: Any) -> int:
    """Workers whose KV together is an engine's."""
    parallel = vllm_config.parallel_config
    return int(parallel.tensor_parallel_size * parallel.pipeline_parallel_size)


def identify(config: ConnectorConfig, vllm_config: Any, blocks: Blocks, pages: Pages) -> tuple[RankIdentity, bool]:
    """This worker's place among the ranks, and whether it stores (where ranks hold the same bytes, one does)."""
    from vllm.distributed.parallel_state import get_pp_group, get_tensor_model_parallel_rank

    parallel = vllm_config.parallel_config
    tp = (get_tensor_model_parallel_rank(), parallel.tensor_parallel_size)
    pp = (get_pp_group().rank_in_group, parallel.pipeline_parallel_size)
    namespace = _namespace(config, vllm_config, blocks, pages, (0, 1) if blocks.is_mla else tp, pp)
    chunk_bytes = pages.block_bytes * (config.chunk_tokens // blocks.tokens)
    log.info("chunks of %d tokens, %d bytes; namespace %s", config.chunk_tokens, chunk_bytes, namespace)
    return RankIdentity(pp[0] * tp[1] + tp[0], namespace, chunk_bytes), not blocks.is_mla or tp[0] == 0


def images_are_hashed(vllm_config: Any) -> bool:
    """Whether vLLM names images by their contents. Without a cache of its own for them it counts them: the first one
    after its start has the same name in every engine.
    """
    images = getattr(vllm_config.model_config, "multimodal_config", None)
    return images is None or images.mm_processor_cache_gb > 0 or bool(vllm_config.cache_config.enable_prefix_caching)


def request_extras(
    adapters: Adapters, images_hashed: bool, request: Any, chunk_tokens: int
) -> tuple[str, dict[int, bytes]] | None:
    """What beside the tokens decides a request's KV.

    Returns:
        The adapter's fingerprint, and by chunk what vLLM's own prefix cache tells apart: images, salts, embeddings.
        None: it is not certain which images these are, or which weights the adapter has. Those that are to be loaded
        in place are read again in every step, whatever lies there then.
    """
    if request.mm_features and not images_hashed:
        return None
    lora_id: str | None = ""
    if (lora := request.lora_request) is not None:
        lora_id = None if lora.load_inplace else adapters.fingerprint(lora.lora_int_id, lora.lora_path)
    if lora_id is None:
        return None
    extras: dict[int, bytes] = {}
    if not (request.mm_features or request.cache_salt or request.prompt_embeds is not None):
        return lora_id, extras
    from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

    image = 0
    for chunk in range(-(-request.num_tokens // chunk_tokens)):
        start = chunk * chunk_tokens
        found, image = generate_block_hash_extra_keys(request, start, start + chunk_tokens, image)
        own = [each for each in found or () if each[0] != "lora"]  # its path is another on each host
        if own:
            extras[chunk] = repr(own).encode()
    return lora_id, extras


def _namespace(
    config: ConnectorConfig, vllm_config: Any, blocks: Blocks, pages: Pages, tp: tuple[int, int], pp: tuple[int, int]
) -> Namespace:
    import vllm

    model = vllm_config.model_config
    layout: dict[str, object] = {
        **pages.layout,
        "engine": vllm.__version__,
        "device": pages.device.type,
        "backend": _backends(vllm_config, pages.names),
        "code": f"{model.architecture} {model.model_impl} {model.code_revision or ''}",
        "compute": str(model.dtype),
        "cache_dtype": str(vllm_config.cache_config.cache_dtype),
        "quantization": str(model.quantization),
        "overrides": repr(model.hf_overrides) if model.hf_overrides else "",
    }
    if (images := getattr(model, "multimodal_config", None)) is not None:
        # An image's name in keys is of its contents and the request's own settings, not of the engine's.
        layout["images"] = [repr(getattr(images, name, None)) for name in OF_IMAGES]
    if (positions := _positions(model)) is not None:
        layout["positions"] = positions
    if vllm_config.speculative_config is not None:
        layout["draft"] = f"{vllm_config.speculative_config.method} {vllm_config.speculative_config.model}"
    if pages.device.type == "cpu":
        layout["isa"] = _instruction_set(model.dtype, blocks, vllm_config)
    else:
        import torch

        layout["device_name"] = torch.cuda.get_device_name(pages.device) if torch.cuda.is_available() else ""
    return engine_namespace(
        config, engine="vllm", model=model.model, kv_dtype=blocks.kv_dtype, layout=layout,
        weights_fingerprint=weights_of(model, str(vllm_config.load_config.load_format)),
        page_size=blocks.tokens, tp=tp, pp=pp,
    )  # fmt: skip


def weights_of(model: Any, load_format: str) -> str:
    """Says which weights a model has, and by which configuration it computes with them."""
    weights = fingerprint(model.model, model.revision or "")
    if model.hf_config_path:
        weights += f" as {fingerprint(model.hf_config_path)}"
    if load_format.endswith("dummy"):
        weights += f" dummy {model.seed}"
    return weights


def _positions(model: Any) -> str | None:
    """Of a model with two sets of factors for its positions: which one. The engine's longest prompt decides."""
    config = model.hf_text_config
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if "longrope" not in repr(parameters):
        return None
    most = parameters.get("original_max_position_embeddings") or getattr(
        config, "original_max_position_embeddings", None
    )
    if not isinstance(most, int):
        return f"up to {model.max_model_len}"
    return "long" if model.max_model_len > most else "short"


def _backends(vllm_config: Any, names: list[str]) -> str:
    layers = vllm_config.compilation_config.static_forward_context
    found = set()
    for name in names:
        backend = getattr(layers.get(name), "attn_backend", None) or getattr(layers.get(name), "backend", None)
        found.add(getattr(backend, "__name__", None) or type(layers.get(name)).__name__)
    return " ".join(sorted(found))


def _instruction_set(dtype: Any, blocks: Blocks, vllm_config: Any) -> str:
    """Keys on a CPU are packed for what its attention uses."""
    import torch

    processor = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    if hasattr(torch.cpu, "_is_amx_tile_supported"):
        processor += " amx" if torch.cpu._is_amx_tile_supported() else ""
    try:
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        head_size = vllm_config.model_config.get_head_size()
        return f"{processor} {_get_attn_isa(dtype, blocks.tokens, head_size)}"
    except (ImportError, TypeError, NotImplementedError):
        return processor
