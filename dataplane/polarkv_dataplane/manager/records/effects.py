"""Effects: what the core asks its shell to do. Answers come back as calls."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Work(Enum):
    """What a disk server is asked to do."""

    OFFLOAD = "offload"
    LOAD = "load"
    PURGE = "purge"


class DiskWork(NamedTuple):
    """Ask the node's disk server; answered by ``Tiering.complete``. ``operation`` 0: no answer is awaited."""

    node: int
    incarnation: int
    work: Work
    operation: int
    key: bytes
    offset_bytes: int
    length_bytes: int
    checksum: int
    tenant: int


class Carved(NamedTuple):
    """Tell the node's slab server what slots a slab has now."""

    node: int
    incarnation: int
    base_bytes: int
    stride_bytes: int


class Wake(NamedTuple):
    """A Loading entry became readable, or will not: tell who waits for it."""

    key: bytes


class Changed(NamedTuple):
    """A committed entry appeared, gained or lost a copy, or went: write its metadata when convenient."""

    key: bytes


class NodeChanged(NamedTuple):
    """A node's state changed."""

    node: int


Effect = DiskWork | Carved | Wake | Changed | NodeChanged
