"""The manager's clock as a cache node knows it: an upper bound, so that no grant is honoured after it has ended."""

from __future__ import annotations

import threading
import time

# Two monotonic clocks drift apart by parts per million; an old, tight bound is loosened by this much for its age.
_DRIFT = 200e-6


class ManagerClock:
    """Bound on one manager's monotonic clock, in milliseconds. Never early; late by at most one round trip.

    Every registration has its own: the manager may be another process by then, whose clock starts elsewhere.
    """

    def __init__(self, manager_now_ms: int, sent_at: float) -> None:
        self._lock = threading.Lock()
        self._ahead_ms, self._at = manager_now_ms - sent_at * 1000, sent_at

    def observe(self, manager_now_ms: int, sent_at: float) -> None:
        """Take an answer that the manager gave after ``sent_at`` (``time.monotonic()``); the tightest bound is kept."""
        with self._lock:
            loosened = self._ahead_ms + max(0.0, sent_at - self._at) * 1000 * _DRIFT
            self._ahead_ms, self._at = min(loosened, manager_now_ms - sent_at * 1000), sent_at

    def now_ms(self) -> float:
        """The manager's clock reads at most this."""
        now = time.monotonic()
        with self._lock:
            return self._ahead_ms + now * 1000 + max(0.0, now - self._at) * 1000 * _DRIFT
