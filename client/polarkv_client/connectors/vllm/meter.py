"""Counts what a connector does, in one process, until vLLM asks for it."""

from __future__ import annotations

import threading

SECONDS = "_seconds"  # names that end so are single measurements, the others are sums
_MOST_SAMPLES = 4096  # between two questions, which come once a step

Counts = dict[str, float | list[float]]


class Meter:
    """Sums and measurements by name; safe for several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._data: Counts = {}

    def note(self, name: str, amount: float) -> None:
        """Add to a sum, or take a measurement."""
        with self._lock:
            merge(self._data, {name: [amount] if name.endswith(SECONDS) else amount})

    def take(self) -> Counts:
        """All since the last time."""
        if not self._data:  # most steps: no lock
            return {}
        with self._lock:
            data, self._data = self._data, {}
            return data


def merge(data: Counts, more: Counts) -> Counts:
    """Add ``more`` to ``data``, which is returned."""
    for name, value in more.items():
        if isinstance(value, list):
            samples = data.setdefault(name, [])
            assert isinstance(samples, list)
            samples += value[: _MOST_SAMPLES - len(samples)]
        else:
            before = data.get(name, 0)
            assert not isinstance(before, list)
            data[name] = before + value
    return data
