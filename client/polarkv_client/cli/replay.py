"""`polarkv replay`: drive the cluster with the prefixes of a trace, with real bytes, every one of which is checked.

Each request looks up its blocks, loads the prefix that is there, compares it with what the keys say it must be, and
stores the rest, as an inference engine does. The payload of a block is derived from its key, so nothing needs to be
remembered.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, Protocol

from polarkv_client.cli.trace import Request
from polarkv_client.errors import ConfigurationError
from polarkv_client.keys import KEY_BYTES, Namespace, chunk_keys
from polarkv_client.results import LoadResult, StoreResult
from polarkv_client.states import Tier

DEFAULT_BLOCK_BYTES = 4032  # with its header a block fills one slot of 4 KiB
_POOL_BYTES = 1 << 20
_LATENCIES_KEPT = 100_000


class CacheClient(Protocol):
    """The part of the client that a replay needs; every call may come from several threads."""

    def match_prefix(self, keys: Sequence[bytes]) -> Sequence[Tier]:
        """Tiers of the longest prefix of ``keys`` that is there."""

    def load(self, keys: Sequence[bytes], buffers: Sequence[Any]) -> LoadResult:
        """Fill ``buffers`` with what is stored under ``keys``."""

    def store(self, keys: Sequence[bytes], buffers: Sequence[Any]) -> StoreResult:
        """Store ``buffers`` under ``keys``."""


@dataclass
class ReplayReport:
    """What a replay saw. Blocks are counted once for each time a request named them."""

    block_bytes: int
    requests: int = 0
    blocks: int = 0
    memory_hits: int = 0
    disk_hits: int = 0
    corrupted: int = 0
    lost: int = 0  # there when looked up, a miss when loaded
    lost_reasons: dict[str, int] = field(default_factory=dict)
    stored: int = 0
    store_outcomes: dict[str, int] = field(default_factory=dict)
    bytes_loaded: int = 0
    bytes_stored: int = 0
    seconds: float = 0.0
    load_p50_ms: float = 0.0
    load_p99_ms: float = 0.0
    repeated: int = 0  # named before by an earlier request: what a cache without limit would hit
    whole_trace: bool = True

    @property
    def hits(self) -> int:
        """Blocks loaded, from either tier."""
        return self.memory_hits + self.disk_hits

    def percent(self, blocks: int) -> float:
        """``blocks`` as a part of all block references, in percent."""
        return 100 * blocks / self.blocks if self.blocks else 0.0

    def as_json(self) -> dict[str, Any]:
        """Every figure, with the rates that follow from them."""
        rates = {
            "hit_percent": round(self.percent(self.hits), 3),
            "memory_hit_percent": round(self.percent(self.memory_hits), 3),
            "disk_hit_percent": round(self.percent(self.disk_hits), 3),
            "repeated_percent": round(self.percent(self.repeated), 3),
        }
        return {**vars(self), "hits": self.hits, **rates}


class Payloads:
    """Bytes of a block, from its key: the key itself, then a run of a fixed random pool that starts where the key says.

    Both parts are views, so that making and checking a payload costs one pass over it.
    """

    def __init__(self, block_bytes: int) -> None:
        if block_bytes <= KEY_BYTES:
            raise ConfigurationError("block_bytes", block_bytes, f"use more than {KEY_BYTES}: a block holds its key")
        self.block_bytes = block_bytes
        self._run_bytes = block_bytes - KEY_BYTES
        self._pool = memoryview(random.Random(0).randbytes(_POOL_BYTES + self._run_bytes))

    def parts(self, key: bytes) -> list[memoryview]:
        """The payload of ``key`` as a scatter list."""
        start = int.from_bytes(key[:8], "little") % _POOL_BYTES
        return [memoryview(key), self._pool[start : start + self._run_bytes]]

    def matches(self, key: bytes, found: bytearray) -> bool:
        """Whether ``found`` is the payload of ``key``, to the last byte."""
        return found == b"".join(self.parts(key))


class Replay:
    """One replay of a trace. ``on_request`` is told of each request that has ended."""

    def __init__(
        self,
        client: CacheClient,
        *,
        namespace: Namespace,
        block_bytes: int = DEFAULT_BLOCK_BYTES,
        concurrency: int = 1,
        duration_s: float | None = None,
        on_request: Callable[[ReplayReport], None] = lambda _: None,
    ) -> None:
        if namespace.chunk_tokens != 1:
            raise ConfigurationError("namespace.chunk_tokens", namespace.chunk_tokens, "use 1: a token is a block here")
        if not 1 <= concurrency <= 256:
            raise ConfigurationError("concurrency", concurrency, "run from 1 to 256 requests at once")
        self._client = client
        self._namespace = namespace
        self._payloads = Payloads(block_bytes)
        self._concurrency = concurrency
        self._duration_s = duration_s
        self._on_request = on_request
        self._report = ReplayReport(block_bytes)
        self._outcomes: Counter[str] = Counter()
        self._reasons: Counter[str] = Counter()
        self._latencies_ms: list[float] = []
        self._lock = threading.Lock()
        self._scratch = threading.local()

    def run(self, trace: Iterable[Request]) -> ReplayReport:
        """Replay the requests in their order, as fast as they go, at most ``concurrency`` at once.

        Raises:
            ConfigurationError: the trace has a line that is no request.
        """
        began = time.monotonic()
        running: set[Future[None]] = set()
        named: set[int] = set()
        with ThreadPoolExecutor(self._concurrency, thread_name_prefix="replay") as threads:
            for request in trace:
                if self._duration_s is not None and time.monotonic() - began >= self._duration_s:
                    self._report.whole_trace = False
                    break
                self._report.repeated += sum(block in named for block in request.hash_ids)
                named.update(request.hash_ids)
                running.add(threads.submit(self._serve, request))
                if len(running) >= self._concurrency:
                    running = self._collect(running)
            while running:
                running = self._collect(running)
        report = self._report
        report.seconds = time.monotonic() - began
        report.store_outcomes, report.lost_reasons = dict(self._outcomes), dict(self._reasons)
        if self._latencies_ms:
            ordered = sorted(self._latencies_ms)
            report.load_p50_ms, report.load_p99_ms = ordered[len(ordered) // 2], ordered[len(ordered) * 99 // 100]
        return report

    def _collect(self, running: set[Future[None]]) -> set[Future[None]]:
        done, running = wait(running, return_when=FIRST_COMPLETED)
        for future in done:
            future.result()
            self._on_request(self._report)
        return running

    def _serve(self, request: Request) -> None:
        keys = chunk_keys(self._namespace, request.hash_ids)
        matched = len(self._client.match_prefix(keys)) if keys else 0
        found = self._load(keys[:matched]) if matched else 0
        rest = keys[found:]
        stored = self._client.store(rest, [self._payloads.parts(key) for key in rest]) if rest else None
        with self._lock:
            self._report.requests += 1
            self._report.blocks += len(keys)
            if stored is not None:
                self._report.stored += stored.stored
                self._report.bytes_stored += stored.bytes_stored
                self._outcomes.update(str(chunk.outcome) for chunk in stored.chunks)

    def _load(self, keys: list[bytes]) -> int:
        """Load and check the blocks of a prefix; returns how many of them came."""
        buffers = self._buffers(len(keys))
        began = time.monotonic()
        result = self._client.load(keys, buffers)
        took_ms = (time.monotonic() - began) * 1000
        hits = result.prefix_chunks
        corrupted = sum(not self._payloads.matches(*pair) for pair in zip(keys[:hits], buffers[:hits], strict=True))
        tiers = Counter(chunk.tier for chunk in result.chunks[:hits])
        with self._lock:
            report = self._report
            report.memory_hits += tiers[Tier.MEMORY]
            report.disk_hits += tiers[Tier.DISK]
            report.corrupted += corrupted
            report.lost += len(keys) - hits
            report.bytes_loaded += hits * report.block_bytes
            self._reasons.update(str(chunk.reason) for chunk in result.chunks[hits:])
            if len(self._latencies_ms) < _LATENCIES_KEPT:
                self._latencies_ms.append(took_ms)
        return hits

    def _buffers(self, count: int) -> list[bytearray]:
        """Buffers of this thread, reused from request to request and zeroed, lest an earlier block pass for a load."""
        held: list[bytearray] = self._scratch.__dict__.setdefault("buffers", [])
        zeros = bytes(self._payloads.block_bytes)
        for buffer in held[:count]:
            buffer[:] = zeros
        while len(held) < count:
            held.append(bytearray(zeros))
        return held[:count]
