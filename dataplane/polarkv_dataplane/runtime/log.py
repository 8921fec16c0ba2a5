"""Logging: one line format for every process, and a limit on lines that peers can cause."""

from __future__ import annotations

import logging
import threading
import time

_LIMIT_KEYS = 256


def set_up(level: str = "INFO") -> None:
    """Send log lines to standard error."""
    logging.basicConfig(level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")


class LimitedLogger:
    """Logs at most one line an interval for each kind of message, and says how many it left out."""

    def __init__(self, logger: logging.Logger, interval_s: float = 1.0) -> None:
        self._logger = logger
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._kinds: dict[str, tuple[float, int]] = {}

    def warning(self, kind: str, text: str, *values: object) -> None:
        """Log a warning, unless one of the same ``kind`` was logged within the interval."""
        now = time.monotonic()
        with self._lock:
            last, left_out = self._kinds.get(kind, (-self._interval_s, 0))
            if now - last < self._interval_s:
                self._kinds[kind] = (last, left_out + 1)
                return
            if len(self._kinds) >= _LIMIT_KEYS:
                self._kinds.clear()
            self._kinds[kind] = (now, 0)
        if left_out:
            text = f"{text} (and {left_out} more like it)"
        self._logger.warning(text, *values)
