"""The connector in vLLM's own metrics: its log line of transfers, and Prometheus."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prometheus_client import Counter, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from polarkv_client.connectors.vllm.meter import SECONDS, merge

# Metric, what it says, label, and by name in the counts the label's value.
COUNTERS: tuple[tuple[str, str, str, dict[str, str]], ...] = (
    (
        "vllm:polarkv_hit_tokens", "Prompt tokens whose KV was to be loaded, by the tier that it lay in.", "tier",
        {"hit_tokens_memory": "memory", "hit_tokens_disk": "disk"},
    ),
    (
        "vllm:polarkv_load_chunks", "Chunks of loads, by tier or failed (computed by the engine instead).", "outcome",
        {"chunks_loaded_memory": "memory", "chunks_loaded_disk": "disk", "chunks_load_failed": "failed"},
    ),
    (
        "vllm:polarkv_store_chunks", "Chunks to be stored; skipped ones were there already, or found no room or turn.",
        "outcome",
        {"chunks_stored": "stored", "chunks_store_skipped": "skipped", "chunks_store_failed": "failed"},
    ),
    (
        "vllm:polarkv_bytes", "Payload bytes moved.", "direction",
        {"bytes_loaded": "loaded", "bytes_stored": "stored"},
    ),
    (
        "vllm:polarkv_lookups_missed",
        "Lookups that became misses: no answer in time, too many at once, or computing is faster.",
        "why",
        {"lookups_late": "late", "lookups_skipped": "overloaded", "loads_skipped": "recompute"},
    ),
    ("vllm:polarkv_defects", "Errors of the connector's own, which became misses; see the log.", "", {"defects": ""}),
)  # fmt: skip
HISTOGRAMS = {
    "lookup_seconds": ("vllm:polarkv_lookup_seconds", "How long lookups took."),
    "load_seconds": ("vllm:polarkv_load_seconds", "How long loads took, one a request and worker."),
    "store_seconds": ("vllm:polarkv_store_seconds", "How long stores took."),
}
_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


class PolarKVStats(KVConnectorStats):  # type: ignore[misc]
    """What was counted in an interval, of all workers and the scheduler."""

    data: dict[str, Any]

    def reset(self) -> None:
        """Begin anew."""
        self.data = {}

    def aggregate(self, other: PolarKVStats) -> PolarKVStats:
        """Add another's."""
        merge(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """For the log: sums, and of measurements their number and mean."""
        reduced: dict[str, int | float] = {}
        for name, value in sorted(self.data.items()):
            if not isinstance(value, list):
                reduced[name] = round(value, 6)
            elif value:
                reduced[f"{name.removesuffix(SECONDS)}s"] = len(value)
                reduced[f"mean_{name}"] = round(sum(value) / len(value), 6)
        return reduced

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data


class PolarKVPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """The same for Prometheus."""

    def __init__(
        self, vllm_config: Any, metric_types: Any, labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:  # fmt: skip
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._children: dict[tuple[int, str], Any] = {}
        for name, text, label, values in COUNTERS:
            extra = [label] if label else []
            metric = metric_types[Counter](name=name, documentation=text, labelnames=labelnames + extra)
            for engine, own in per_engine_labelvalues.items():
                for source, value in values.items():
                    # Made now, so that a rate is zero and not missing until something happens.
                    self._children[engine, source] = metric.labels(*own, *([value] if label else []))
        for source, (name, text) in HISTOGRAMS.items():
            metric = metric_types[Histogram](name=name, documentation=text, labelnames=labelnames, buckets=_BUCKETS)
            for engine, own in per_engine_labelvalues.items():
                self._children[engine, source] = metric.labels(*own)

    def observe(self, transfer_stats_data: Mapping[str, Any], engine_idx: int = 0) -> None:
        """Add what an interval brought."""
        for name, value in transfer_stats_data.items():
            child = self._children.get((engine_idx, name))
            if child is None:
                continue
            if isinstance(value, list):
                for sample in value:
                    child.observe(sample)
            else:
                child.inc(value)
