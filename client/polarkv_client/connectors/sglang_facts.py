"""All that decides what is in a page of an SGLang engine. Nothing of SGLang is imported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from polarkv_client.connectors.identity import engine_namespace, fingerprint
from polarkv_client.connectors.settings import ConnectorConfig
from polarkv_client.keys import Namespace

# Settings that change weights or KV although files, types and shapes are the same, as the engine resolved them.
_SETTINGS = (
    "device", "quantization", "dtype", "kv_cache_dtype", "load_format", "model_impl", "model_config_parser",
    "model_loader_extra_config", "modelopt_quant", "quantize_and_serve",
)  # fmt: skip
# Settings that name a file with more of them.
_FILES = ("quantization_param_path", "decrypted_config_file", "modelopt_checkpoint_restore_path", "rl_quant_profile")
_BACKENDS = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
# All that is asked for, beside the model.
SETTINGS = (*_SETTINGS, *_FILES, *_BACKENDS, "revision", "json_model_override_args", "lora_paths")


def namespace_of(
    config: ConnectorConfig, told: Callable[[str], Any], version: str, storage: Any, pool: Any, *, zero_copy: bool
) -> Namespace:
    """Everything that makes one rank's pages what they are.

    Args:
        told: the engine's settings by name, as it resolved them.
        version: the engine's.
        storage: its ``HiCacheStorageConfig``.
        pool: its host pool.
    """
    model = str(told("model_path"))
    layout = {
        # Of a page that lies layer by layer, both interfaces write the parts in another order.
        "interface": "v1" if zero_copy else "generic",
        "pool": type(pool).__name__,
        "order": pool.layout,
        "layers": [pool.start_layer, pool.end_layer, getattr(pool, "layer_num", 0)],
        "shape": [getattr(pool, name, 0) for name in ("head_num", "head_dim", "v_head_dim", "kv_cache_dim")],
        "token_bytes": pool.size_per_token,
        "format": pool.storage_format_tag,
        "cp": [storage.attn_cp_rank, storage.attn_cp_size],
        "attention": [told(name) for name in _BACKENDS],
        "settings": {name: str(told(name)) for name in _SETTINGS},
        "files": {name: fingerprint(path) for name in _FILES if (path := told(name))},
        "overrides": told("json_model_override_args"),
        "version": version,
        "adapters": _adapters(told("lora_paths")),
    }
    return engine_namespace(
        config,
        engine="sglang",
        model=model,
        weights_fingerprint=fingerprint(model, told("revision") or ""),
        kv_dtype=str(pool.dtype).removeprefix("torch."),
        layout=layout,
        page_size=pool.page_size,
        chunk_tokens=pool.page_size,
        tp=(0, 1) if storage.is_mla_model else (storage.tp_rank, storage.tp_size),
        pp=(storage.pp_rank, storage.pp_size),
    )


def _adapters(given: Any) -> list[str]:
    """Fingerprints of the adapters that the engine starts with: SGLang's keys name those by name and path alone.

    Those that are loaded later have a number that no other engine has.

    Args:
        given: ``--lora-paths`` in any of its forms: PATH or NAME=PATH, objects with ``lora_path``, paths by name.
    """
    paths: list[str] = []
    for each in given or ():
        if isinstance(given, dict):
            paths.append(str(given[each]))
        elif isinstance(each, str):
            paths.append(each.split("=", 1)[-1])
        else:
            paths.append(str(each["lora_path"] if isinstance(each, dict) else each.lora_path))
    return sorted(f"{path} {fingerprint(path)}" for path in paths)
