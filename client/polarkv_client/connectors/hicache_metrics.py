"""What the SGLang connector did, in SGLang's own metrics: its histograms, and counters of ours beside them."""

from __future__ import annotations

import threading
from collections import deque
from functools import lru_cache
from typing import Any

from prometheus_client import Counter, Histogram

from polarkv_client.results import LoadResult, Stored, StoreResult
from polarkv_client.states import Tier

_KEPT = 4096  # moves between two questions of the engine, which come many times a second
_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
_THERE = frozenset({Stored.EXISTS, Stored.IN_PROGRESS})


@lru_cache(maxsize=1)
def _metrics() -> dict[str, Any]:
    """Made once a process: a storage backend can be attached again."""
    labels = ("model_name", "tp_rank")
    counters = {
        "hit_tokens": ("Prompt tokens whose KV was loaded, by the tier that it lay in.", "tier"),
        "pages": ("Pages that were to be loaded or stored, by what became of them.", "outcome"),
        "bytes": ("Payload bytes moved.", "direction"),
    }
    histograms = {
        "lookup_seconds": "How long lookups took.",
        "load_seconds": "How long loads took, one a batch of pages.",
        "store_seconds": "How long stores took, one a batch of pages.",
    }
    made: dict[str, Any] = {
        name: Counter(f"sglang:polarkv_{name}", text, [*labels, label]) for name, (text, label) in counters.items()
    }
    for name, text in histograms.items():
        made[name] = Histogram(f"sglang:polarkv_{name}", text, labels, buckets=_BUCKETS)
    return made


class Meter:
    """Counts for one rank. Safe for several threads.

    Args:
        wanted: whether the engine was started with metrics; without them nothing is kept.
    """

    def __init__(self, wanted: bool, model_name: str, tp_rank: int) -> None:
        self._wanted = wanted
        self._labels = {"model_name": model_name, "tp_rank": str(tp_rank)}
        self._lock = threading.Lock()
        self._loads: deque[tuple[int, float]] = deque(maxlen=_KEPT)
        self._stores: deque[tuple[int, float]] = deque(maxlen=_KEPT)

    def looked_up(self, skipped: int, seconds: float) -> None:
        """Note a lookup, after which so many pages that are there are computed all the same: that takes less time."""
        if self._wanted:
            _metrics()["lookup_seconds"].labels(**self._labels).observe(seconds)
            self._pages(load_skipped=skipped)

    def loaded(self, result: LoadResult, page_tokens: int, seconds: float) -> None:
        """Note a load of pages."""
        if not self._wanted:
            return
        hits = result.chunks[: result.prefix_chunks]
        for tier in (Tier.MEMORY, Tier.DISK):
            tokens = sum(chunk.tier is tier for chunk in hits) * page_tokens
            self._add("hit_tokens", tokens, tier=tier.name.lower())
        self._pages(loaded=len(hits), load_failed=len(result.chunks) - len(hits))
        self._moved(self._loads, "load", "loaded", len(hits), result.bytes_loaded, seconds)

    def stored(self, result: StoreResult, seconds: float) -> None:
        """Note a store of pages."""
        if not self._wanted:
            return
        there = sum(chunk.outcome in _THERE for chunk in result.chunks)
        failed = len(result.chunks) - result.stored - there
        self._pages(stored=result.stored, store_skipped=there, store_failed=failed)
        self._moved(self._stores, "store", "stored", result.stored, result.bytes_stored, seconds)

    def take(self) -> Any:
        """The engine's ``StorageMetrics`` since the last time; None: it wants none. Bandwidths are in GB/s."""
        if not self._wanted:
            return None
        from sglang.srt.observability.metrics_collector import StorageMetrics

        metrics = StorageMetrics()
        with self._lock:
            metrics.prefetch_pgs = [pages for pages, _ in self._loads]
            metrics.prefetch_bandwidth = [rate for _, rate in self._loads]
            metrics.backup_pgs = [pages for pages, _ in self._stores]
            metrics.backup_bandwidth = [rate for _, rate in self._stores]
            self._loads.clear()
            self._stores.clear()
        return metrics

    def _pages(self, **outcomes: int) -> None:
        for outcome, pages in outcomes.items():
            self._add("pages", pages, outcome=outcome)

    def _add(self, name: str, amount: int, **label: str) -> None:
        _metrics()[name].labels(**self._labels, **label).inc(amount)

    def _moved(
        self, moves: deque[tuple[int, float]], what: str, direction: str, pages: int, size_bytes: int, seconds: float
    ) -> None:
        self._add("bytes", size_bytes, direction=direction)
        _metrics()[f"{what}_seconds"].labels(**self._labels).observe(seconds)
        if pages:
            with self._lock:
                moves.append((pages, size_bytes / max(seconds, 1e-9) / 1e9))
