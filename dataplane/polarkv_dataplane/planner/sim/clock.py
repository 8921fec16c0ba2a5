"""Virtual time: what is to happen, in order. The same seed gives the same run, as ties go by the order of asking."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush


class Clock:
    """Seconds since the run's begin."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._asked = 0

    @property
    def now_ms(self) -> int:
        """As the manager's core counts time."""
        return int(self.now * 1000)

    def at(self, when: float, do: Callable[[], None]) -> None:
        """Have ``do`` called at ``when``, or now if that is past."""
        self._asked += 1
        heappush(self._events, (max(when, self.now), self._asked, do))

    def step(self) -> bool:
        """Let the next thing happen; False when nothing is left."""
        if not self._events:
            return False
        self.now, _, do = heappop(self._events)
        do()
        return True
