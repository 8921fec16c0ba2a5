"""Keys that wait for their turn: each at most once, and never in two hands at a time."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable

FIRST_S, LONGEST_S = 0.25, 60.0
MOST_KEYS = 10_000


class Queue:
    """A keyed queue. What is added twice before its turn has one turn; what is added during its turn has another one.

    A key that failed comes again after 0.25 s, doubled with each failure in a row up to 60 s. Threads may share one.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._due: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []
        self._held: set[str] = set()
        self._failures: dict[str, int] = {}
        self._closed = False

    def __len__(self) -> int:
        with self._changed:
            return len(self._due) + len(self._held)

    def ready(self) -> int:
        """How many keys are due or in somebody's hands."""
        with self._changed:
            now = self._clock()
            return sum(due <= now for due in self._due.values()) + len(self._held)

    def add(self, key: str, delay_s: float = 0.0) -> None:
        """Have a turn for a key after a delay at the latest. One too many is left to the resync."""
        with self._changed:
            if key in self._due or len(self._due) < MOST_KEYS:
                self._put(key, self._clock() + delay_s)

    def take(self, timeout_s: float) -> str | None:
        """A key whose turn it is, for :meth:`done` or :meth:`failed` to give back. None: time is up, or closed."""
        with self._changed:
            deadline = self._clock() + timeout_s
            while not self._closed:
                now = self._clock()
                due = self._next(now)
                if isinstance(due, str):
                    self._held.add(due)
                    return due
                wait_s = min(deadline, due) - now
                if wait_s <= 0:
                    return None
                self._changed.wait(wait_s)
            return None

    def done(self, key: str, again_s: float | None) -> None:
        """Its turn is over; the next one is after ``again_s`` seconds unless something comes before."""
        with self._changed:
            self._held.discard(key)
            self._failures.pop(key, None)
            if again_s is not None:
                self._put(key, self._clock() + again_s)
            self._changed.notify_all()

    def failed(self, key: str) -> float:
        """Its turn failed; return after how many seconds it has the next one."""
        with self._changed:
            self._held.discard(key)
            failures = self._failures[key] = self._failures.get(key, 0) + 1
            delay_s: float = min(LONGEST_S, FIRST_S * 2.0 ** min(failures - 1, 16))
            self._due.pop(key, None)  # also what came meanwhile waits: it would meet the same fault
            self._put(key, self._clock() + delay_s)
            return delay_s

    def close(self) -> None:
        """Let everybody who waits go."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _put(self, key: str, due: float) -> None:
        if due < self._due.get(key, float("inf")):
            self._due[key] = due
            heapq.heappush(self._heap, (due, key))
            self._changed.notify_all()

    def _next(self, now: float) -> str | float:
        """The key whose turn it is, or when to look again."""
        skipped: list[tuple[float, str]] = []
        found: str | float = float("inf")
        while self._heap:
            due, key = self._heap[0]
            if self._due.get(key) != due:
                heapq.heappop(self._heap)  # an earlier turn took its place
            elif due > now:
                found = due
                break
            elif key in self._held:
                skipped.append(heapq.heappop(self._heap))
            else:
                heapq.heappop(self._heap)
                del self._due[key]
                found = key
                break
        for item in skipped:
            heapq.heappush(self._heap, item)
        return found
