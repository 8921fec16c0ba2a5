"""A circuit breaker: a peer that keeps failing is left alone, and costs its callers nothing until a probe succeeds."""

from __future__ import annotations

import random
import threading
from enum import StrEnum

from polarkv_client.errors import BreakerOpen


class BreakerState(StrEnum):
    """Closed: calls go through. Open: they do not. Probing: one call is finding out."""

    CLOSED = "closed"
    OPEN = "open"
    PROBING = "probing"


class Breaker:
    """Opens after ``failures`` failures in a row; lets one probe through after a wait that doubles up to ``longest_s``.

    Times are seconds on ``time.monotonic()``'s clock, passed in by the caller. Safe for several threads.
    """

    def __init__(self, name: str, failures: int, first_s: float, longest_s: float) -> None:
        self.name = name
        self._limit = failures
        self._first_s = first_s
        self._longest_s = max(first_s, longest_s)
        self._lock = threading.Lock()
        self._random = random.Random()
        self._failures = 0
        self._opened = 0
        self._retry_at = 0.0
        self._state = BreakerState.CLOSED
        self._why = ""

    @property
    def state(self) -> BreakerState:
        """What it does with the next call."""
        return self._state

    @property
    def why(self) -> str:
        """The last failure's text; empty after a success."""
        return self._why

    @property
    def retry_at(self) -> float:
        """When the next probe may go; meaningful while it is open."""
        return self._retry_at

    def check(self, now: float) -> None:
        """Let a call through, or not. A call let through must report :meth:`success` or :meth:`failure`.

        Raises:
            BreakerOpen: the peer is left alone for now.
        """
        if self._state is BreakerState.CLOSED:
            return
        with self._lock:
            if now < self._retry_at:
                raise BreakerOpen(f"{self.name} is not tried for now: {self._why}")
            self._state = BreakerState.PROBING
            # Should the probe never report back, another may go after the longest wait.
            self._retry_at = now + self._longest_s

    def success(self) -> None:
        """A call was answered (a refusal counts: the peer is alive)."""
        if self._state is BreakerState.CLOSED and not self._failures:
            return
        with self._lock:
            self._state = BreakerState.CLOSED
            self._failures = self._opened = 0
            self._retry_at = 0.0
            self._why = ""

    def failure(self, why: str, now: float) -> None:
        """A call got no answer."""
        with self._lock:
            self._failures += 1
            self._why = why
            if self._state is BreakerState.CLOSED and self._failures < self._limit:
                return
            if self._state is BreakerState.OPEN:
                return  # a call that began before it opened
            wait_s = min(self._first_s * 2**self._opened, self._longest_s)
            self._opened = min(self._opened + 1, 32)
            self._state = BreakerState.OPEN
            self._retry_at = now + wait_s * self._random.uniform(0.8, 1.0)
