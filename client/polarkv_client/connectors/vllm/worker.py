"""The workers' half of the vLLM connector: loads into blocks and stores from them, on threads of its own.

A block that could not be loaded is reported, and the engine computes it. A store that cannot be made is dropped: it
is a later miss. Nothing here is waited for by a step, except a synchronous load, and stores of requests that were
preempted.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

from polarkv_client.client import Operations
from polarkv_client.connectors.guard import complaints
from polarkv_client.connectors.settings import ConnectorConfig
from polarkv_client.connectors.vllm.copies import Copies
from polarkv_client.connectors.vllm.plan import SCRATCH, StepPlan, Transfer
from polarkv_client.results import Stored
from polarkv_client.states import Tier
from polarkv_client.transport.base import Scope

log = logging.getLogger(__name__)
_LOAD_THREADS = 4
_STORE_THREADS = 2
Note = Callable[[str, float], None]


@dataclass
class _Work:
    """What is under way for one request."""

    scopes: set[Scope] = field(default_factory=set)
    stores: set[Future[None]] = field(default_factory=set)


class WorkerSide:
    """One worker's transfers.

    Args:
        rank: which of the keys in a plan are this worker's.
        writes: whether it stores; of ranks that hold the same bytes only one does.
        chunk_bytes: length of a chunk.
        note: counts something.
    """

    def __init__(
        self, config: ConnectorConfig, operations: Operations, copies: Copies, rank: int, writes: bool,
        blocks_per_chunk: int, chunk_bytes: int, note: Note,
    ) -> None:  # fmt: skip
        self._config = config
        self._operations = operations
        self._copies = copies
        self._rank = rank
        self._writes = writes
        self._per_chunk = blocks_per_chunk
        self._chunk_bytes = chunk_bytes
        self._note = note
        self._loaders = ThreadPoolExecutor(_LOAD_THREADS, thread_name_prefix="polarkv-load")
        self._storers = ThreadPoolExecutor(_STORE_THREADS, thread_name_prefix="polarkv-store")
        self._lock = threading.Lock()
        self._work: dict[str, _Work] = {}
        self._queued_bytes = 0
        self._received: set[str] = set()
        self._invalid: set[int] = set()
        self._held: set[str] = set()  # requests that ended; the engine waits until they are stored

    def preempt(self, names: frozenset[str]) -> None:
        """End what reads the blocks of these requests, before the engine gives them to others."""
        for name in names:
            with self._lock:
                work = self._work.get(name)
                scopes, stores = (set(work.scopes), set(work.stores)) if work else (set(), set())
            for scope in scopes:
                scope.cancel()
            # A transfer that has been cancelled ends within a tenth of a second and a piece's copy (client.md).
            wait([store for store in stores if not store.cancel()])

    def store(self, plan: StepPlan) -> None:
        """Begin to store what the scheduler has seen computed."""
        with self._lock:
            self._held |= plan.finished
        for transfer in plan.stores:
            if self._writes:
                self._submit_store(transfer)

    def load(self, plan: StepPlan, synchronous: bool) -> None:
        """Begin the loads of a step; synchronous ones have ended when this returns."""
        loads = [self._submit_load(transfer, synchronous) for transfer in plan.loads]
        if synchronous and loads:
            wait(loads)

    def ended(self) -> tuple[set[str], set[str]]:
        """Requests of which all is stored since they ended, and requests whose load has ended."""
        with self._lock:
            stored = {name for name in self._held if name not in self._work}
            self._held -= stored
            received, self._received = self._received, set()
            return stored, received

    def invalid_blocks(self) -> set[int]:
        """Blocks that could not be loaded, since the last call."""
        with self._lock:
            invalid, self._invalid = self._invalid, set()
            return invalid

    def close(self) -> None:
        """End everything that is under way."""
        with self._lock:
            scopes = [scope for work in self._work.values() for scope in work.scopes]
        for scope in scopes:
            scope.cancel()
        self._loaders.shutdown(wait=False, cancel_futures=True)
        self._storers.shutdown(wait=False, cancel_futures=True)

    def _submit_load(self, transfer: Transfer, synchronous: bool) -> Future[None]:
        scope = self._operations.scope(transfer.wait_ms or self._config.load_deadline_ms)  # also while it is queued
        try:
            return self._loaders.submit(self._load, transfer, scope, synchronous)
        except RuntimeError:  # closed: the engine is told all the same
            self._fail(transfer, 0)
            self._arrive(transfer, synchronous)
            done: Future[None] = Future()
            done.set_result(None)
            return done

    def _load(self, transfer: Transfer, scope: Scope, synchronous: bool) -> None:
        whole = 0
        began = time.perf_counter()
        try:
            whole = self._load_chunks(transfer, scope)
        except Exception as error:
            complaints.note("load", error)
        finally:
            if whole < transfer.chunks or not transfer.chunks:
                self._note("chunks_load_failed", max(transfer.chunks - whole, 1))
                self._fail(transfer, whole)
            self._note("load_seconds", time.perf_counter() - began)
            self._note("bytes_loaded", whole * self._chunk_bytes)
            self._arrive(transfer, synchronous)

    def _load_chunks(self, transfer: Transfer, scope: Scope) -> int:
        """How many chunks from the first on were loaded."""
        keys = transfer.rank_keys(self._rank) if transfer.chunks else []
        step = self._copies.batch(len(keys))
        whole = 0
        while whole < len(keys):
            some = keys[whole : whole + step]
            with self._copies.writing(self._blocks(transfer, whole, len(some)), scope.deadline) as arrivals:
                result = self._operations.load(some, arrivals.views, scope, prefix=True)
                count = result.prefix_chunks
                arrivals.arrived(count)
            for tier in (Tier.MEMORY, Tier.DISK):
                if found := sum(chunk.tier is tier for chunk in result.chunks[:count]):
                    self._note(f"chunks_loaded_{tier.name.lower()}", found)
            whole += count
            if count < len(some):
                lost = result.chunks[count]
                if complaints.due(f"load {lost.reason}"):
                    missing = len(keys) - whole
                    log.warning("%d chunks of %d are computed: %s %s", missing, len(keys), lost.reason, lost.detail)
                break
        return whole

    def _fail(self, transfer: Transfer, whole: int) -> None:
        lost = transfer.blocks[whole * self._per_chunk :]
        with self._lock:
            self._invalid.update(block for block in lost if block != SCRATCH)

    def _arrive(self, transfer: Transfer, synchronous: bool) -> None:
        if not synchronous:
            with self._lock:
                self._received.add(transfer.request_id)

    def _submit_store(self, transfer: Transfer) -> None:
        size_bytes = transfer.chunks * self._chunk_bytes
        with self._lock:
            if self._queued_bytes + size_bytes > self._config.store_queue_bytes:
                self._note("chunks_store_skipped", transfer.chunks)
                return
            self._queued_bytes += size_bytes
            work = self._work.setdefault(transfer.request_id, _Work())
            scope = self._operations.scope(self._config.store_deadline_ms)
            work.scopes.add(scope)
            try:
                future = self._storers.submit(self._store, transfer, scope)
            except RuntimeError:  # closed
                future = Future()
                future.cancel()
            work.stores.add(future)
        future.add_done_callback(lambda done: self._stored(transfer, scope, done))

    def _stored(self, transfer: Transfer, scope: Scope, future: Future[None]) -> None:
        with self._lock:
            self._queued_bytes -= transfer.chunks * self._chunk_bytes
            work = self._work[transfer.request_id]
            work.scopes.discard(scope)
            work.stores.discard(future)
            if not work.stores:
                del self._work[transfer.request_id]

    def _store(self, transfer: Transfer, scope: Scope) -> None:
        began = time.perf_counter()
        try:
            self._store_chunks(transfer, scope)
        except Exception as error:
            complaints.note("store", error)
            self._note("chunks_store_failed", transfer.chunks)
        self._note("store_seconds", time.perf_counter() - began)

    def _store_chunks(self, transfer: Transfer, scope: Scope) -> None:
        keys = transfer.rank_keys(self._rank)
        step = self._copies.batch(len(keys))
        for first in range(0, len(keys), step):
            some = keys[first : first + step]
            with self._copies.reading(self._blocks(transfer, first, len(some)), scope.deadline) as views:
                result = self._operations.store(some, views, scope)
            self._note("bytes_stored", result.bytes_stored)
            failed = sum(chunk.outcome is Stored.FAILED for chunk in result.chunks)
            for name, count in (
                ("chunks_stored", result.stored),
                ("chunks_store_failed", failed),
                ("chunks_store_skipped", len(some) - result.stored - failed),
            ):
                if count:
                    self._note(name, count)

    def _blocks(self, transfer: Transfer, first: int, count: int) -> list[Sequence[int]]:
        size = self._per_chunk
        return [transfer.blocks[at * size : (at + 1) * size] for at in range(first, first + count)]
