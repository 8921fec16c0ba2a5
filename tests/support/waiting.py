"""Waiting for a condition with a deadline: the only way in which a test waits for another process."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from tests.support.guest import SLOWNESS

T = TypeVar("T")


# Longer than anything takes on a slow and busy machine: it costs nothing where a test passes.
TIMEOUT_S = 30.0


def wait_until(probe: Callable[[], T | None], what: str, timeout_s: float = TIMEOUT_S, every_s: float = 0.02) -> T:
    """Call ``probe`` until its answer is true, and return the answer.

    Raises TimeoutError that names ``what`` and the last answer, once ``timeout_s`` have passed: ``SLOWNESS`` times that
    where everything is that much slower.
    """
    timeout_s *= SLOWNESS
    deadline = time.monotonic() + timeout_s
    never = threading.Event()
    while True:
        answer = probe()
        if answer:
            return answer
        if time.monotonic() >= deadline:
            raise TimeoutError(f"waited {timeout_s} s for {what}; last answer: {answer!r}")
        never.wait(every_s)


async def wait_until_async(
    probe: Callable[[], Awaitable[T]], what: str, timeout_s: float = TIMEOUT_S, every_s: float = 0.02
) -> T:
    """Await ``probe`` until its answer is true, as :func:`wait_until` does; one probe may not outlast the deadline."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while True:
        async with asyncio.timeout_at(deadline):
            answer = await probe()
        if answer:
            return answer
        if loop.time() >= deadline:
            raise TimeoutError(f"waited {timeout_s} s for {what}; last answer: {answer!r}")
        await asyncio.sleep(every_s)
