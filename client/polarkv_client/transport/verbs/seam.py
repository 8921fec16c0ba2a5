"""The little of RDMA verbs that is used here, whichever Python binding brings it.

Nothing but one file for each binding imports one. Objects are closed by hand, children first: queue pair, regions,
completions, device. Both bindings crash in the garbage collector when their objects sit in a reference cycle, so what
holds them holds them by plain attributes and gives them up in ``close``.

Reliable connections, one-sided operations, one buffer an operation: what every device has, cloud ones too.
"""

from __future__ import annotations

import errno
import secrets
from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import IntEnum, IntFlag
from typing import ClassVar, NamedTuple

from polarkv_client import errors
from polarkv_client.protocol.messages import QueuePair

# 4.096 us * 2**14 = 67 ms until a packet is sent again, six times: a silent peer is given up after half a second, by
# devices that take four times that after two. Seven would be for ever to soft RoCE.
ACK_TIMEOUT, RETRIES, NOT_READY_RETRIES, NOT_READY_TIMER = 14, 6, 7, 12
MOST_READS = 16  # reads that one queue pair has under way at the other end; more are not faster
HOP_LIMIT = 64


LOCK_FIX = (
    "memory that RDMA uses is locked: give the process CAP_IPC_LOCK (in Kubernetes a capability of the container), or "
    "raise its limit ('ulimit -l unlimited', LimitMEMLOCK=infinity)"
)


class Access(IntFlag):
    """What may be done to registered memory, or over a queue pair."""

    NONE = 0
    LOCAL_WRITE = 1
    REMOTE_WRITE = 2
    REMOTE_READ = 4


class Opcode(IntEnum):
    """The two one-sided operations."""

    WRITE = 0
    READ = 4


class Status(IntEnum):
    """How a work request ended: the numbers of ``ibv_wc_status`` that mean something here."""

    SUCCESS = 0
    LOCAL_PROTECTION = 4
    FLUSHED = 5
    REMOTE_ACCESS = 10
    RETRIES_EXCEEDED = 12


class Work(NamedTuple):
    """One one-sided operation. ``number`` comes back with its completion, if it is ``signaled``."""

    number: int
    opcode: Opcode
    address: int
    size_bytes: int
    lkey: int
    remote_address: int
    rkey: int
    signaled: bool


class Completion(NamedTuple):
    """The end of a signaled operation, and so of all that were posted before it on its queue pair."""

    number: int
    status: int


class Limits(NamedTuple):
    """What a device can do at most."""

    region_bytes: int
    regions: int
    queue_pairs: int
    queued: int  # work requests of one queue pair
    reads: int  # reads of one queue pair under way


class Port(NamedTuple):
    """A port as the binding sees it. ``mtu`` is verbs' number (1: 256 bytes … 5: 4096)."""

    active: bool
    mtu: int
    lid: int


class VerbsError(errors.Unavailable):
    """A verb failed. ``number`` is the system's error number, 0 where there is none."""

    def __init__(self, text: str, number: int = 0) -> None:
        super().__init__(f"{text}: {LOCK_FIX}" if number == errno.ENOMEM else text)
        self.number = number


class Region(ABC):
    """Registered memory. It must stay mapped until :meth:`close`."""

    address: int
    size_bytes: int
    lkey: int
    rkey: int

    @abstractmethod
    def close(self) -> None:
        """Take it back. Raises VerbsError."""


class Completions(ABC):
    """A completion queue and its channel. For one thread at a time."""

    descriptor: int  # readable when something completed after :meth:`arm`

    @abstractmethod
    def arm(self) -> None:
        """Ask for one event at the next completion."""

    @abstractmethod
    def take_event(self) -> None:
        """Take the event that made the descriptor readable. Blocks when there is none."""

    @abstractmethod
    def poll(self, most: int) -> Sequence[Completion]:
        """What has completed, in the order posted."""

    @abstractmethod
    def close(self) -> None:
        """Give it up, after its queue pairs."""


class Pair(ABC):
    """A queue pair of a reliable connection. For one thread at a time."""

    number: int

    @abstractmethod
    def connect(self, gid_index: int, mine: QueuePair, theirs: QueuePair, access: Access) -> None:
        """Join it to the other end's; ``access`` is what the other end may do. Raises VerbsError."""

    @abstractmethod
    def post(self, works: Sequence[Work]) -> None:
        """Begin operations, in order. Raises VerbsError: some may have begun."""

    @abstractmethod
    def close(self) -> None:
        """Destroy it. Nothing moves over it, in either direction, when this has returned."""


class Device(ABC):
    """An opened device and its protection domain. Several threads may make and close children."""

    name: str
    limits: Limits

    @abstractmethod
    def port(self, number: int) -> Port:
        """A port, as it is now. Raises VerbsError."""

    def describe(self, pair: Pair, port_number: int, gid: bytes) -> QueuePair:
        """One of its queue pairs, for the other end; ``gid`` is the port's address. Raises Unavailable: it is down."""
        port = self.port(port_number)
        if not port.active:
            raise errors.Unavailable(f"{self.name}: its port is down")
        # A random start: packets of a former life of this queue pair's number fit nowhere.
        psn = secrets.randbelow(1 << 24)
        reads = max(1, min(self.limits.reads, MOST_READS))
        return QueuePair(pair.number, psn, gid, port.lid, port.mtu, reads)

    @abstractmethod
    def register(self, address: int, size_bytes: int, access: Access) -> Region:
        """Register memory. Raises VerbsError: 12 (ENOMEM) when no more may be locked."""

    @abstractmethod
    def completions(self, most: int, *, events: bool) -> Completions:
        """A completion queue with room for ``most``; without ``events`` it has no channel. Raises VerbsError."""

    @abstractmethod
    def pair(self, completions: Completions, port: int, queued: int) -> Pair:
        """A queue pair on a port for ``queued`` operations of this end, one buffer each. Raises VerbsError."""

    @abstractmethod
    def close(self) -> None:
        """Give it up, after all that was made of it."""


class Binding(ABC):
    """One Python binding of libibverbs."""

    name: ClassVar[str]
    version: str

    @abstractmethod
    def open(self, name: str) -> Device:
        """Open a device by its name. Raises VerbsError: there is none, or it may not be used."""
