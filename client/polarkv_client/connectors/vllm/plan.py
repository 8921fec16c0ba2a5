"""What the two halves of the vLLM connector tell each other: plain data, without vLLM.

The scheduler's half tells the workers, once a step, what to load and what to store. Each worker tells the scheduler's
half, once, at start, in which namespace its chunks lie.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from polarkv_client.keys import KEY_BYTES, Namespace, chunk_keys, join_keys, split_keys

SCRATCH = -1  # in place of a block: this part of the chunk is in the engine already, or of no use to it


@dataclass(frozen=True)
class Transfer:
    """Chunks of one request: for each, a key for each rank and the engine's blocks in order.

    ``keys[rank]`` are that rank's keys, one after the other. ``blocks`` has ``blocks_per_chunk`` block numbers for each
    chunk, :data:`SCRATCH` where the bytes go nowhere.
    """

    request_id: str
    keys: tuple[bytes, ...]
    blocks: tuple[int, ...]
    wait_ms: int = 0  # how long the engine is to wait for a load; 0: as the worker's settings say

    def rank_keys(self, rank: int) -> list[bytes]:
        """The keys of one rank."""
        return list(split_keys(self.keys[rank]))

    @property
    def chunks(self) -> int:
        """How many chunks."""
        return len(self.keys[0]) // KEY_BYTES if self.keys else 0


@dataclass(frozen=True)
class StepPlan:
    """What the workers do in one step."""

    loads: tuple[Transfer, ...] = ()
    stores: tuple[Transfer, ...] = ()
    preempted: frozenset[str] = frozenset()  # their blocks are given to others in this step
    finished: frozenset[str] = frozenset()  # their blocks are held until a worker says that all is stored


@dataclass(frozen=True)
class RankIdentity:
    """Where one worker's chunks lie, and how long a chunk of it is."""

    rank: int
    namespace: Namespace
    chunk_bytes: int


@dataclass
class Chains:
    """The keys of one request, for every rank, made as far as they are asked for."""

    namespaces: Sequence[Namespace]
    extras: Mapping[int, bytes] = field(default_factory=dict)
    _joined: list[bytes] = field(default_factory=list)
    _chunks: int = 0

    def until(self, chunks: int, tokens: Any) -> list[bytes]:
        """Keys of the first ``chunks`` chunks, joined, for each rank. ``tokens`` only grows from call to call."""
        if chunks > self._chunks:
            some = list(tokens[: chunks * self.namespaces[0].chunk_tokens])
            self._joined = [join_keys(chunk_keys(each, some, self.extras)) for each in self.namespaces]
            self._chunks = chunks
        return [joined[: chunks * KEY_BYTES] for joined in self._joined]
