"""Where threads run. Two threads that copy at once gain nothing while they share a processor.

On small virtual machines a thread is woken on the processor of the one that woke it, and the balancer needs several
milliseconds to part them: longer than a batch's copies take.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable


def _find_getcpu() -> Callable[[], int]:
    try:
        function = ctypes.CDLL(None).sched_getcpu  # Python's os module has no such call
    except (OSError, AttributeError):
        return lambda: -1
    function.restype = ctypes.c_int
    function.argtypes = []
    return function


current_processor = _find_getcpu()  # number of the processor that this thread runs on; -1 where nobody can say


def step_aside(busy: int) -> None:
    """Move the calling thread off processor ``busy``, if it may run on others. What it may run on stays as it was."""
    if busy < 0 or current_processor() != busy:
        return
    with contextlib.suppress(OSError):  # the set shrank meanwhile, or a sandbox forbids it: a matter of speed only
        allowed = os.sched_getaffinity(0)
        if len(allowed) > 1:
            os.sched_setaffinity(0, allowed - {busy})
            os.sched_setaffinity(0, allowed)
