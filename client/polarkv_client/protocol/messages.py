"""Every message, typed. Arrays on the wire: a newer peer appends fields with defaults, an older one ignores the rest.

``keys`` fields are whole 32-byte keys one after the other (``keys.join_keys``). ``outcomes`` fields hold one byte a
key, in the request's order. Times are milliseconds; a clock named ``manager`` is the manager's monotonic one.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated

import msgspec


class Op(IntEnum):
    """What a frame asks for. 1–29 client, 30–49 cache node, 50–69 commands to disk or slab servers, 70–79 slab TCP."""

    ATTACH = 1
    BEGIN_STORE = 2
    COMMIT_STORE = 3
    ABORT_STORE = 4
    ACQUIRE_READ = 5
    RELEASE_READ = 6
    MATCH_PREFIX = 7
    EXISTS = 8
    PREFETCH = 9
    REPORT_DAMAGED = 10
    LIST_NODES = 11

    REGISTER = 30
    HEARTBEAT = 31
    REPORT_INVENTORY = 32
    OPERATION_DONE = 33

    OFFLOAD = 50
    LOAD = 51
    PURGE = 52
    CARVE = 53

    SLAB_READ = 70
    SLAB_WRITE = 71
    SLAB_ATTACH = 72
    SLAB_RDMA_CONNECT = 73
    SLAB_RDMA_RENEW = 74


class _Message(msgspec.Struct, frozen=True, array_like=True, gc=False):
    pass


class Failure(_Message, frozen=True):
    """Body of every frame whose status is not OK."""

    text: str


class Empty(_Message, frozen=True):
    """No fields."""


# Client and manager


class NodeInfo(_Message, frozen=True):
    """A cache node as clients see it. ``tcp`` and ``shm`` are endpoints (``tcp://…``, ``unix://…``) or empty.

    ``rdma`` is ``rdma://HOST:PORT/DEVICE@GID,…`` (``endpoints.RdmaEndpoint``) or empty.
    """

    name: str
    number: int
    incarnation: int
    state: str
    tcp: str = ""
    shm: str = ""
    host_id: str = ""
    rdma: str = ""


class Shard(_Message, frozen=True):
    """Keys whose first byte is in ``first`` … ``last`` are the manager's at ``endpoint`` ('' = the one asked)."""

    first: int
    last: int
    endpoint: str = ""


class Attach(_Message, frozen=True):
    """First message on every client connection."""

    wire_min: int
    wire_max: int
    token: str
    golden: bytes
    client: str
    host_id: str


class Attached(_Message, frozen=True):
    """Answer to :class:`Attach`."""

    wire: int
    epoch: int
    session: int
    tenant: str
    tenant_number: int
    golden: bytes
    shards: list[Shard]
    nodes: list[NodeInfo]
    read_lease_ms: int
    write_ticket_ms: int
    max_payload_bytes: int


class Keys(_Message, frozen=True):
    """A batch of keys (match_prefix, exists)."""

    keys: bytes


class BeginStore(_Message, frozen=True):
    """Ask for slots.

    ``lengths`` has one payload length a key, or a single one for all. Waits for space up to ``wait_ms``.
    """

    keys: bytes
    lengths: list[int]
    wait_ms: int = 0


class StoreGrants(_Message, frozen=True):
    """Answer: ``outcomes`` are StoreOutcome.

    ``grants`` are signed, one a cache node; ``ticket`` 0 when none was granted.
    """

    ticket: int
    ticket_ms: int
    outcomes: bytes
    grants: list[bytes]


class CommitStore(_Message, frozen=True):
    """``checksums`` has one value a key. Keys of the ticket that are not named stay open until its deadline."""

    ticket: int
    keys: bytes
    checksums: list[int]


class Outcomes(_Message, frozen=True):
    """One byte a key: CommitOutcome, Tier (match_prefix: only the matched prefix; exists: every key)."""

    outcomes: bytes


class AbortStore(_Message, frozen=True):
    """Give the slots of these keys back."""

    ticket: int
    keys: bytes


class AcquireRead(_Message, frozen=True):
    """Ask for leases.

    With ``wait_ms`` the answer waits until a key that is Loading has come, or failed, at the latest then.
    """

    keys: bytes
    wait_ms: int = 0
    ended: list[int] = []  # leases that this client has done with, cleanly: they ride along


class ReadGrants(_Message, frozen=True):
    """Answer.

    ``outcomes`` are ReadOutcome, ``tiers`` say where each granted key was found (DISK: it was loaded for this).
    """

    lease: int
    lease_ms: int
    outcomes: bytes
    tiers: bytes
    grants: list[bytes]


class ReleaseRead(_Message, frozen=True):
    """End a lease. ``clean`` false: a transfer may still be running somewhere; the slots are quarantined."""

    lease: int
    clean: bool = True


class Prefetch(_Message, frozen=True):
    """Ask that chunks on disk be brought to memory."""

    keys: bytes


class ReportDamaged(_Message, frozen=True):
    """Chunks read under ``lease`` that did not match their checksum. Ends the lease; ``clean`` as in ReleaseRead."""

    lease: int
    keys: bytes
    clean: bool = True


class NodeList(_Message, frozen=True):
    """Answer to LIST_NODES."""

    nodes: list[NodeInfo]


# Cache node and manager


class Register(_Message, frozen=True):
    """A slab server (``role`` "slab") or disk server ("disk") presents itself.

    The connection stays its command channel.

    ``incarnation`` is the last one it had: 0 for a fresh slab; a disk server names its slab's. ``pool`` identifies the
    memory it serves or has mapped: bytes moved count as local only when both roles name the same pool and host.
    ``volumes``: over how many a disk server spreads its files (``layout.volume_of``).
    """

    wire_min: int
    wire_max: int
    token: str
    role: str
    node: str
    incarnation: int
    pool: str
    host_id: str
    memory_bytes: int = 0
    slab_bytes: int = 0
    disk_bytes: int = 0
    disk_used_bytes: int = 0
    tcp: str = ""
    shm: str = ""
    fresh: bool = True
    volumes: int = 1
    rdma: str = ""


class Registered(_Message, frozen=True):
    """Answer.

    ``number`` and ``incarnation`` go into every later message. ``manager_now_ms`` sets the node's idea of the clock.
    ``quarantine_ms`` is how long a slot rests after a grant that did not end cleanly; 0: an older manager does not say.
    """

    wire: int
    epoch: int
    number: int
    incarnation: int
    manager_now_ms: int
    heartbeat_ms: int
    timeout_ms: int
    quarantine_ms: int = 0


class Heartbeat(_Message, frozen=True):
    """Sent every ``heartbeat_ms`` by both roles; ``counters`` are monotonic totals by metric name."""

    number: int
    incarnation: int
    counters: dict[str, float]


class HeartbeatAnswer(_Message, frozen=True):
    """The manager's clock when it answered."""

    manager_now_ms: int


class InventoryItem(_Message, frozen=True):
    """One valid header in memory (``offset_bytes`` ≥ 0) or one file on disk (-1)."""

    key: bytes
    length_bytes: int
    checksum: int
    tenant: int
    offset_bytes: int = -1


class ReportInventory(_Message, frozen=True):
    """A part of what a node can prove that it holds; ``last`` ends the report of this role."""

    number: int
    incarnation: int
    items: list[InventoryItem]
    last: bool = False


class OperationDone(_Message, frozen=True):
    """A disk server finished a command.

    ``pool`` is the memory that ``moved_bytes`` went to or came from; ``text`` says why it failed.
    """

    number: int
    incarnation: int
    operation: int
    result: int
    moved_bytes: int = 0
    pool: str = ""
    text: str = ""


class OperationResult(IntEnum):
    """How a disk command ended."""

    OK = 0
    NO_SPACE = 1
    MISSING = 2
    DAMAGED = 3
    FAILED = 4


class DiskCommand(_Message, frozen=True):
    """OFFLOAD, LOAD or PURGE, sent by the manager on a disk server's connection (request id 0, no answer frame)."""

    incarnation: int
    operation: int
    key: bytes
    offset_bytes: int = -1
    length_bytes: int = 0
    checksum: int = 0
    tenant: int = 0


class Carve(_Message, frozen=True):
    """Tells a slab server that the slab at ``base_bytes`` now has slots of ``stride_bytes`` (0: none)."""

    incarnation: int
    base_bytes: int
    stride_bytes: int


# Client and slab server, over TCP (a frame, then raw bytes) and over the Unix socket that hands out the memory


class SlabRead(_Message, frozen=True):
    """Ask for the extents of a signed grant at ``picks`` (their places in the grant).

    Answer: an OK frame, then for each pick in order header and payload as raw bytes."""

    grant: bytes
    picks: list[int]


class SlabWrite(_Message, frozen=True):
    """Send chunks.

    After this frame, for each pick in order the payload as raw bytes, then its 8-byte little-endian checksum.

    Answer, once all of it lies in memory: an OK frame with Empty.
    """

    grant: bytes
    picks: list[int]


class SlabAttach(_Message, frozen=True):
    """Over the Unix socket: hand out the memory's descriptor.

    A client shows any grant it holds for this node's present incarnation; the paired disk server shows the node token.
    """

    grant: bytes = b""
    token: str = ""


class SlabAttached(_Message, frozen=True):
    """Answer; the descriptor travels as SCM_RIGHTS with it."""

    pool: str
    number: int
    incarnation: int
    memory_bytes: int


class QueuePair(_Message, frozen=True):
    """One end of a reliable connection, as the other end must know it.

    ``psn`` is the first packet's number, ``gid`` 16 bytes, ``mtu`` verbs' number (1: 256 bytes … 5: 4096), ``reads``
    how many reads it can have under way.
    """

    number: Annotated[int, msgspec.Meta(ge=0, lt=1 << 24)]
    psn: Annotated[int, msgspec.Meta(ge=0, lt=1 << 24)]
    gid: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    lid: Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
    mtu: Annotated[int, msgspec.Meta(ge=1, le=5)]
    reads: Annotated[int, msgspec.Meta(ge=1, lt=1 << 8)]


class RdmaRegion(_Message, frozen=True):
    """A run of the node's memory from ``offset_bytes`` on, as one registration of the slab server's device."""

    offset_bytes: int
    size_bytes: int
    address: int
    rkey: int


class RdmaConnect(_Message, frozen=True):
    """Ask for the other end of a queue pair on the slab server's ``device``.

    The grant says what that end lets the client do: read, or read and write. The first one on a TCP connection makes it
    an RDMA session: the queue pairs end with it.
    """

    grant: bytes
    device: str
    pair: QueuePair


class RdmaConnected(_Message, frozen=True):
    """Answer. ``lane`` is the session's number for this pair.

    ``session_ms``: the queue pairs that may write end that long after the last answer whose successor did not come.
    """

    lane: int
    pair: QueuePair
    regions: list[RdmaRegion]
    memory_bytes: int
    session_ms: int


class RdmaRenew(_Message, frozen=True):
    """Sent by the client four times in ``session_ms``, each one after the answer to the one before.

    It says: when I was made, no write of mine whose ticket had ended was under way, or about to be, on other lanes than
    those ``ended``. The slab server destroys those before it counts the message.
    """

    ended: list[int]
