"""The one timed loop. It runs inside the worker of each subject, so that no subject pays for another's interpreter."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from bench.subject import Batch, Subject, SubjectError, batch_keys


@dataclass(frozen=True)
class RoundResult:
    """Rates of one pass over the working set, in GB/s (10^9 bytes a second)."""

    put_gbps: float
    get_gbps: float


def make_batches(tag: str, value_bytes: int, total_bytes: int) -> list[Batch]:
    """Cover `total_bytes` of the regions with batches of fresh keys; `tag` makes the keys of one pass distinct."""
    count = total_bytes // value_bytes
    size = batch_keys(value_bytes)
    keys = [hashlib.sha256(f"{tag}/{value_bytes}/{i}".encode()).hexdigest() for i in range(count)]
    offsets = [i * value_bytes for i in range(count)]
    return [Batch(keys[i : i + size], offsets[i : i + size], value_bytes) for i in range(0, count, size)]


def run_round(subject: Subject, tag: str, value_bytes: int, total_bytes: int) -> RoundResult:
    """Put the working set, get it, verify every byte, forget it. SubjectError when a byte differs."""
    batches = make_batches(tag, value_bytes, total_bytes)
    try:
        put_seconds = _timed(subject.put, batches, lambda: subject.finish_put(batches))
        subject.target.fill(0, total_bytes)
        get_seconds = _timed(subject.get, batches)
        if not subject.source.equals(subject.target, total_bytes):
            raise SubjectError(f"verification failed: bytes read differ from bytes written ({value_bytes} B values)")
    finally:
        for batch in batches:
            subject.forget(batch.keys)
    return RoundResult(total_bytes / put_seconds / 1e9, total_bytes / get_seconds / 1e9)


def _timed(call: Callable[[Batch], None], batches: list[Batch], finish: Callable[[], None] = lambda: None) -> float:
    began = time.perf_counter()
    for batch in batches:
        call(batch)
    finish()
    return time.perf_counter() - began


class LookupBench:
    """512 small entries that exist, asked for in batches. Every answer is checked."""

    VALUE_BYTES = 4096
    KEYS = 512

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._batches = make_batches("lookup", self.VALUE_BYTES, self.KEYS * self.VALUE_BYTES)
        for batch in self._batches:
            subject.put(batch)
        self._keys = [key for batch in self._batches for key in batch.keys]

    def run(self, batch_size: int, seconds: float) -> float:
        """Calls a second, one client, one call after the other."""
        ranges = range(0, self.KEYS, batch_size)
        groups = [self._subject.native_keys(self._keys[i : i + batch_size]) for i in ranges]
        calls = 0
        began = time.perf_counter()
        deadline = began + seconds
        while (now := time.perf_counter()) < deadline:
            group = groups[calls % len(groups)]
            if self._subject.lookup(group) != len(group):
                raise SubjectError(f"lookup of {len(group)} existing keys did not find them all")
            calls += 1
        return calls / (now - began)

    def close(self) -> None:
        for batch in self._batches:
            self._subject.forget(batch.keys)


def result_dict(result: RoundResult) -> dict[str, float]:
    return asdict(result)
