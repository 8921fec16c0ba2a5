"""A store whose driver blocks: all its calls run in one thread of its own."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from polarkv_client.errors import Unavailable
from polarkv_dataplane.manager.shell.metadata.store import Batch, MetadataStore, Recalled, Remembered

T = TypeVar("T")


class ThreadedStore(MetadataStore):
    """What the loop calls runs in the thread, under the same name with an underscore before it.

    A thread that hangs in its driver makes later calls fail at once.
    """

    def __init__(self, what: str) -> None:
        """``what`` names the store in errors, without a password."""
        self._what = what
        self._thread = ThreadPoolExecutor(1, "polarkv-metadata")
        self._last: Future[object] | None = None

    async def open(self) -> None:
        await self._run(self._open)

    async def close(self) -> None:
        if self._last is None or self._last.done():
            self._last = self._thread.submit(self._close)
        self._thread.shutdown(wait=False, cancel_futures=False)

    async def take_epoch(self, at_least: int) -> int:
        return await self._run(self._take_epoch, at_least)

    async def remembered(self) -> Remembered:
        return await self._run(self._remembered)

    async def write(self, batch: Batch) -> None:
        await self._run(self._write, batch)

    async def look_up(self, keys: Sequence[bytes]) -> dict[bytes, Recalled]:
        return await self._run(self._look_up, keys)

    async def prune(self, node: str, epoch: int) -> int:
        return await self._run(self._prune, node, epoch)

    async def _run(self, call: Callable[..., T], *arguments: object) -> T:
        if self._last is not None and not self._last.done():
            raise Unavailable(f"{self._what}: the last call has not come back yet")
        future = self._thread.submit(call, *arguments)
        self._last = future  # type: ignore[assignment]
        return await asyncio.wrap_future(future)

    # In the thread

    @abstractmethod
    def _open(self) -> None: ...

    @abstractmethod
    def _close(self) -> None: ...

    @abstractmethod
    def _take_epoch(self, at_least: int) -> int: ...

    @abstractmethod
    def _remembered(self) -> Remembered: ...

    @abstractmethod
    def _write(self, batch: Batch) -> None: ...

    @abstractmethod
    def _look_up(self, keys: Sequence[bytes]) -> dict[bytes, Recalled]: ...

    @abstractmethod
    def _prune(self, node: str, epoch: int) -> int: ...
