"""What is kept on purpose. A pin ends by itself, and then its bytes no longer count."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from polarkv_dataplane.manager.records.model import Entry


class Pins:
    """Pinned entries, and how many bytes they are."""

    def __init__(self) -> None:
        self.bytes = 0
        self._entries: dict[bytes, Entry] = {}
        self._ends: list[tuple[int, bytes]] = []  # (until ms, key), a heap; may hold pins that were changed or dropped

    def add(self, entry: Entry, until_ms: int) -> None:
        """Keep ``entry`` until then; a pin that it has is replaced."""
        self.drop(entry)
        entry.pinned_until_ms = until_ms
        if entry.offset_bytes >= 0:
            entry.node.pool.pinned(entry.offset_bytes, 1)
        self.bytes += entry.stride_bytes
        self._entries[entry.key] = entry
        heappush(self._ends, (until_ms, entry.key))
        if len(self._ends) > 2 * len(self._entries) + 64:  # the same few keys are pinned again and again
            self._ends = [(entry.pinned_until_ms, key) for key, entry in self._entries.items()]
            heapify(self._ends)

    def drop(self, entry: Entry) -> None:
        """End its pin, if it has one."""
        if entry.pinned_until_ms:
            entry.pinned_until_ms = 0
            if entry.offset_bytes >= 0:
                entry.node.pool.pinned(entry.offset_bytes, -1)
            self.bytes -= entry.stride_bytes
            del self._entries[entry.key]

    def expire(self, now: int) -> None:
        """End the pins whose time has come."""
        while self._ends and self._ends[0][0] <= now:
            entry = self._entries.get(heappop(self._ends)[1])
            if entry is not None and entry.pinned_until_ms <= now:
                self.drop(entry)
