"""Lists of entries in the order of their keys, without stopping the loop for a million of them."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left, bisect_right
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence

from polarkv_dataplane.manager.records.model import Entry

SLICE = 2000
KEPT_S = 60.0


class Listing:
    """The keys as they were a moment ago, by their first byte; pages that follow one another share them."""

    def __init__(self, entries: Mapping[bytes, Entry]) -> None:
        self._entries = entries
        self._buckets: list[list[bytes]] = []
        self._sorted: set[int] = set()
        self._made_at = 0.0
        self._lock = asyncio.Lock()

    async def page(self, limit: int, after: bytes, first: bytes, last: bytes) -> list[Entry]:
        """At most ``limit`` entries, in order: keys from ``first`` to ``last``, both included, and beyond ``after``."""
        async with self._lock:
            if not after or time.monotonic() - self._made_at > KEPT_S:
                await self._make()
            found: list[Entry] = []
            for number in range(max(first, after)[0], last[0] + 1):
                bucket = self._bucket(number)
                start = bisect_right(bucket, after) if after >= first else bisect_left(bucket, first)
                for key in bucket[start : bisect_right(bucket, last)]:
                    entry = self._entries.get(key)
                    if entry is not None:
                        found.append(entry)
                        if len(found) >= limit:
                            return found
                await asyncio.sleep(0)
            return found

    async def _make(self) -> None:
        buckets: list[list[bytes]] = [[] for _ in range(256)]
        async for part in slices(list(self._entries), SLICE):
            for key in part:
                buckets[key[0]].append(key)
        self._buckets, self._sorted, self._made_at = buckets, set(), time.monotonic()

    def _bucket(self, number: int) -> list[bytes]:
        bucket = self._buckets[number]
        if number not in self._sorted:
            bucket.sort()
            self._sorted.add(number)
        return bucket


async def slices(items: Sequence[bytes], size: int) -> AsyncIterator[Iterable[bytes]]:
    """Parts of ``items``, with a turn of the loop for others after each."""
    for at in range(0, len(items), size):
        yield items[at : at + size]
        await asyncio.sleep(0)
