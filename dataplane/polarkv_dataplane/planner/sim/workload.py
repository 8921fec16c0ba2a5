"""Traces made smaller or larger: a share of the conversations, at the same rate of requests."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import msgspec

from polarkv_client.cli.trace import BLOCK_TOKENS, Request
from polarkv_client.errors import ConfigurationError


def distinct_blocks(trace: Sequence[Request]) -> int:
    """Blocks that the trace names at all: its working set."""
    return len({block for request in trace for block in request.hash_ids})


def check_lengths(trace: Sequence[Request]) -> None:
    """Refuse a trace whose blocks are not of :data:`BLOCK_TOKENS` tokens: its bytes would all be wrong.

    Raises:
        ConfigurationError: a prompt has not as many blocks as its length takes (a last, partly filled one may be left
            out); the text names the request.
    """
    for number, request in enumerate(trace, start=1):
        blocks, tokens = len(request.hash_ids), request.input_length
        if blocks not in (tokens // BLOCK_TOKENS, -(-tokens // BLOCK_TOKENS)):
            raise ConfigurationError(
                f"request {number}: hash_ids", f"{blocks} of them",
                f"{tokens:,} tokens (input_length) are {-(-tokens // BLOCK_TOKENS):,} blocks of {BLOCK_TOKENS}: "
                "name blocks of that size",
            )  # fmt: skip


def conversations(trace: Sequence[Request], share: float, seed: int = 0) -> list[Request]:
    """A share (0 … 1) of the conversations, whole, with time run faster so that as many requests come in a second.

    Requests are of one conversation when they share their second block; the first is the system prompt, which most
    share. How often a block is used stays as it was; how many others come between two uses shrinks with the share.
    """
    if share >= 1:
        return list(trace)
    bound = int(share * 2**64)
    return [
        msgspec.structs.replace(request, timestamp_ms=round(request.timestamp_ms * share))
        for request in trace
        if _lot(request, seed) < bound
    ]


def _lot(request: Request, seed: int) -> int:
    block = request.hash_ids[min(1, len(request.hash_ids) - 1)] if request.hash_ids else 0
    key = seed.to_bytes(8, "little", signed=True)
    return int.from_bytes(blake2b(block.to_bytes(8, "little"), digest_size=8, key=key).digest(), "little")


def share_for(trace: Sequence[Request], blocks: int, seed: int = 0) -> float:
    """The share of conversations whose working set is ``blocks``, to 1 %; 1 when the whole trace has no more."""
    if distinct_blocks(trace) <= blocks:
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(16):
        middle = (low + high) / 2
        found = distinct_blocks(conversations(trace, middle, seed))
        if abs(found - blocks) * 100 <= blocks:
            return middle
        low, high = (middle, high) if found < blocks else (low, middle)
    return (low + high) / 2
