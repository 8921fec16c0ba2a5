"""LMCache on PolarKV: a remote storage plug-in, for engines that already run LMCache.

Source of the interface: ``ConnectorAdapter`` and ``RemoteConnector`` of LMCache 0.5.6
(``lmcache/v1/storage_backend/connector``); a test compares the signatures. LMCache cuts prompts into chunks, copies
them to host memory and names them; this stores and loads those buffers, whole batches at once, without another copy.

Nothing here raises once the connector is made: what cannot be loaded is a miss, what cannot be stored is not stored.
For users: docs/engines/lmcache.md.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from lmcache.v1.storage_backend.connector import ConnectorAdapter
from lmcache.v1.storage_backend.connector.base_connector import RemoteConnector

from polarkv_client.client import Operations
from polarkv_client.connectors.guard import attach, harmless
from polarkv_client.connectors.identity import chunk_digests, engine_namespace, fingerprint
from polarkv_client.connectors.keyed import Keyed
from polarkv_client.connectors.settings import ConnectorConfig, load_connector_config
from polarkv_client.errors import ConfigurationError
from polarkv_client.keys import Namespace

log = logging.getLogger(__name__)
Answer = TypeVar("Answer")
_URL = "plugin://"
_NAME = "polarkv"
_LMCACHE_FIELDS = frozenset({"module_path", "class_name"})
_THREADS = 8  # calls at once; LMCache has one a request


class PolarKVAdapter(ConnectorAdapter):  # type: ignore[misc]  # LMCache's class has no types
    """What LMCache makes connectors with; its plug-in must be named ``polarkv``, or ``polarkv.SOMETHING``."""

    def __init__(self) -> None:
        super().__init__(f"{_URL}{_NAME}")

    def create_connector(self, context: Any) -> PolarKVRemote:
        """A connector with the settings below ``remote_storage_plugin.NAME`` in LMCache's extra config.

        Raises:
            ConfigurationError: a setting is wrong; names it and the fix.
        """
        name = context.plugin_name or context.url.removeprefix(_URL)
        prefix = f"remote_storage_plugin.{name}."
        extra = context.config.extra_config or {}
        own = {field.removeprefix(prefix): value for field, value in extra.items() if field.startswith(prefix)}
        # What has a dot is of another plug-in, whose name begins with this one's.
        settings = {field: own[field] for field in own if "." not in field and field not in _LMCACHE_FIELDS}
        config = load_connector_config(settings)
        return PolarKVRemote(context.config, context.metadata, context.local_cpu_backend, config)


class PolarKVRemote(RemoteConnector):  # type: ignore[misc]  # LMCache's class has no types
    """LMCache's chunks in PolarKV. Asynchronous calls run on threads of their own, never on LMCache's loop.

    Args:
        config: LMCache's configuration.
        metadata: LMCache's ``LMCacheMetadata`` of this worker.
        memory: LMCache's ``LocalCPUBackend``, where loads get their buffers.
        own: this connector's configuration; None: switched off.
    """

    def __init__(self, config: Any, metadata: Any, memory: Any, own: ConnectorConfig | None) -> None:
        super().__init__(config, metadata)
        if config.use_layerwise:
            fix = "chunks of single layers are not stored by PolarKV: set it to false"
            raise ConfigurationError("use_layerwise", config.use_layerwise, fix)
        self._memory = memory
        self._config = own
        self._operations: Operations | None = None
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="polarkv-lmcache")
        if own is None:
            log.warning("PolarKV is switched off (enabled is false): nothing is stored or loaded")
            return
        self._operations = attach(own)
        self._chunks = Keyed(own, self._operations, int(metadata.chunk_size), int(self.full_chunk_size_bytes))
        namespace = self._namespace(own, metadata)
        self._root = hashlib.sha256(namespace.root())
        log.info("PolarKV at %s: %s", own.endpoint, namespace)

    def exists_sync(self, key: Any) -> bool:
        """Whether a chunk is there."""
        return self.batched_contains([key]) == 1

    async def exists(self, key: Any) -> bool:
        """As :meth:`exists_sync`."""
        return await self._run(lambda: self.exists_sync(key))

    def support_batched_contains(self) -> bool:
        """Yes: one question for all keys."""
        return True

    @harmless(lambda: 0)
    def batched_contains(self, keys: list[Any]) -> int:
        """How many of ``keys``, from the first on, are there."""
        return self._chunks.match(self._digests(keys)).chunks if self._operations is not None else 0

    async def batched_async_contains(self, lookup_id: str, keys: list[Any], pin: bool = False) -> int:
        """As :meth:`batched_contains`. Nothing is pinned: a chunk that has gone by the time it is loaded is a miss."""
        return await self._run(lambda: self.batched_contains(keys))

    async def get(self, key: Any) -> Any:
        """A chunk in memory of LMCache's; None: a miss."""
        return (await self.batched_get([key]))[0]

    def support_batched_get(self) -> bool:
        """Yes: a batch is read from all cache nodes in parallel."""
        return True

    async def batched_get(self, keys: list[Any]) -> list[Any]:
        """Chunks in memory of LMCache's; None in the place of each that is a miss."""
        found = await self._run(lambda: self._load(keys))
        return found + [None] * (len(keys) - len(found))

    async def batched_get_non_blocking(self, lookup_id: str, keys: list[Any]) -> list[Any]:
        """The chunks before the first miss."""
        found = await self.batched_get(keys)
        hits = next((place for place, chunk in enumerate(found) if chunk is None), len(found))
        for chunk in found[hits:]:
            if chunk is not None:
                chunk.ref_count_down()
        return found[:hits]

    async def put(self, key: Any, memory_obj: Any) -> None:
        """Store a chunk."""
        await self.batched_put([key], [memory_obj])

    def support_batched_put(self) -> bool:
        """Yes: a batch is written to all cache nodes in parallel."""
        return True

    async def batched_put(self, keys: list[Any], memory_objs: list[Any]) -> None:
        """Store chunks, as far as there is room. The end of a prompt, shorter than a chunk, is not stored."""
        await self._run(lambda: self._store(keys, memory_objs))

    def remove_sync(self, key: Any) -> bool:
        """Nothing is removed: other engines use the chunk too; it goes when it is not used any more."""
        return False

    async def close(self) -> None:
        """Give everything back; calls from then on are misses."""
        operations, self._operations = self._operations, None
        if operations is not None:
            await self._run(operations.close)
        self._threads.shutdown(wait=False, cancel_futures=True)

    # What is decorated here is the one place where a defect becomes a miss.

    @harmless(list[Any])
    def _load(self, keys: list[Any]) -> list[Any]:
        if self._operations is None:
            return []
        chunks: list[Any] = []
        try:
            for _ in keys:
                chunk = self._memory.allocate(self.meta_shapes, self.meta_dtypes, self.meta_fmt)
                if chunk is None:  # LMCache's memory is full: fewer chunks are loaded
                    break
                chunks.append(chunk)
            digests = self._digests(keys[: len(chunks)])
            loads = self._chunks.load(digests, [chunk.byte_array for chunk in chunks], prefix=False).chunks
        except BaseException:
            for chunk in chunks:
                chunk.ref_count_down()
            raise
        for chunk, load in zip(chunks, loads, strict=True):
            if not load.hit:
                chunk.ref_count_down()
        return [chunk if load.hit else None for chunk, load in zip(chunks, loads, strict=True)]

    @harmless(lambda: None)
    def _store(self, keys: list[Any], memory_objs: list[Any]) -> None:
        if self._operations is None or self._config is None or not self._config.store:
            return
        whole = [
            (key, chunk.byte_array)
            for key, chunk in zip(keys, memory_objs, strict=True)
            if chunk.get_size() == self.full_chunk_size_bytes
        ]
        if whole:
            self._chunks.store(self._digests([key for key, _ in whole]), [raw for _, raw in whole])

    def _digests(self, keys: Sequence[Any]) -> list[bytes]:
        """Chunk keys: the hash of the namespace's root and LMCache's own key, which names ranks, dtype and tags."""
        return chunk_digests(self._root, (key.to_string() for key in keys))

    def _namespace(self, own: ConnectorConfig, metadata: Any) -> Namespace:
        layout = {
            "format": str(self.meta_fmt),
            "shapes": [list(shape) for shape in self.meta_shapes],
            "mla": bool(metadata.use_mla),
        }
        return engine_namespace(
            own,
            engine="lmcache",
            model=metadata.model_name,
            weights_fingerprint=fingerprint(metadata.model_name),
            kv_dtype=",".join(str(dtype).removeprefix("torch.") for dtype in self.meta_dtypes),
            layout=layout,
            page_size=metadata.chunk_size,
            chunk_tokens=metadata.chunk_size,
        )

    async def _run(self, call: Callable[[], Answer]) -> Answer:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    # Last: in what comes after it, mypy takes `list` for this.

    async def list(self) -> list[str]:
        """Nothing: other engines' chunks are there too, under keys that are hashes. ``polarkv`` shows a cluster's."""
        return []
