"""`polarkv replay`: drive the cluster with the prefixes of a trace, with real bytes, every one of which is checked.

Each request looks up its blocks, loads the prefix that is there, compares it with what the keys say it must be, and
stores the rest, as an inference engine does. The payload of a block is derived from its key, so nothing needs to be
remembered.
"""

from __future__ import annotations

import random
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import click

from polarkv_client.cli.common import Finite, Session, console, session_options
from polarkv_client.cli.common import table as make_table
from polarkv_client.cli.trace import CONVERSATION_REQUESTS, Request, generate_trace, read_trace
from polarkv_client.errors import ConfigurationError
from polarkv_client.keys import KEY_BYTES, Namespace, chunk_keys
from polarkv_client.results import LoadResult, Stored, StoreResult
from polarkv_client.states import Tier

if TYPE_CHECKING:
    from rich.console import Console

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


@click.command("replay", short_help="Drive the cluster with a trace; check every byte.")
@click.argument("trace", type=click.Path(path_type=Path), required=False)
@click.option("--generate", "seed", type=int, metavar="SEED", help="Make a trace like the public one instead.")
@click.option("--limit", type=click.IntRange(1), metavar="N", help="Replay the first N requests only.")
@click.option("--duration", type=Finite(0), metavar="SECONDS", help="Start no request after that time.")
@click.option("--block-bytes", default=DEFAULT_BLOCK_BYTES, show_default=True, help="Payload of a block.")
@click.option("--concurrency", default=4, show_default=True, help="Requests at once.")
@click.option("--namespace", default="", help="Name of the replay's key space, to go on with it; else a fresh one.")
@click.option("--progress/--no-progress", default=None, help="Show a progress bar (default: on a terminal).")
@session_options
def command(
    session: Session, trace: Path | None, seed: int | None, limit: int | None, duration: float | None, block_bytes: int,
    concurrency: int, namespace: str, progress: bool | None,
) -> None:  # fmt: skip
    """Drive the cluster with the prefixes of TRACE and check every byte that comes back.

    TRACE has one request a line: {"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [...]}.
    Exits with 1 when a block came back with wrong bytes.
    """
    requests, total = _requests(trace, seed, limit)
    salt = namespace or secrets.token_hex(8)
    with session.client() as client, _progress(progress, total, duration) as on_request:
        replay = Replay(
            client,
            namespace=Namespace(model_id="replay", chunk_tokens=1, tenant_salt=salt),
            block_bytes=block_bytes,
            concurrency=concurrency,
            duration_s=duration,
            on_request=on_request,
        )
        report = replay.run(requests)
    session.show(report.as_json(), lambda out: _print(out, report))
    if report.corrupted:
        raise click.exceptions.Exit(1)


def _requests(trace: Path | None, seed: int | None, limit: int | None) -> tuple[Iterator[Request], int]:
    """The requests to replay and how many they are."""
    if (trace is None) == (seed is None):
        raise click.UsageError("name a TRACE file, or pass --generate SEED for a made one (not both)")
    if trace is None:
        assert seed is not None
        total = limit or CONVERSATION_REQUESTS
        return generate_trace(seed, total), total
    # Read it whole once: a bad line is found before anything is stored, and the bar knows its end.
    total = sum(1 for _ in islice(read_trace(trace), limit))
    if not total:
        raise ConfigurationError("trace", str(trace), "has no request in it")
    return islice(read_trace(trace), limit), total


@contextmanager
def _progress(shown: bool | None, total: int, duration: float | None) -> Iterator[Callable[[ReplayReport], None]]:
    """A progress bar on standard error; yields what is to be told of each request that ended."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    out = console(stderr=True)
    columns = (
        TextColumn("replaying"), BarColumn(), MofNCompleteColumn(), TextColumn("requests"),
        TextColumn("[cyan]{task.fields[hits]}"), TimeElapsedColumn(),
    )  # fmt: skip
    bar = Progress(*columns, console=out, disable=not (out.is_terminal if shown is None else shown))
    began = time.monotonic()
    with bar:
        task = bar.add_task("replay", total=total, hits="")

        def on_request(report: ReplayReport) -> None:
            done = report.requests
            if duration:  # the nearer of the two ends is the bar's
                share = max((time.monotonic() - began) / duration, done / total)
                bar.update(task, total=max(done, round(done / share)) if share else total)
            memory, disk = report.percent(report.memory_hits), report.percent(report.disk_hits)
            bar.update(task, completed=done, hits=f"{memory:.1f} % from memory, {disk:.1f} % from disk")

        yield on_request


def _print(out: Console, report: ReplayReport) -> None:
    title = f"Replay of {report.requests:,} requests in {report.seconds:.1f} s"
    table = make_table("blocks", "share", "what", title=title, right=("blocks", "share"))
    rows = (
        (report.blocks, "named by the requests"),
        (report.repeated, "named before: what a cache without limit would hit"),
        (report.hits, f"hits, {report.bytes_loaded / 1e9:.2f} GB loaded and checked"),
        (report.memory_hits, "  from memory"),
        (report.disk_hits, "  from disk"),
        (report.corrupted, "[red]WRONG BYTES[/]" if report.corrupted else "wrong bytes"),
        (report.lost, "gone between look-up and load" + _counts(report.lost_reasons)),
        (report.stored, f"stored, {report.bytes_stored / 1e9:.2f} GB"),
    )
    for blocks, what in rows:
        table.add_row(f"{blocks:,}", f"{report.percent(blocks):.1f} %", what)
    for outcome, blocks in sorted(report.store_outcomes.items()):
        if outcome != Stored.STORED:
            table.add_row(f"{blocks:,}", f"{report.percent(blocks):.1f} %", f"not stored: {outcome}")
    out.print(table)
    out.print(f"loads: median {report.load_p50_ms:.1f} ms, 99th percentile {report.load_p99_ms:.1f} ms")


def _counts(reasons: dict[str, int]) -> str:
    return f" ({', '.join(f'{count:,} {reason}' for reason, count in sorted(reasons.items()))})" if reasons else ""
