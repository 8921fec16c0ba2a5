"""Chunks by keys that an engine makes itself: what SGLang's and LMCache's connectors ask of the client.

An engine that hands over whole requests tells the connector how long they take; these two tell nothing but lookups,
loads and stores. What a request may wait for the cache, and whether a load is worth it, is decided here for both.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from polarkv_client.client import Operations
from polarkv_client.connectors.patience import Misses, Patience
from polarkv_client.connectors.settings import ConnectorConfig
from polarkv_client.results import LoadResult, StoreResult
from polarkv_client.states import Tier
from polarkv_client.transport.base import Scope


class Match(NamedTuple):
    """What a lookup found, in chunks: a prefix to load, or one that is there and sooner computed than loaded."""

    chunks: int
    skipped: int


class Keyed:
    """One engine's chunks. Safe for several threads.

    Args:
        chunk_tokens: tokens of a chunk.
        chunk_bytes: payload bytes of a chunk.
    """

    def __init__(self, config: ConnectorConfig, operations: Operations, chunk_tokens: int, chunk_bytes: int) -> None:
        self._config = config
        self._operations = operations
        self._chunk_tokens = chunk_tokens
        self._chunk_bytes = chunk_bytes
        self._patience = Patience.of(config, operations)
        self._misses = Misses(self._patience)

    def match(self, digests: Sequence[bytes]) -> Match:
        """Look up the longest prefix that is there. What of it is on disk is on its way to memory afterwards."""
        scope = self._scope(len(digests), self._config.lookup_deadline_ms)
        tiers = self._operations.match_prefix(digests, scope)
        if not self._worth(tiers):
            self._misses.looked_up(digests, 0, self._chunk_tokens)
            return Match(0, len(tiers))
        on_disk = [digest for digest, tier in zip(digests, tiers, strict=False) if tier is Tier.DISK]
        self._operations.prefetch(on_disk, scope)
        self._misses.looked_up(digests, len(tiers), self._chunk_tokens)
        return Match(len(tiers), 0)

    def _worth(self, tiers: Sequence[Tier]) -> bool:
        """Whether loading these is faster than computing them, by the calibration's rates and by what was measured."""
        gate = self._operations.gate
        if gate is None or not tiers:
            return True
        if gate.admit([self._chunk_bytes] * len(tiers), self._chunk_tokens, lambda: tiers):
            return True
        self._operations.engine.counters.add("loads_skipped")
        return False

    def load(self, digests: Sequence[bytes], buffers: Sequence[object], *, prefix: bool) -> LoadResult:
        """Load chunks into buffers, all that can be had or (``prefix``) those before the first that cannot."""
        scope = self._scope(len(digests), self._config.load_deadline_ms)
        began = time.monotonic()
        result = self._operations.load(digests, buffers, scope, prefix=prefix)
        if (gate := self._operations.gate) is not None:
            tiers = [chunk.tier for chunk in result.chunks]
            gate.loaded(tiers, [self._chunk_bytes] * len(tiers), time.monotonic() - began)
        return result

    def store(self, digests: Sequence[bytes], buffers: Sequence[object]) -> StoreResult:
        """Store chunks that are not there yet."""
        self._misses.stored(digests)
        return self._operations.store(digests, buffers, self._operations.scope(self._config.store_deadline_ms))

    def _scope(self, chunks: int, most_ms: int) -> Scope:
        """The bounds of what a request waits for."""
        return self._operations.scope(self._patience.wait_ms(chunks * self._chunk_tokens, most_ms))
