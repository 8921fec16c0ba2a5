"""What operations answer. Values all of them: no cache trouble is ever raised at the caller."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from polarkv_client.calibration import Rates
from polarkv_client.states import Tier


class Reason(StrEnum):
    """Why a chunk was not loaded or stored."""

    NONE = ""
    ABSENT = "absent"
    NOT_REACHED = "not reached"  # it lies behind the first miss of a prefix, or the operation ended before its turn
    LENGTH = "length"  # stored with another length than the caller's buffer has
    LATE = "late"  # it came, but after the lease had ended
    DAMAGED = "damaged"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"
    UNAVAILABLE = "unavailable"
    BREAKER_OPEN = "breaker open"
    REFUSED = "refused"
    UNAUTHORIZED = "unauthorized"
    PROTOCOL = "protocol"
    VERSION = "version mismatch"
    GOLDEN = "golden mismatch"
    CONFIGURATION = "configuration"
    RECOMPUTE = "recompute"  # computing is faster than loading, by measured rates
    OVERLOADED = "overloaded"  # too many operations wait already
    INTERNAL = "internal error"


class Stored(StrEnum):
    """What became of a chunk in a store."""

    STORED = "stored"
    EXISTS = "exists"
    IN_PROGRESS = "in progress"
    NO_SPACE = "no space"
    QUOTA_EXCEEDED = "quota exceeded"
    OVERSIZED = "oversized"
    FAILED = "failed"


class ChunkLoad(NamedTuple):
    """One chunk of a load. The caller's buffers of a chunk that is no hit may hold anything."""

    hit: bool
    tier: Tier = Tier.NONE  # where a hit was found; DISK: it was brought to memory for this load
    reason: Reason = Reason.NONE
    detail: str = ""


class ChunkStore(NamedTuple):
    """One chunk of a store."""

    outcome: Stored
    reason: Reason = Reason.NONE
    detail: str = ""


@dataclass(frozen=True, slots=True)
class LoadResult:
    """A load: one :class:`ChunkLoad` a chunk, in order."""

    chunks: list[ChunkLoad]
    bytes_loaded: int = 0  # payload of the prefix of hits
    chunk_tokens: int = 0

    @property
    def prefix_chunks(self) -> int:
        """Hits before the first chunk that is none: what a prefix cache can use."""
        return next((place for place, chunk in enumerate(self.chunks) if not chunk.hit), len(self.chunks))

    @property
    def tokens_loaded(self) -> int:
        """Tokens of that prefix."""
        return self.prefix_chunks * self.chunk_tokens

    @property
    def hits(self) -> int:
        """All hits, wherever they lie."""
        return sum(chunk.hit for chunk in self.chunks)

    @property
    def complete(self) -> bool:
        """Whether every chunk was a hit."""
        return self.prefix_chunks == len(self.chunks)


@dataclass(frozen=True, slots=True)
class StoreResult:
    """A store: one :class:`ChunkStore` a chunk, in order."""

    chunks: list[ChunkStore]
    bytes_stored: int = 0

    @property
    def stored(self) -> int:
        """Chunks that this call stored."""
        return sum(chunk.outcome is Stored.STORED for chunk in self.chunks)

    @property
    def present(self) -> int:
        """Chunks that were stored by this call or were there before."""
        return sum(chunk.outcome in {Stored.STORED, Stored.EXISTS} for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """How a cache node is reached."""

    node: str
    incarnation: int
    transport: str
    why: str
    breaker: str


@dataclass(frozen=True, slots=True)
class ClientStatus:
    """What a client knows of itself."""

    endpoint: str
    connected: bool
    breaker: str
    why: str
    epoch: int
    tenant: str
    nodes: list[NodeStatus]
    counters: dict[str, int]
    rates: Rates | None = None  # what the gate goes by; None: it is off
