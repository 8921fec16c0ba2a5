"""A bounded pool of threads in which operations on one key run one at a time, in the order in which they came."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

_log = logging.getLogger(__name__)


@dataclass
class Task:
    """One operation. ``run`` must not raise; a ``fenced`` one is dropped without a word by a fence before it began."""

    key: bytes
    run: Callable[[], object]
    fenced: bool = True  # whether it belongs to a registration; work on files alone goes on through fences
    came_at: float = field(default_factory=time.monotonic)


class KeyedExecutor:
    """Threads and queues; the bound counts what waits and what runs."""

    def __init__(self, threads: int, bound: int) -> None:
        self._bound = bound
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._chains: dict[bytes, deque[Task]] = {}
        self._ready: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._held = 0
        self._running = 0
        self._closed = False
        self._threads = [threading.Thread(target=self._work, name=f"disk-io-{i}", daemon=True) for i in range(threads)]
        for thread in self._threads:
            thread.start()

    def __len__(self) -> int:
        return self._held

    def submit(self, task: Task) -> bool:
        """Queue an operation; False when there is no room for it."""
        with self._lock:
            if self._closed or self._held >= self._bound:
                return False
            self._held += 1
            chain = self._chains.get(task.key)
            if chain is not None:
                chain.append(task)
                return True
            self._chains[task.key] = deque((task,))
        self._ready.put(task.key)
        return True

    def fence(self, give_up: Callable[[], bool]) -> bool:
        """Drop what waits, and wait until nothing runs; False when ``give_up`` said so before that.

        A transfer that the kernel has begun cannot be called back, so there is no time-out but the caller's.
        """
        with self._lock:
            for key, chain in list(self._chains.items()):
                # The first of a chain may be running; its thread takes it away. A key that is only ready has none.
                if chain[0].fenced:
                    chain[0].run = _nothing
                kept = deque((chain[0], *(task for task in list(chain)[1:] if not task.fenced)))
                self._held -= len(chain) - len(kept)
                self._chains[key] = kept
            warned_at = time.monotonic()
            while self._running:
                if give_up():
                    return False
                self._idle.wait(0.1)
                if time.monotonic() - warned_at > 5:
                    warned_at = time.monotonic()
                    _log.warning("still waiting for %d transfers to or from disk before going on", self._running)
            return True

    def close(self) -> None:
        """Take no more and let the threads end."""
        with self._lock:
            self._closed = True
        for _ in self._threads:
            self._ready.put(None)

    def _work(self) -> None:
        while (key := self._ready.get()) is not None:
            with self._lock:
                task = self._chains[key][0]
                run = task.run
                self._running += 1
            try:
                run()
            except Exception:  # an operation that fails in an unforeseen way must not take a thread with it
                _log.exception("internal error in a disk operation")
            with self._lock:
                self._running -= 1
                self._held -= 1
                chain = self._chains[key]
                chain.popleft()
                if chain:
                    self._ready.put(key)
                else:
                    del self._chains[key]
                if not self._running:
                    self._idle.notify_all()


def _nothing() -> None:
    """What a dropped operation does."""
