"""Writes metadata behind the manager's back, and recalls it when entries are proved. Nothing ever waits for it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import islice
from typing import TypeVar

from polarkv_dataplane.manager.records.books import COMMITTED
from polarkv_dataplane.manager.records.model import Entry, Stats
from polarkv_dataplane.manager.shell.metadata.store import Batch, EntryRow, MetadataStore, NodeRow, Recalled
from polarkv_dataplane.runtime.log import LimitedLogger

T = TypeVar("T")
BATCH_ROWS = 500
WRITE_EVERY_S = 1.0
READ_EVERY_S = 10.0  # uses by readers: many, and only an order is remembered of them
LONGEST_PAUSE_S = 5.0
LOOK_UP_KEYS = 2048
_MOST_LOOK_UPS = 8192
_GONE = -1
_limited = LimitedLogger(logging.getLogger(__name__), 10.0)


class Recorder:
    """Bounded queues, coalesced by key, and the one task that talks to the store."""

    def __init__(
        self, store: MetadataStore, epoch: int, timeout_ms: int, queue_keys: int, *, connected: bool = False
    ) -> None:
        """``connected``: the store is open and has given this epoch."""
        self.stats = Stats()
        self.connected = connected
        self._epoch_stored = connected
        self._store = store
        self._epoch = epoch
        self._timeout_s = timeout_ms / 1000
        self._queue_keys = queue_keys
        self._entries: dict[bytes, int] = {}  # key: recency to write, 0 for none, _GONE when it is absent
        self._read: dict[bytes, int] = {}
        self._pins: dict[bytes, int] = {}
        self._nodes: dict[str, NodeRow] = {}
        self._quotas: dict[str, int | None] = {}
        self._look_ups: deque[tuple[str, list[bytes] | None]] = deque()
        self._orders: dict[str, list[tuple[int, bytes]]] = {}
        self._under_way = 0
        self._wake = asyncio.Event()
        self._recall: Callable[[dict[bytes, Recalled]], None] = lambda found: None
        self._order: Callable[[Sequence[bytes]], Awaitable[None]] | None = None
        self._ledger: Mapping[bytes, Entry] = {}

    def bind(
        self,
        ledger: Mapping[bytes, Entry],
        recall: Callable[[dict[bytes, Recalled]], None],
        order: Callable[[Sequence[bytes]], Awaitable[None]],
    ) -> None:
        """Whose entries are written; ``recall`` applies pins, ``order`` makes keys recent, the last one most."""
        self._ledger, self._recall, self._order = ledger, recall, order

    @property
    def waiting(self) -> int:
        """Keys that are not written yet, those under way included; uses by readers, which wait on purpose, are not."""
        return len(self._entries) + self._under_way

    # From the manager; each returns at once

    def changed(self, keys: Sequence[bytes], entries: Mapping[bytes, Entry], *, keep_absent: bool) -> None:
        """Entries appeared, changed or went."""
        if self._store.keeps:
            queue = self._entries
            for key in keys:
                entry = entries.get(key)
                if entry is not None and entry.state in COMMITTED:
                    queue[key] = max(queue.get(key, 0), 0)
                elif entry is not None or not keep_absent:
                    queue[key] = _GONE
            self._bound(queue)

    def used(self, keys: Sequence[bytes]) -> None:
        """Entries were stored: now is their recency."""
        if self._store.keeps and keys:
            self._entries.update(dict.fromkeys(keys, _wall_ms()))
            self._bound(self._entries)

    def read(self, keys: Sequence[bytes]) -> None:
        """Entries were read."""
        if self._store.keeps and keys:
            self._read.update(dict.fromkeys(keys, _wall_ms()))
            self._bound(self._read)

    def pinned(self, pins: Mapping[bytes, int]) -> None:
        """Pins, as wall-clock milliseconds of their end."""
        if self._store.keeps:
            self._pins.update(pins)
            for key in pins:
                self._entries.setdefault(key, 0)
            self._bound(self._entries)
            self._bound(self._pins)

    def node(self, name: str, number: int, incarnation: int) -> None:
        if self._store.keeps:
            self._nodes[name] = NodeRow(name, number, incarnation)
            self._wake.set()

    def quota(self, tenant: str, quota_bytes: int | None) -> None:
        if self._store.keeps:
            self._quotas[tenant] = quota_bytes
            self._wake.set()

    def proved(self, node: str, keys: list[bytes]) -> None:
        """A cache node proved these: look up what else is known of them."""
        if self._store.keeps and keys:
            self._ask(node, keys)

    def inventoried(self, node: str) -> None:
        """A cache node has proved all: bring its entries in order and forget what it did not prove."""
        if self._store.keeps:
            self._ask(node, None)

    # The task

    async def run(self) -> None:
        """Write and look up until cancelled; failures are counted, and tried again ever more rarely."""
        pause_s = 0.1
        read_at = time.monotonic()
        while self._store.keeps:
            try:
                if not self.connected:
                    await self._limited(self._store.open())
                    if not self._epoch_stored:
                        await self._limited(self._store.take_epoch(self._epoch))
                        self._epoch_stored = True
                    self.connected = True
                await self._answer_look_ups()
                if time.monotonic() - read_at >= READ_EVERY_S or len(self._read) > self._queue_keys // 2:
                    read_at = time.monotonic()
                    self._merge_read()
                await self._write_all()
                pause_s = 0.1
            except Exception as error:  # whatever a driver raises: the store is an optimisation
                self._failed(error)
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 2, LONGEST_PAUSE_S)
                continue
            try:
                async with asyncio.timeout(WRITE_EVERY_S):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()

    async def finish(self) -> None:
        """Write what waits, within one time-out, and close."""
        if self._store.keeps:
            try:
                if self.connected:
                    async with asyncio.timeout(min(self._timeout_s, 1.0)):
                        self._merge_read()
                        await self._write_all()
            except Exception as error:
                self._failed(error)
            await self._store.close()

    async def _write_all(self) -> None:
        while batch := self._take_batch():
            self._under_way = len(batch.entries) + len(batch.gone)
            try:
                await self._limited(self._store.write(batch))
            except BaseException:
                self._put_back(batch)
                raise
            finally:
                self._under_way = 0
            self.stats.add("metadata_rows", len(batch))

    def _take_batch(self) -> Batch:
        batch = Batch(nodes=list(self._nodes.values()), quotas=self._quotas)
        self._nodes, self._quotas = {}, {}
        for key in list(islice(self._entries, BATCH_ROWS)):
            recency = self._entries.pop(key)
            entry = self._ledger.get(key)
            if recency == _GONE:
                self._pins.pop(key, None)
                batch.gone.append(key)
            elif entry is not None and entry.state in COMMITTED:
                batch.entries.append(
                    EntryRow(entry.key, entry.node.name, entry.length_bytes, entry.checksum, entry.tenant.number,
                             recency, self._pins.pop(key, None), self._epoch)
                )  # fmt: skip
        return batch

    def _put_back(self, batch: Batch) -> None:
        """What came meanwhile is newer."""
        for row in batch.entries:
            if self._entries.setdefault(row.key, row.recency_ms) != _GONE and row.pinned_until_ms is not None:
                self._pins.setdefault(row.key, row.pinned_until_ms)
        for key in batch.gone:
            self._entries.setdefault(key, _GONE)
        for node in batch.nodes:
            self._nodes.setdefault(node.name, node)
        self._quotas = {**batch.quotas, **self._quotas}
        self._bound(self._entries)

    def _merge_read(self) -> None:
        read, self._read = self._read, {}
        for key, recency in read.items():
            if self._entries.get(key, 0) != _GONE:
                self._entries[key] = recency
        self._bound(self._entries)

    async def _answer_look_ups(self) -> None:
        while self._look_ups:
            node, keys = self._look_ups[0]
            if keys is not None:
                found = await self._limited(self._store.look_up(keys))
                self._recall(found)
                order = self._orders.setdefault(node, [])
                order.extend((recalled.recency_ms, key) for key, recalled in found.items())
            else:
                order = sorted(self._orders.pop(node, []))
                if self._order is not None:
                    await self._order([key for _, key in order])
                await self._write_all()
                self.stats.add("metadata_pruned", await self._limited(self._store.prune(node, self._epoch)))
            self._look_ups.popleft()

    async def _limited(self, call: Awaitable[T]) -> T:
        async with asyncio.timeout(self._timeout_s):
            return await call

    def _ask(self, node: str, keys: list[bytes] | None) -> None:
        if keys is not None and self._look_ups:
            last_node, last_keys = self._look_ups[-1]
            # Not the first one: it may be under way.
            if len(self._look_ups) > 1 and last_node == node and last_keys and len(last_keys) < LOOK_UP_KEYS:
                last_keys.extend(keys)
                return
        if len(self._look_ups) >= _MOST_LOOK_UPS:
            self.stats.add("metadata_dropped")
            return
        self._look_ups.append((node, keys))
        self._wake.set()

    def _bound(self, queue: dict[bytes, int]) -> None:
        if len(queue) >= BATCH_ROWS and queue is self._entries:
            self._wake.set()
        while len(queue) > self._queue_keys:
            del queue[next(iter(queue))]
            self.stats.add("metadata_dropped")

    def _failed(self, error: BaseException) -> None:
        self.connected = False
        self.stats.add("metadata_failures")
        # The type alone: a driver's text may hold the address and more.
        text = "the metadata store does not answer (%s); the cache goes on without it"
        _limited.warning("store", text, type(error).__name__)


def _wall_ms() -> int:
    return time.time_ns() // 1_000_000
