"""The client: stores and loads KV chunks. The one place where an error becomes a miss.

Design, contract and tests: docs/design/client.md.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from polarkv_client import errors
from polarkv_client.buffers import flatten_all, length_of
from polarkv_client.config import ClientConfig, load_config
from polarkv_client.engine import Engine
from polarkv_client.gate import load_gate
from polarkv_client.keys import KEY_BYTES, Namespace, chunk_keys, join_keys
from polarkv_client.loading import LENGTH_DIFFERS, Load, LoadOutcome
from polarkv_client.results import (
    ChunkLoad,
    ChunkStore,
    ClientStatus,
    LoadResult,
    Reason,
    Stored,
    StoreResult,
)
from polarkv_client.states import StoreOutcome, Tier
from polarkv_client.storing import PutOutcome, Store
from polarkv_client.transport.base import Scope

log = logging.getLogger(__name__)
Result = TypeVar("Result")

# The nearest class in the error's ancestry decides.
REASONS: dict[type[BaseException], Reason] = {
    errors.PolarKVError: Reason.INTERNAL,
    errors.ConfigurationError: Reason.CONFIGURATION,
    errors.ProtocolError: Reason.PROTOCOL,
    errors.VersionMismatch: Reason.VERSION,
    errors.GoldenMismatch: Reason.GOLDEN,
    errors.Unauthorized: Reason.UNAUTHORIZED,
    errors.Refused: Reason.REFUSED,
    errors.Unavailable: Reason.UNAVAILABLE,
    errors.BreakerOpen: Reason.BREAKER_OPEN,
    errors.DeadlineExceeded: Reason.TIMEOUT,
    errors.LeaseEnded: Reason.LATE,
    errors.Cancelled: Reason.CANCELLED,
    errors.Damaged: Reason.DAMAGED,
}
_STORED = {
    StoreOutcome.GRANTED: ChunkStore(Stored.STORED),
    StoreOutcome.EXISTS: ChunkStore(Stored.EXISTS),
    StoreOutcome.IN_PROGRESS: ChunkStore(Stored.IN_PROGRESS),
    StoreOutcome.NO_SPACE: ChunkStore(Stored.NO_SPACE),
    StoreOutcome.QUOTA_EXCEEDED: ChunkStore(Stored.QUOTA_EXCEEDED),
    StoreOutcome.OVERSIZED: ChunkStore(Stored.OVERSIZED),
}
_TIERS = tuple(Tier)
_RECOMPUTE = ChunkLoad(False, reason=Reason.RECOMPUTE)


def reason_of(error: BaseException) -> Reason:
    """The reason that a miss gives for ``error``; INTERNAL for what is not the project's own."""
    return next((REASONS[kind] for kind in type(error).__mro__ if kind in REASONS), Reason.INTERNAL)


