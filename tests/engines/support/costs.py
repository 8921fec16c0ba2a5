"""What a connector costs, inside an engine's process: CPU seconds in the engine's calls and on its own threads."""

from __future__ import annotations

import threading
import time
from typing import Any

FILE = "costs.json"  # beside the connection file, where what was counted must leave the process
_INSIDE = threading.local()


def timed(method: Any, spent: dict[str, float]) -> Any:
    """The method, its thread's CPU time added to "calls", itself to "made"; of calls inside calls the outer counts."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if getattr(_INSIDE, "it", False):
            return method(*args, **kwargs)
        _INSIDE.it, began = True, time.thread_time()
        try:
            return method(*args, **kwargs)
        finally:
            _INSIDE.it = False
            spent["calls"] += time.thread_time() - began
            spent["made"] += 1

    return call


def own_threads() -> dict[int, float]:
    """CPU seconds of each thread that the connector and its client have made: lookups, moves, copies, upkeep."""
    return {
        each.ident: time.clock_gettime(time.pthread_getcpuclockid(each.ident))
        for each in threading.enumerate()
        if each.ident and each.name.startswith("polarkv-")
    }
