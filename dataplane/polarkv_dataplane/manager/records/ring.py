"""Where a new key goes: by the key's own bits, weighted by memory."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate

from polarkv_dataplane.manager.records.model import CacheNode


class Ring:
    """The serving nodes at one moment. A prompt's chunks spread over all; a new empty node gets its share, no more."""

    def __init__(self, nodes: Iterable[CacheNode]) -> None:
        self.nodes = [node for node in nodes if node.serving]
        self.full: set[int] = set()  # strides for which no node has a slot at this moment
        self.slab_bytes = max((node.pool.slab_bytes for node in self.nodes), default=0)  # which bounds a slot
        self._sums = list(accumulate(max(1, node.pool.memory_bytes >> 12) for node in self.nodes))

    def candidates(self, key: bytes) -> list[CacheNode]:
        """The key's node first, then the others in order."""
        if not self.nodes:
            return []
        first = bisect_right(self._sums, int.from_bytes(key[-8:], "little") % self._sums[-1])
        return self.nodes[first:] + self.nodes[:first]
