"""SGLang's hierarchical cache on PolarKV: ``--hicache-storage-backend dynamic`` with this module's PolarKVStorage.

Source of the interface: ``HiCacheStorage`` of SGLang 0.5.23 (``sglang/srt/mem_cache/hicache_storage.py``); a test
compares the signatures. The engine keeps pages in a host pool; this stores them and brings them back. A page is a
chunk, its key SGLang's own page hash under the namespace of this rank. Pages are moved straight from and to the host
pool (``interface_v1``), or through flat tensors (without it).

Threads: the engine makes this on its scheduler's thread and calls it on several others, which it makes anew at
``flush_cache``. Nothing here depends on the thread. No method raises once the pool is registered: what cannot be
loaded is a miss, what cannot be stored is not stored, and each call ends at its deadline.

Design and tests: docs/design/connectors.md. For users: docs/engines/sglang.md.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import sglang
import torch
from sglang.srt.arg_groups.overrides import resolution_result
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage
from sglang.srt.runtime_context import get_context, get_model, get_server_args, get_serving

from polarkv_client.buffers import Views, flatten
from polarkv_client.connectors.guard import attach, harmless
from polarkv_client.connectors.hicache_metrics import Meter
from polarkv_client.connectors.host_pages import HostPages
from polarkv_client.connectors.identity import chunk_digests
from polarkv_client.connectors.keyed import Keyed
from polarkv_client.connectors.settings import ConnectorConfig, load_connector_config
from polarkv_client.connectors.sglang_facts import namespace_of
from polarkv_client.errors import ConfigurationError
from polarkv_client.results import Stored

log = logging.getLogger(__name__)
_LAYOUTS = ("page_first", "page_first_direct", "layer_first", "page_head")
# Of the extra config, what is the engine's own.
_ENGINE_FIELDS = frozenset({"backend_name", "module_path", "class_name", "interface_v1", "allocator"})
_KV_POOL = "kv"
_SMALL_PAGE = 16
_THERE = frozenset({Stored.STORED, Stored.EXISTS, Stored.IN_PROGRESS})


class PolarKVStorage(HiCacheStorage):  # type: ignore[misc]  # the engine's class has no types
    """One rank's pages in PolarKV.

    Args:
        storage_config: the engine's ``HiCacheStorageConfig``; its ``extra_config`` holds the settings of
            :mod:`polarkv_client.connectors.settings` beside the engine's own fields.

    Raises:
        ConfigurationError: a setting, the layout or the kind of pool is wrong; names it and the fix.
    """

    def __init__(self, storage_config: Any, kwargs: Mapping[str, Any] | None = None) -> None:
        self._storage_config = storage_config
        extra = dict(storage_config.extra_config or {})
        self._zero_copy = bool(extra.get("interface_v1", 0))
        flags = {name: value for name, value in extra.items() if name not in _ENGINE_FIELDS}
        self._config = load_connector_config(flags)
        self._operations = attach(self._config) if self._config is not None else None
        self._rank: _Rank | None = None  # without it nothing is stored or loaded
        self._meter = Meter(
            bool(storage_config.enable_storage_metrics), storage_config.model_name or "", storage_config.tp_rank
        )
        if self._config is None:
            log.warning("PolarKV is switched off (enabled is false): nothing is stored or loaded")

    # Attaching: on the scheduler's thread, once. These may raise: the engine then does not start.

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Take the host pool: its memory is registered here, once, and it says what a page looks like."""
        super().register_mem_pool_host(mem_pool_host)
        config, operations = self._config, self._operations
        if config is None or operations is None:
            return
        layout = mem_pool_host.layout
        if layout not in _LAYOUTS:
            raise ConfigurationError("hicache_mem_layout", layout, f"use one of {', '.join(_LAYOUTS)}")
        if mem_pool_host.page_size < _SMALL_PAGE:
            log.warning(
                "PolarKV: a page of %d tokens makes a small chunk: start SGLang with --page-size 64",
                mem_pool_host.page_size,
            )
        pages = HostPages(mem_pool_host, torch.arange(mem_pool_host.page_size)) if self._zero_copy else None
        if _weights_are_others(config):
            _say_replaced()
            return
        told = get_context().config_leaf
        namespace = namespace_of(
            config, told, sglang.__version__, self._storage_config, mem_pool_host, zero_copy=self._zero_copy
        )
        page_bytes = int(mem_pool_host.size_per_token) * mem_pool_host.page_size
        keyed = Keyed(config, operations, mem_pool_host.page_size, page_bytes)
        self._rank = _Rank(hashlib.sha256(namespace.root()), pages, keyed, _weights())
        log.info("PolarKV at %s: %s", config.endpoint, namespace)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Refuse pools beside the KV's: a page without its part there would give wrong tokens."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        if self._config is not None and str(host_pool_name) != _KV_POOL:
            fix = "this model keeps more than plain KV, which PolarKV does not store: run it without a storage backend"
            raise ConfigurationError("hicache_storage_backend", f"a host pool named {host_pool_name}", fix)

    # The engine's lookup.

    @harmless(lambda: 0)
    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """How many of ``keys``, from the first on, are there. Those on disk are on their way to memory afterwards."""
        rank = self._sharing()
        if rank is None:
            return 0
        began = time.monotonic()
        found = rank.chunks.match(rank.digests(keys))
        self._meter.looked_up(found.skipped, time.monotonic() - began)
        return found.chunks

    def exists(self, key: str) -> bool:
        """Whether a page is there."""
        return self.batch_exists([key]) == 1

    # Zero copy: ``host_indices`` has a page's tokens for each key, as places in the host pool.

    def batch_get_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Load pages into the host pool. One answer a key; after the first that is False no other counts."""
        return _padded(self._load_pages(keys, host_indices), len(keys))

    def batch_set_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Store pages of the host pool. One answer a key: whether it is there now."""
        return _padded(self._store_pages(keys, host_indices), len(keys))

    # Generic: flat tensors.

    def get(
        self, key: str, target_location: torch.Tensor | None = None, target_sizes: Any = None
    ) -> torch.Tensor | None:
        """Load one page into ``target_location`` (or a new tensor), and return it; None: a miss."""
        return self.batch_get([key], None if target_location is None else [target_location])[0]

    def batch_get(
        self, keys: list[str], target_locations: Sequence[torch.Tensor] | None = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """Load pages into tensors of a page's size; None in the place of each that is a miss."""
        if target_locations is None:
            target_locations = [self.mem_pool_host.get_dummy_flat_data_page() for _ in keys]
        hits = _padded(self._load_tensors(keys, target_locations), len(keys))
        return [target if hit else None for target, hit in zip(target_locations, hits, strict=True)]

    def set(
        self, key: str, value: torch.Tensor | None = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        """Store one page; whether it is there now."""
        return self.batch_set([key], [value])

    def batch_set(
        self, keys: list[str], values: Sequence[Any] | None = None, target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:  # fmt: skip
        """Store pages; whether all of them are there now."""
        return all(_padded(self._store_tensors(keys, values or ()), len(keys)))

    def clear(self) -> None:
        """Does nothing: other engines use these pages too. ``polarkv evict`` drops chunks of a cluster."""
        log.warning("PolarKV is shared by engines and is not cleared by one: use `polarkv evict`")

    @harmless(lambda: None)
    def get_stats(self) -> Any:
        """What was moved since the last call, for the engine's own metrics (``StorageMetrics``)."""
        return self._meter.take()

    @harmless(lambda: None)
    def close(self) -> None:
        """Give everything back; calls from then on are misses."""
        self._rank = None
        operations, self._operations = self._operations, None
        if operations is not None:
            operations.close()

    # What is decorated here is the one place where a defect becomes a miss.

    @harmless(list[bool])
    def _load_pages(self, keys: list[str], host_indices: torch.Tensor) -> list[bool]:
        rank = self._sharing()
        return self._load(rank, keys, rank.views(host_indices)) if rank is not None else []

    @harmless(list[bool])
    def _store_pages(self, keys: list[str], host_indices: torch.Tensor) -> list[bool]:
        rank = self._sharing()
        if rank is None or not self._writes:
            return [True] * len(keys)
        return self._store(rank, keys, rank.views(host_indices))

    @harmless(list[bool])
    def _load_tensors(self, keys: list[str], tensors: Sequence[torch.Tensor]) -> list[bool]:
        rank = self._sharing()
        if rank is None:
            return []
        return self._load(rank, keys, [flatten(tensor, "target_locations", writable=True) for tensor in tensors])

    @harmless(list[bool])
    def _store_tensors(self, keys: list[str], values: Sequence[torch.Tensor]) -> list[bool]:
        rank = self._sharing()
        if rank is None or not self._writes:
            return [True] * len(keys)
        return self._store(rank, keys, [flatten(value.contiguous(), "values", writable=False) for value in values])

    def _sharing(self) -> _Rank | None:
        """The rank, unless the engine has other weights by now. Whoever comes first says so."""
        rank = self._rank
        if rank is None or rank.weights == _weights():
            return rank
        self._rank = None
        _say_replaced()
        return None

    @property
    def _writes(self) -> bool:
        """Whether this rank stores: of ranks that hold the same bytes (MLA) one does."""
        config = self._config
        return config is not None and config.store and bool(self._storage_config.is_storage_writer)

    def _load(self, rank: _Rank, keys: list[str], views: list[Views]) -> list[bool]:
        began = time.monotonic()
        result = rank.chunks.load(rank.digests(keys), views, prefix=True)
        self._meter.loaded(result, self.mem_pool_host.page_size, time.monotonic() - began)
        return [chunk.hit for chunk in result.chunks]

    def _store(self, rank: _Rank, keys: list[str], views: list[Views]) -> list[bool]:
        began = time.monotonic()
        result = rank.chunks.store(rank.digests(keys), views)
        self._meter.stored(result, time.monotonic() - began)
        return [chunk.outcome in _THERE for chunk in result.chunks]


class _Rank(NamedTuple):
    """One rank's chunks, and what all of their keys begin with."""

    root: hashlib._Hash
    pages: HostPages | None
    chunks: Keyed
    weights: tuple[str, str, str]

    def digests(self, keys: Sequence[str]) -> list[bytes]:
        """Chunk keys: the hash of the namespace's root and the engine's own key, 32 bytes each."""
        return chunk_digests(self.root, keys)

    def views(self, host_indices: torch.Tensor) -> list[Views]:
        """The pages' memory in the host pool."""
        if self.pages is None:
            raise ValueError("the engine was configured for the generic interface, and uses zero copy")
        return self.pages.views(host_indices)


def _weights() -> tuple[str, str, str]:
    """Which weights the engine says that it has now."""
    model = get_model()
    return str(model.model_path), str(model.load_format), str(get_serving().weight_version)


def _weights_are_others(config: ConnectorConfig) -> bool:
    """Whether the weights are, or will be, others than those on disk, and nobody has said which."""
    if get_context().config_leaf("checkpoint_engine_wait_weights_before_ready"):
        return not config.namespace_weights_fingerprint
    return str(get_serving().weight_version) != str(resolution_result(get_server_args(), "weight_version"))


def _say_replaced() -> None:
    log.warning("PolarKV: this engine's weights were replaced: until it is restarted, nothing is stored or loaded")


def _padded(answers: list[bool], count: int) -> list[bool]:
    """One answer a key, whatever went wrong."""
    return answers + [False] * (count - len(answers))
