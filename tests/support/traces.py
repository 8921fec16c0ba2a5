"""Traces that tests run: the public one where it lies beside the clone, else one with the same statistics."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from polarkv_client.cli.trace import DEFAULT_SEED, Request, generate_trace, read_trace

PUBLIC_TRACE = Path(__file__).parents[3] / "shared" / "data" / "conversation_trace.jsonl"


@cache
def whole_trace() -> tuple[Request, ...]:
    """The public trace, or a made one."""
    return tuple(read_trace(PUBLIC_TRACE) if PUBLIC_TRACE.exists() else generate_trace(DEFAULT_SEED))


@cache
def small_trace(requests: int = 600, seed: int = 2) -> tuple[Request, ...]:
    """A made trace, the same everywhere."""
    return tuple(generate_trace(seed, requests))
