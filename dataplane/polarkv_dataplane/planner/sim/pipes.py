"""Shared bandwidth: a queue for each direction of each machine and for each machine's disks."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf


class Pipes:
    """Equal queues, one a machine. A transfer over several of them ends when its slowest part does."""

    def __init__(self, count: int, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self.moved_bytes = 0.0
        self._free_at = [0.0] * count
        self._first_free_at = [0.0] * count

    def take(self, now: float, places: Sequence[int], size_bytes: float, by: float = inf) -> float:
        """Move ``size_bytes`` in equal parts over the queues at ``places``; returns when the last part has moved.

        Nothing moves, and the answer is infinite, when that would be after ``by``.
        """
        seconds = size_bytes / len(places) / self.bytes_per_s
        free_at = self._free_at
        ends = []
        last = now
        for place in places:
            begins = free_at[place]
            end = (begins if begins > now else now) + seconds
            ends.append(end)
            last = max(last, end)
        if last > by:
            return inf
        for place, end in zip(places, ends, strict=True):
            free_at[place] = end
        self.moved_bytes += size_bytes
        return last

    def take_first(self, now: float, places: Sequence[int], size_bytes: float) -> float:
        """As :meth:`take`, but before everything of :meth:`take` that waits, and after what came this way earlier.

        What has begun to move is not called back; what waits behind ends later by as much.
        """
        seconds = size_bytes / len(places) / self.bytes_per_s
        last = now
        for place in places:
            end = max(now, self._first_free_at[place]) + seconds
            self._first_free_at[place] = end
            self._free_at[place] = max(now, self._free_at[place]) + seconds
            last = max(last, end)
        self.moved_bytes += size_bytes
        return last

    def busy_until(self, places: Sequence[int]) -> float:
        """When the last of these queues is empty."""
        return max(self._free_at[place] for place in places)