class Operations:
    """The operations, blocking, on the calling thread; the asynchronous and the blocking client are faces of this.

    Bad arguments raise ConfigurationError. Nothing else is raised: trouble of any kind is a value.
    """

    def __init__(self, config: ClientConfig) -> None:
        self.config = config
        self.gate = load_gate(config)
        self.engine = Engine(config)

    def scope(self, deadline_ms: int | None) -> Scope:
        """The bounds of an operation that begins now."""
        if self.engine.inherited:
            raise errors.ConfigurationError("client", "inherited by fork", "connect in each process, after the fork")
        if deadline_ms is None:
            deadline_ms = self.config.deadline_ms
        elif deadline_ms < 1:
            raise errors.ConfigurationError("deadline_ms", deadline_ms, "use a positive number of milliseconds")
        return Scope(time.monotonic() + deadline_ms / 1000)

    def connect(self, scope: Scope) -> bool:
        """Attach now rather than at the first operation. Returns whether that went well; it is tried again later.

        Raises:
            VersionMismatch, GoldenMismatch, Unauthorized: no operation could ever succeed; said loudly, once, here.
        """
        try:
            self.engine.manager.connect(scope.deadline)
        except (errors.VersionMismatch, errors.GoldenMismatch, errors.Unauthorized):
            raise
        except errors.PolarKVError as error:
            log.warning("not connected yet: %s", error)
            return False
        return True

    def load(
        self, keys: Sequence[bytes], buffers: Sequence[object], scope: Scope, *, prefix: bool = False
    ) -> LoadResult:
        """See :meth:`SyncClient.load`."""
        _check_batch(keys, buffers)
        if not keys:
            return LoadResult([])
        views = flatten_all(buffers, "buffers", writable=True)
        job: Load | None = None
        error = None
        try:
            job = Load(self.engine, keys, views, scope, prefix=prefix)
            job.run()
        except Exception as caught:
            error = self._note(caught, "load")
        outcomes = job.outcomes if job is not None else [None] * len(keys)
        chunks = [_chunk_load(outcome, error) for outcome in outcomes]
        lengths = job.lengths if job is not None else []
        result = LoadResult(chunks, bytes_loaded=0)
        loaded_bytes = sum(lengths[: result.prefix_chunks])
        self._count_load(chunks, loaded_bytes)
        return LoadResult(chunks, loaded_bytes)

    def store(self, keys: Sequence[bytes], buffers: Sequence[object], scope: Scope) -> StoreResult:
        """See :meth:`SyncClient.store`."""
        _check_batch(keys, buffers)
        if not keys:
            return StoreResult([])
        views = flatten_all(buffers, "buffers", writable=False)
        job: Store | None = None
        error = None
        try:
            job = Store(self.engine, keys, views, scope)
            job.run()
        except Exception as caught:
            error = self._note(caught, "store")
        outcomes = job.outcomes if job is not None else [None] * len(keys)
        chunks = [_chunk_store(outcome, error) for outcome in outcomes]
        lengths = job.lengths if job is not None else []
        stored_bytes = sum(
            length for chunk, length in zip(chunks, lengths, strict=False) if chunk.outcome is Stored.STORED
        )
        counters = self.engine.counters
        counters.add("stores")
        counters.add("bytes_stored", stored_bytes)
        for chunk in chunks:
            counters.add(f"chunks_{chunk.outcome.name.lower()}")
        return StoreResult(chunks, stored_bytes)

    def load_kv(
        self, namespace: Namespace, tokens: Sequence[int], buffers: Sequence[object], scope: Scope,
        extras: Mapping[int, bytes] | None = None,
    ) -> LoadResult:  # fmt: skip
        """See :meth:`SyncClient.load_kv`."""
        keys = _keys_of(namespace, tokens, buffers, extras)
        if self.gate is None or not keys:
            result = self.load(keys, buffers, scope, prefix=True)
            return LoadResult(result.chunks, result.bytes_loaded, namespace.chunk_tokens)
        lengths = [length_of(views) for views in flatten_all(buffers, "buffers", writable=True)]
        if not self.gate.admit(lengths, namespace.chunk_tokens, lambda: self.match_prefix(keys, scope)):
            chunks = [_RECOMPUTE] * len(keys)
            self.engine.counters.add("loads_skipped")
            self._count_load(chunks, 0)
            return LoadResult(chunks, chunk_tokens=namespace.chunk_tokens)
        began = time.monotonic()
        result = self.load(keys, buffers, scope, prefix=True)
        self.gate.loaded([chunk.tier for chunk in result.chunks], lengths, time.monotonic() - began)
        return LoadResult(result.chunks, result.bytes_loaded, namespace.chunk_tokens)

    def store_kv(
        self, namespace: Namespace, tokens: Sequence[int], buffers: Sequence[object], scope: Scope,
        extras: Mapping[int, bytes] | None = None,
    ) -> StoreResult:  # fmt: skip
        """See :meth:`SyncClient.store_kv`."""
        return self.store(_keys_of(namespace, tokens, buffers, extras), buffers, scope)

    def exists(self, keys: Sequence[bytes], scope: Scope) -> list[Tier]:
        """See :meth:`SyncClient.exists`."""
        _check_keys(keys)
        tiers: list[Tier] = []
        try:
            for batch in self._batches(keys):
                tiers += self._exists(batch, scope)
        except Exception as caught:
            self._note(caught, "exists")
        return tiers + [Tier.NONE] * (len(keys) - len(tiers))

    def _exists(self, keys: Sequence[bytes], scope: Scope) -> list[Tier]:
        manager = self.engine.manager
        routes = manager.route(keys)
        if len(routes) == 1:
            return _tiers(manager.exists(routes[0][0], join_keys(keys), scope.deadline))
        tiers = [Tier.NONE] * len(keys)
        for channel, places in routes:
            found = manager.exists(channel, join_keys([keys[place] for place in places]), scope.deadline)
            for place, tier in zip(places, found, strict=True):
                tiers[place] = _TIERS[tier]
        return tiers

    def match_prefix(self, keys: Sequence[bytes], scope: Scope) -> list[Tier]:
        """See :meth:`SyncClient.match_prefix`."""
        _check_keys(keys)
        tiers: list[Tier] = []
        try:
            for batch in self._batches(keys):
                found = self._match_prefix(batch, scope)
                tiers += found
                if len(found) < len(batch):
                    break
        except Exception as caught:
            self._note(caught, "match_prefix")
        return tiers

    def _match_prefix(self, keys: Sequence[bytes], scope: Scope) -> list[Tier]:
        manager = self.engine.manager
        routes = manager.route(keys)
        if len(routes) == 1:
            return _tiers(manager.match_prefix(routes[0][0], join_keys(keys), scope.deadline))
        tiers = self._exists(keys, scope)  # no shard sees the whole prefix
        return tiers[: next((place for place, tier in enumerate(tiers) if not tier), len(tiers))]

    def prefetch(self, keys: Sequence[bytes], scope: Scope) -> bool:
        """See :meth:`SyncClient.prefetch`."""
        _check_keys(keys)
        manager = self.engine.manager
        try:
            for batch in self._batches(keys):
                for channel, places in manager.route(batch):
                    manager.prefetch(channel, join_keys([batch[place] for place in places]), scope.deadline)
        except Exception as caught:
            self._note(caught, "prefetch")
            return False
        return True

    def _batches(self, keys: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
        """What one message may name."""
        for start in range(0, len(keys), self.config.batch_keys):
            yield keys[start : start + self.config.batch_keys]

    def status(self) -> ClientStatus:
        """See :meth:`SyncClient.status`."""
        manager = self.engine.manager
        attached = manager.attached
        return ClientStatus(
            endpoint=self.config.endpoint,
            connected=manager.home.connected,
            breaker=manager.home.breaker.state.value,
            why=manager.home.breaker.why,
            epoch=attached.epoch if attached else 0,
            tenant=attached.tenant if attached else "",
            nodes=self.engine.transports.status(),
            counters=self.engine.counters.totals(),
            rates=self.gate.rates if self.gate is not None else None,
        )

    def close(self) -> None:
        """Give everything back."""
        self.engine.close()

    def _note(self, error: Exception, operation: str) -> Exception:
        """Count what is about to become misses."""
        reason = reason_of(error)
        self.engine.counters.add(f"errors_{reason.name.lower()}")
        if reason is Reason.INTERNAL:
            log.error("%s: a defect became misses", operation, exc_info=error)
        else:
            log.debug("%s: %s", operation, error)
        return error

    def _count_load(self, chunks: list[ChunkLoad], loaded_bytes: int) -> None:
        counters = self.engine.counters
        counters.add("loads")
        counters.add("bytes_loaded", loaded_bytes)
        by_name: dict[str, int] = {}
        for chunk in chunks:
            name = f"hits_{chunk.tier.name.lower()}" if chunk.hit else f"misses_{chunk.reason.name.lower()}"
            by_name[name] = by_name.get(name, 0) + 1
        for name, count in by_name.items():
            counters.add(name, count)


def _chunk_load(outcome: LoadOutcome, error: Exception | None) -> ChunkLoad:
    if isinstance(outcome, Tier):
        return _HITS[outcome]
    if outcome == LENGTH_DIFFERS:
        return ChunkLoad(False, reason=Reason.LENGTH)
    cause = outcome if isinstance(outcome, errors.PolarKVError) else error
    if cause is None:
        return ChunkLoad(False, reason=Reason.NOT_REACHED)
    return ChunkLoad(False, reason=reason_of(cause), detail=str(cause))


_HITS = {
    Tier.NONE: ChunkLoad(False, reason=Reason.ABSENT),
    Tier.MEMORY: ChunkLoad(True, Tier.MEMORY),
    Tier.DISK: ChunkLoad(True, Tier.DISK),
}


def _chunk_store(outcome: PutOutcome, error: Exception | None) -> ChunkStore:
    if isinstance(outcome, StoreOutcome):
        return _STORED[outcome]
    cause = outcome if outcome is not None else error
    if cause is None:
        return ChunkStore(Stored.FAILED, Reason.NOT_REACHED)
    return ChunkStore(Stored.FAILED, reason_of(cause), str(cause))


def _keys_of(
    namespace: Namespace, tokens: Sequence[int], buffers: Sequence[object], extras: Mapping[int, bytes] | None
) -> list[bytes]:
    keys = chunk_keys(namespace, tokens, extras)
    if len(buffers) != len(keys):
        raise errors.ConfigurationError(
            "buffers",
            f"{len(buffers)} buffers",
            f"pass one for each of the {len(keys)} whole chunks of {namespace.chunk_tokens} tokens",
        )
    return keys


def _tiers(outcomes: bytes) -> list[Tier]:
    if outcomes and outcomes.count(outcomes[0]) == len(outcomes):  # often all are alike; this is fifty times faster
        return [_TIERS[outcomes[0]]] * len(outcomes)
    return [_TIERS[outcome] for outcome in outcomes]


def _check_keys(keys: Sequence[bytes]) -> None:
    if list(map(len, keys)).count(KEY_BYTES) != len(keys):
        place, key = next((place, key) for place, key in enumerate(keys) if len(key) != KEY_BYTES)
        raise errors.ConfigurationError(f"keys[{place}]", f"{len(key)} bytes", f"a key has {KEY_BYTES} bytes")


def _check_batch(keys: Sequence[bytes], buffers: Sequence[object]) -> None:
    _check_keys(keys)
    if len(keys) != len(buffers):
        raise errors.ConfigurationError(
            "buffers", f"{len(buffers)} buffers", f"pass one for each of the {len(keys)} keys"
        )


class Client:
    """The asynchronous face. Operations run on a bounded pool of threads: the event loop never copies or waits.

    Arguments and results are those of :class:`polarkv_client.sync.SyncClient`. Cancelling an operation stops it
    between two pieces; the ``await`` ends when no thread touches the buffers any more, at the latest a piece's copy
    after the cancellation (plus :data:`transport.base.POLL_S` over TCP should the socket not wake), and then raises
    ``CancelledError``.
    """

    def __init__(self, config: ClientConfig) -> None:
        self._operations = Operations(config)
        self._pool = ThreadPoolExecutor(config.operations, thread_name_prefix="polarkv-operation")
        self._most = config.operations + config.queued_operations
        self._pending = 0
        self._lock = threading.Lock()

    @classmethod
    async def connect(
        cls, connection: ClientConfig | str | os.PathLike[str] | None = None, **settings: object
    ) -> Client:
        """As :meth:`SyncClient.connect`."""
        client = cls(as_config(connection, settings))
        scope = client._operations.scope(None)
        try:
            await client._run(scope, False, lambda: client._operations.connect(scope))
        except BaseException:
            await client.close()
            raise
        return client

    async def load(
        self, keys: Sequence[bytes], buffers: Sequence[object], *, deadline_ms: int | None = None
    ) -> LoadResult:
        """As :meth:`SyncClient.load`."""
        scope = self._operations.scope(deadline_ms)
        _check_batch(keys, buffers)
        missed = LoadResult([ChunkLoad(False, reason=Reason.OVERLOADED)] * len(keys))
        return await self._run(scope, missed, lambda: self._operations.load(keys, buffers, scope))

    async def store(
        self, keys: Sequence[bytes], buffers: Sequence[object], *, deadline_ms: int | None = None
    ) -> StoreResult:
        """As :meth:`SyncClient.store`."""
        scope = self._operations.scope(deadline_ms)
        _check_batch(keys, buffers)
        failed = StoreResult([ChunkStore(Stored.FAILED, Reason.OVERLOADED)] * len(keys))
        return await self._run(scope, failed, lambda: self._operations.store(keys, buffers, scope))

    async def load_kv(
        self, namespace: Namespace, tokens: Sequence[int], buffers: Sequence[object], *,
        extras: Mapping[int, bytes] | None = None, deadline_ms: int | None = None,
    ) -> LoadResult:  # fmt: skip
        """As :meth:`SyncClient.load_kv`."""
        scope = self._operations.scope(deadline_ms)
        missed = LoadResult([ChunkLoad(False, reason=Reason.OVERLOADED)] * len(buffers))
        return await self._run(
            scope, missed, lambda: self._operations.load_kv(namespace, tokens, buffers, scope, extras)
        )

    async def store_kv(
        self, namespace: Namespace, tokens: Sequence[int], buffers: Sequence[object], *,
        extras: Mapping[int, bytes] | None = None, deadline_ms: int | None = None,
    ) -> StoreResult:  # fmt: skip
        """As :meth:`SyncClient.store_kv`."""
        scope = self._operations.scope(deadline_ms)
        failed = StoreResult([ChunkStore(Stored.FAILED, Reason.OVERLOADED)] * len(buffers))
        return await self._run(
            scope, failed, lambda: self._operations.store_kv(namespace, tokens, buffers, scope, extras)
        )

    async def exists(self, keys: Sequence[bytes], *, deadline_ms: int | None = None) -> list[Tier]:
        """As :meth:`SyncClient.exists`."""
        scope = self._operations.scope(deadline_ms)
        return await self._run(scope, [Tier.NONE] * len(keys), lambda: self._operations.exists(keys, scope))

    async def match_prefix(self, keys: Sequence[bytes], *, deadline_ms: int | None = None) -> list[Tier]:
        """As :meth:`SyncClient.match_prefix`."""
        scope = self._operations.scope(deadline_ms)
        return await self._run(scope, [], lambda: self._operations.match_prefix(keys, scope))

    async def prefetch(self, keys: Sequence[bytes], *, deadline_ms: int | None = None) -> bool:
        """As :meth:`SyncClient.prefetch`."""
        scope = self._operations.scope(deadline_ms)
        return await self._run(scope, False, lambda: self._operations.prefetch(keys, scope))

    def status(self) -> ClientStatus:
        """As :meth:`SyncClient.status`."""
        return self._operations.status()

    async def close(self) -> None:
        """Give everything back; running operations end as misses."""
        await asyncio.get_running_loop().run_in_executor(None, self._operations.close)
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _run(self, scope: Scope, instead: Result, operation: Callable[[], Result]) -> Result:
        """``operation`` on the pool; ``instead`` when it gets no turn before its deadline."""
        with self._lock:
            if self._pending >= self._most:
                self._operations.engine.counters.add("errors_overloaded")
                return instead
            self._pending += 1
        try:
            future = self._pool.submit(operation)
        except RuntimeError:  # closed
            self._ended(None)
            return instead
        future.add_done_callback(self._ended)
        waiter = asyncio.wrap_future(future)
        try:
            await asyncio.wait({waiter}, timeout=max(scope.deadline - time.monotonic(), 0))
            if not waiter.done() and future.cancel():  # still in the queue
                self._operations.engine.counters.add("errors_overloaded")
                return instead
            return await asyncio.shield(waiter)
        except asyncio.CancelledError:
            scope.cancel()
            if not future.cancel():
                await _finished(waiter)
            raise

    def _ended(self, _: Future[Result] | None) -> None:
        with self._lock:
            self._pending -= 1


async def _finished(waiter: asyncio.Future[Result]) -> None:
    """Wait for it, however often that is cancelled: no buffer is handed back while a thread writes to it."""
    while not waiter.done():
        try:
            await asyncio.wait({waiter})
        except asyncio.CancelledError:
            continue
    if not waiter.cancelled():
        waiter.exception()  # seen


def as_config(connection: ClientConfig | str | os.PathLike[str] | None, settings: dict[str, object]) -> ClientConfig:
    """What ``connect`` was given, as settings. Raises ConfigurationError."""
    if not isinstance(connection, ClientConfig):
        return load_config(connection, environment=None, **settings)
    if settings:
        raise errors.ConfigurationError(next(iter(settings)), "…", "pass a ClientConfig or single settings, not both")
    return connection
