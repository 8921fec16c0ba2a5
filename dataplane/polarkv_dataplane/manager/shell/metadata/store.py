"""The interface of a metadata store, and the one that keeps nothing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class NodeRow(NamedTuple):
    """A cache node: its number stays, its incarnations only rise."""

    name: str
    number: int
    incarnation: int


class EntryRow(NamedTuple):
    """A committed entry. Times are wall-clock; ``recency_ms`` 0 and ``pinned_until_ms`` None leave what is stored."""

    key: bytes
    node: str
    length_bytes: int
    checksum: int
    tenant: int
    recency_ms: int
    pinned_until_ms: int | None
    epoch: int


class Recalled(NamedTuple):
    """What is remembered of an entry beyond what its node proves."""

    recency_ms: int
    pinned_until_ms: int


@dataclass(frozen=True)
class Remembered:
    """What a manager reads at its start. ``quotas``: bytes by tenant, as set by the admin."""

    epoch: int = 0
    nodes: Sequence[NodeRow] = ()
    quotas: dict[str, int] = field(default_factory=dict)


@dataclass
class Batch:
    """What is written in one go. A quota of None is forgotten."""

    entries: list[EntryRow] = field(default_factory=list)
    gone: list[bytes] = field(default_factory=list)
    nodes: list[NodeRow] = field(default_factory=list)
    quotas: dict[str, int | None] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.entries) + len(self.gone) + len(self.nodes) + len(self.quotas)


class MetadataStore(ABC):
    """One user at a time. Every method may raise whatever its driver does; the caller sets the deadline."""

    keeps = True

    @abstractmethod
    async def open(self) -> None:
        """Connect and bring the tables about; may be called again after a failure."""

    @abstractmethod
    async def close(self) -> None:
        """Disconnect; never raises."""

    @abstractmethod
    async def take_epoch(self, at_least: int) -> int:
        """A number that no earlier call returned: ``at_least``, or one more than the last. It is stored by then."""

    @abstractmethod
    async def remembered(self) -> Remembered:
        """Everything that is read at start."""

    @abstractmethod
    async def write(self, batch: Batch) -> None:
        """Write all of a batch or nothing."""

    @abstractmethod
    async def look_up(self, keys: Sequence[bytes]) -> dict[bytes, Recalled]:
        """What is remembered of these keys."""

    @abstractmethod
    async def prune(self, node: str, epoch: int) -> int:
        """Forget a cache node's entries that were not written in ``epoch`` or later; return how many."""


class NoStore(MetadataStore):
    """Keeps nothing."""

    keeps = False

    async def open(self) -> None:
        pass

    async def close(self) -> None:
        pass

    async def take_epoch(self, at_least: int) -> int:
        return at_least

    async def remembered(self) -> Remembered:
        return Remembered()

    async def write(self, batch: Batch) -> None:
        pass

    async def look_up(self, keys: Sequence[bytes]) -> dict[bytes, Recalled]:
        return {}

    async def prune(self, node: str, epoch: int) -> int:
        return 0


def signed(value: int) -> int:
    """An unsigned 64-bit number as the signed one that databases keep."""
    return value - (1 << 64) if value >= 1 << 63 else value
