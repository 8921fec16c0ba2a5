"""How much one volume transfers at a time."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

_ROOM_BYTES = 2 << 20


class Transfers:
    """At most ``depth`` transfers at a time, fewer when they are long: a disk then has as much to do with fewer.

    A disk serves all that are under way alike. The fewer there are the sooner the first one ends, and the less is left
    to be done when the disk has ended the last ones of a load.
    """

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._rooms = threading.BoundedSemaphore(depth)
        self._turn = threading.Lock()  # whoever needs several rooms takes them all before the next one takes any

    @contextlib.contextmanager
    def under_way(self, size_bytes: int) -> Iterator[None]:
        """While the body transfers this many bytes; waits until there is room."""
        rooms = min(max(1, size_bytes // _ROOM_BYTES), self._depth)
        with self._turn:
            for _ in range(rooms):
                self._rooms.acquire()
        try:
            yield
        finally:
            self._rooms.release(rooms)
