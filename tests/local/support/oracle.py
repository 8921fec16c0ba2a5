"""What a chunk must hold: bytes that follow from its key alone, so that whoever reads can tell right from wrong."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from polarkv_client.keys import short
from polarkv_client.results import LoadResult, StoreResult
from polarkv_client.sync import SyncClient

Result = TypeVar("Result")
GRACE_S = 0.5  # a call may end this long after its deadline, no later
_UNTOUCHED = b"\xa5"


def payload(key: bytes, length_bytes: int) -> bytes:
    """The one right payload of a key: a keystream seeded by it. Two keys agree in no 16 bytes worth mentioning."""
    return hashlib.shake_128(b"payload" + length_bytes.to_bytes(8, "little") + key).digest(length_bytes)


class WrongBytes(AssertionError):
    """A hit whose bytes are not those of its key."""


class TooLate(AssertionError):
    """A call that ended after its deadline and the grace."""


@dataclass(frozen=True)
class Chunks:
    """A family of chunks: key ``i`` and its length follow from ``seed`` and ``i``."""

    seed: str
    lengths: tuple[int, ...] = (65_536,)

    def key(self, number: int) -> bytes:
        """The key of a number."""
        return hashlib.sha256(f"{self.seed}/{number}".encode()).digest()

    def keys(self, numbers: Sequence[int]) -> list[bytes]:
        """Their keys."""
        return [self.key(number) for number in numbers]

    def length(self, number: int) -> int:
        """The length in bytes of a number's payload."""
        return self.lengths[number % len(self.lengths)]

    def payloads(self, numbers: Sequence[int]) -> list[bytes]:
        """Their payloads."""
        return [payload(self.key(number), self.length(number)) for number in numbers]

    def blanks(self, numbers: Sequence[int]) -> list[bytearray]:
        """Buffers to load them into, filled with what is nobody's payload."""
        return [bytearray(_UNTOUCHED * self.length(number)) for number in numbers]

    def verify(self, numbers: Sequence[int], buffers: Sequence[bytes | bytearray], result: LoadResult) -> int:
        """Count the hits, every byte of each compared.

        Raises:
            WrongBytes: a hit's buffer holds anything but its key's payload.
        """
        for number, buffer, chunk in zip(numbers, buffers, result.chunks, strict=True):
            if chunk.hit and buffer != payload(self.key(number), self.length(number)):
                raise WrongBytes(describe(self.key(number), bytes(buffer)))
        return result.hits


def describe(key: bytes, found: bytes) -> str:
    """What is wrong with ``found`` in the place of ``key``'s payload, in one line."""
    expected = payload(key, len(found))
    first = next(place for place, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b)
    differing = sum(a != b for a, b in zip(found, expected, strict=True))
    return (
        f"{short(key)}: {differing} of {len(found)} bytes are wrong, the first at {first}: "
        f"{found[first : first + 16].hex()} instead of {expected[first : first + 16].hex()}"
    )


@dataclass
class Caller:
    """A client that holds every answer against the oracle and every call against its deadline."""

    client: SyncClient
    chunks: Chunks
    deadline_ms: int = 2000
    slowest_s: float = 0.0
    calls: int = 0
    reasons: dict[str, int] = field(default_factory=dict)

    def store(self, numbers: Sequence[int], deadline_ms: int | None = None) -> StoreResult:
        """Store these chunks."""
        keys, buffers = self.chunks.keys(numbers), self.chunks.payloads(numbers)
        limit_ms = deadline_ms or self.deadline_ms
        result = self.timed(lambda: self.client.store(keys, buffers, deadline_ms=limit_ms), limit_ms)
        self._count([(chunk.outcome.value, chunk.reason.value) for chunk in result.chunks])
        return result

    def load(self, numbers: Sequence[int], deadline_ms: int | None = None) -> LoadResult:
        """Load these chunks; every byte of every hit has been compared when this returns."""
        keys, buffers = self.chunks.keys(numbers), self.chunks.blanks(numbers)
        limit_ms = deadline_ms or self.deadline_ms
        result = self.timed(lambda: self.client.load(keys, buffers, deadline_ms=limit_ms), limit_ms)
        self.chunks.verify(numbers, buffers, result)
        self._count([("hit" if chunk.hit else "miss", chunk.reason.value) for chunk in result.chunks])
        return result

    def timed(self, call: Callable[[], Result], limit_ms: int) -> Result:
        """Run a call.

        Raises:
            TooLate: it did not end within its deadline and the grace.
        """
        began = time.monotonic()
        result = call()
        took_s = time.monotonic() - began
        self.calls += 1
        self.slowest_s = max(self.slowest_s, took_s)
        if took_s > limit_ms / 1000 + GRACE_S:
            raise TooLate(f"a call with a deadline of {limit_ms} ms took {took_s:.3f} s")
        return result

    def _count(self, outcomes: Sequence[tuple[str, str]]) -> None:
        for outcome, reason in outcomes:
            name = f"{outcome}: {reason}" if reason else outcome
            self.reasons[name] = self.reasons.get(name, 0) + 1
