"""What waits to be copied to disk, and which of the node's volumes are left alone for a while."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from polarkv_client.layout import volume_of
from polarkv_client.states import EntryState

if TYPE_CHECKING:
    from polarkv_dataplane.manager.records.model import Entry


class OffloadQueue:
    """Memory entries of one node in the order of their commits. A volume that failed or is full holds up its own."""

    def __init__(self) -> None:
        self.waiting: deque[Entry] = deque()  # may hold entries that moved on
        self.parked: deque[Entry] = deque()  # older than all of these: their volumes are left alone
        self.parked_until_ms = 0  # the first of those volumes may be asked again
        self.retry_ms = [0]  # by volume: not asked again before

    def __len__(self) -> int:
        return len(self.waiting) + len(self.parked)

    def put(self, entry: Entry, most: int) -> None:
        """Have an entry offloaded when its turn comes; beyond ``most``, those that moved on are thrown out."""
        self.waiting.append(entry)
        if len(self) > most:
            self.waiting, self.parked = (
                deque(queued for queued in queue if queued.state is EntryState.MEMORY)
                for queue in (self.waiting, self.parked)
            )

    def next(self, now: int) -> Entry | None:
        """The entry whose turn it is; it stays the next one until it is no longer in Memory."""
        if self.parked and now >= self.parked_until_ms:
            self.waiting.extendleft(reversed(self.parked))
            self.parked.clear()
        while self.waiting:
            entry = self.waiting[0]
            if entry.state is EntryState.MEMORY:
                retry_ms = self.retry_ms[self.volume(entry)]
                if now >= retry_ms:
                    return entry
                self.parked_until_ms = min(retry_ms, self.parked_until_ms) if self.parked else retry_ms
                self.parked.append(entry)
            self.waiting.popleft()
        return None

    def volume(self, entry: Entry) -> int:
        """The volume of an entry's file."""
        return volume_of(entry.key, len(self.retry_ms))

    def may(self, entry: Entry, now: int) -> bool:
        """Whether the entry's volume is not left alone."""
        return now >= self.retry_ms[self.volume(entry)]

    def leave_alone(self, until_ms: int, entry: Entry | None = None) -> None:
        """Offload nothing before then: to the volume of ``entry``, or to any."""
        for volume in range(len(self.retry_ms)) if entry is None else (self.volume(entry),):
            self.retry_ms[volume] = until_ms

    def spread(self, volumes: int) -> None:
        """The disk server has so many volumes."""
        self.retry_ms = [0] * volumes

    def clear(self) -> None:
        """Nothing waits any more."""
        self.waiting.clear()
        self.parked.clear()
