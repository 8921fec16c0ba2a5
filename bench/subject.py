"""What a system under measurement must offer, so that every one of them runs through the same timed loop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench.buffers import Region, anonymous_region

KIB = 1024
MIB = 1024 * KIB
SIZES_BYTES = (256 * KIB, MIB, 4 * MIB, 16 * MIB)
WORKING_SET_BYTES = 256 * MIB
LOOKUP_BATCHES = (1, 64, 512)


def batch_keys(value_bytes: int) -> int:
    """Keys in one call: 32, and 16 at 16 MiB, so that a batch never exceeds the working set."""
    return 16 if value_bytes >= 16 * MIB else 32


@dataclass(frozen=True)
class Batch:
    """One call's worth: `keys[i]` is `value_bytes` long and lives at `offsets[i]` of the source and target regions."""

    keys: Sequence[str]
    offsets: Sequence[int]
    value_bytes: int

    @property
    def total_bytes(self) -> int:
        return len(self.keys) * self.value_bytes


class SubjectError(Exception):
    """The subject is broken or cannot be started here; the message says why and is shown in the report."""


class Subject(ABC):
    """One system, driven by one client thread.

    The harness calls `start` once; then, any number of times, `put` and `get` of batches (the timed part: each must
    return only when every byte has arrived, and raise SubjectError when one key failed), `forget` of what was put
    (not timed), `lookup`; and `close` at the end. Keys are 64 hexadecimal characters, and each is put once.
    """

    def __init__(self) -> None:
        self.source: Region
        self.target: Region

    @abstractmethod
    def start(self, region_bytes: int) -> None:
        """Start servers and client; set `source` and `target`, each at least `region_bytes` long and touched."""

    @abstractmethod
    def put(self, batch: Batch) -> None: ...

    @abstractmethod
    def get(self, batch: Batch) -> None: ...

    @abstractmethod
    def forget(self, keys: Sequence[str]) -> None: ...

    @abstractmethod
    def lookup(self, keys: Any) -> int:
        """How many of `keys`, in the system's own form, exist; by the cheapest call that it has for it."""

    @abstractmethod
    def close(self) -> None: ...

    def native_keys(self, keys: Sequence[str]) -> Any:
        """`keys` in the form that the system's own callers hold them in; not timed."""
        return keys

    def finish_put(self, batches: Sequence[Batch]) -> None:  # noqa: B027 - most subjects have nothing to do
        """Timed with the puts, after the last: wait until every value is where this subject keeps it."""

    def describe(self) -> dict[str, str]:
        """Version and settings, for the report; asked after the first operations."""
        return {}

    def allocate(self, region_bytes: int) -> None:
        """Plain huge-page buffers; for subjects that take the caller's memory."""
        self.source = anonymous_region(region_bytes)
        self.target = anonymous_region(region_bytes)
