"""What is really there, or on its way: bytes of chunks, clients at work, messages."""

from __future__ import annotations

from typing import NamedTuple

from polarkv_client.protocol.messages import InventoryItem, OperationResult
from tests.model.copying import ATOMIC

Value = tuple[int, int]  # key, and which store of it
Bytes = tuple[Value | None, Value | None, Value | None]  # header, first half, second half


class Writing(NamedTuple):
    """A client that stores. ``landed`` counts its halves in the slot; they land until ``last_ms``, also after an abort.

    It begins a half only before its deadline by its own clock, and what it began lands at most LATE_MS later.
    """

    ticket: int
    value: Value
    memory: int  # which life of the memory it has mapped
    last_ms: int
    landed: int = 0
    aborted: bool = False


class Reading(NamedTuple):
    """A client that loads. It may copy any byte of its extent at any moment until ``last_ms``: all must be right."""

    lease: int
    value: Value
    memory: int
    last_ms: int
    released: bool = False  # not clean: a transfer may still be running


class Answer(NamedTuple):
    """A disk server's answer on its way."""

    incarnation: int
    operation: int
    result: OperationResult
    key: int


class Report(NamedTuple):
    """An inventory on its way."""

    role: str
    incarnation: int
    items: tuple[InventoryItem, ...]


ATOMIC.update({Writing, Reading, Answer, Report})  # never changed, so never copied


def checksum_of(value: Value) -> int:
    """No two values share one."""
    return 10 * value[0] + value[1] + 1


def value_of(key: int, checksum: int) -> Value:
    """The opposite of ``checksum_of``, for a key."""
    return key, checksum - 1 - 10 * key


def whole(found: Bytes, value: Value) -> bool:
    """Does a slot or file hold this chunk, all of it? With checksums, it is what readers and disk servers verify."""
    return found == (value, value, value)
