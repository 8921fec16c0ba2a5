"""Runs in SGLang's environment: prints, as JSON, how the connector differs from the installed interface.

Twice: as it is, and after a change of the engine has been planted.
"""

from __future__ import annotations

import inspect
import json
from typing import Any

from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, HiCacheStorageConfig
from sglang.srt.mem_cache.pool_host.base import HostKVCache
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory
from sglang.srt.observability.metrics_collector import StorageMetrics
from sglang.srt.server_args import ServerArgs

from polarkv_client.connectors.sglang import PolarKVStorage
from polarkv_client.connectors.sglang_facts import SETTINGS
from tests.engines.support.signatures import differences, parameters

# Not of the interface's class: the factory makes it, the controller closes it where it can be closed.
_ELSEWHERE = ("__init__:", "close:")
# What else of SGLang the connector reaches into.
REACHES: tuple[tuple[type, str, list[str]], ...] = (
    (MHATokenToKVPoolHost, "get_page_buffer_meta", ["self", "indices"]),
    (MLATokenToKVPoolHost, "get_page_buffer_meta", ["self", "indices"]),
    (HostKVCache, "get_dummy_flat_data_page", ["self"]),
)
FIELDS: tuple[tuple[type, set[str]], ...] = (
    (
        HiCacheStorageConfig,
        {
            "tp_rank", "tp_size", "pp_rank", "pp_size", "attn_cp_rank", "attn_cp_size", "is_mla_model", "model_name",
            "enable_storage_metrics", "extra_config", "is_storage_writer",
        },
    ),
    (
        ServerArgs,
        {
            "model_path", "weight_version", "checkpoint_engine_wait_weights_before_ready", *SETTINGS,
        },
    ),
    (StorageMetrics, {"prefetch_pgs", "backup_pgs", "prefetch_bandwidth", "backup_bandwidth"}),
    (HostKVCache, {"storage_format_tag"}),
)  # fmt: skip
POOL = ("kv_buffer", "page_size", "size_per_token", "layout", "dtype", "start_layer", "end_layer")
# Lines of the engine's source: how it makes a backend, and how it closes it.
LINES: tuple[tuple[Any, str], ...] = (
    (StorageBackendFactory._create_dynamic_backend, "return backend_class(storage_config, kwargs)"),
    (HiCacheController.detach_storage_backend, "self.storage_backend.close()"),
)


def reached() -> list[str]:
    """What the connector uses beside the interface, and is not as it was."""
    found = []
    for kind, name, expected in REACHES:
        now = parameters(getattr(kind, name)) if hasattr(kind, name) else None
        if now != expected:
            found.append(f"{kind.__name__}.{name}: was ({', '.join(expected)}), is {now}")
    for kind, names in FIELDS:
        there = set(getattr(kind, "__annotations__", {})) | set(dir(kind))
        found += [f"{kind.__name__}.{name}: is gone" for name in sorted(names - there)]
    source = inspect.getsource(HostKVCache)
    found += [f"HostKVCache.{name}: is gone" for name in POOL if f"self.{name} = " not in source]
    found += [
        f"{where.__qualname__}: no more '{line}'" for where, line in LINES if line not in inspect.getsource(where)
    ]
    return found


def tell() -> None:
    """Print all differences."""
    found = [each for each in differences(PolarKVStorage, HiCacheStorage) if not each.startswith(_ELSEWHERE)]
    print("INTERFACE", json.dumps(found + reached()))


def main() -> None:
    def batch_exists(self: Any, keys: Any) -> None:
        """Has one parameter less."""

    tell()
    HiCacheStorage.batch_exists = batch_exists
    del HiCacheStorage.get_stats
    tell()


if __name__ == "__main__":
    main()
