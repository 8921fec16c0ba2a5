"""Lookups that the scheduler does not wait for: one ``match_prefix`` for all ranks of a request, on another thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from polarkv_client.client import Operations
from polarkv_client.keys import KEY_BYTES
from polarkv_client.states import Tier

_THREADS = 4
_PENDING = 256
FRESH_S = 1.0  # an answer that has waited longer in the engine's queue is asked for again


@dataclass
class Lookup:
    """One question."""

    asked_at: float
    ends_at: float
    future: Future[list[Tier]] | None  # None: too many wait already, a miss
    late: bool = False  # noted as unanswered
    worth: bool | None = None  # whether what was found is to be loaded; None: nobody has asked

    @property
    def done(self) -> bool:
        """Whether there is an answer."""
        return self.future is None or self.future.done()

    def tiers(self) -> list[Tier]:
        """Where each chunk of the prefix lies that all ranks have; empty when that is not known."""
        if self.future is None or not self.future.done() or self.future.cancelled() or self.future.exception():
            return []
        return self.future.result()


class Lookups:
    """The lookups of a scheduler. Bounded in threads, number and time."""

    def __init__(
        self, operations: Operations, deadline_ms: int, note: Callable[[str, float], None], clock: Callable[[], float]
    ) -> None:
        self._operations = operations
        self._deadline_ms = deadline_ms
        self._note = note
        self._clock = clock
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="polarkv-lookup")
        self._pending: set[Future[list[Tier]]] = set()

    def ask(self, keys: Sequence[bytes], wait_ms: int) -> Lookup:
        """Begin to ask; ``keys[rank]`` are that rank's keys, joined. Never blocks.

        After ``wait_ms`` the engine does not wait any more. The question goes on until its deadline: how long there is
        no answer is what the client learns of the manager.
        """
        now = self._clock()
        chunks = len(keys[0]) // KEY_BYTES
        lookup = Lookup(now, now + wait_ms / 1000, None)
        self._pending = {future for future in self._pending if not future.done()}
        if len(self._pending) >= _PENDING:
            self._note("lookups_skipped", 1)
            return lookup
        try:
            lookup.future = self._pool.submit(self._match, list(keys), chunks)
        except RuntimeError:  # closed
            return lookup
        self._pending.add(lookup.future)
        return lookup

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _match(self, keys: list[bytes], chunks: int) -> list[Tier]:
        began = time.perf_counter()
        found = self._operations.match_prefix(interleave(keys, chunks), self._operations.scope(self._deadline_ms))
        self._note("lookup_seconds", time.perf_counter() - began)
        return whole_chunks(found, len(keys))


def interleave(keys: Sequence[bytes], chunks: int) -> list[bytes]:
    """All ranks' keys of the first chunk, then of the second, …: a prefix of these is a prefix that all ranks have."""
    places = range(0, chunks * KEY_BYTES, KEY_BYTES)
    return [joined[place : place + KEY_BYTES] for place in places for joined in keys]


def whole_chunks(tiers: Sequence[Tier], ranks: int) -> list[Tier]:
    """Of a prefix of interleaved keys, the chunks that all ranks have; each lies where its slowest part lies."""
    whole = len(tiers) // ranks
    return [max(tiers[chunk * ranks : (chunk + 1) * ranks]) for chunk in range(whole)]
