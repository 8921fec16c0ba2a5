"""What the admin API takes and gives, as pydantic models: its documentation is made from them."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, model_validator

from polarkv_client.states import DrainMode, NodeState

KeyHex: TypeAlias = Annotated[
    str, Field(pattern="^[0-9a-fA-F]{64}$", description="A chunk key: 64 hexadecimal digits.")
]


class Model(BaseModel):
    """Base: unknown names are refused."""

    model_config = ConfigDict(extra="forbid")


class Problem(Model):
    """Every answer that is not a success: which field, what it was, and what to do."""

    detail: str = Field(description="The other three as one sentence.")
    field: str = Field(description="Name of what is wrong.")
    value: str = Field(description="What it was; never a secret.")
    fix: str = Field(description="What to do about it.")


class NodeView(Model):
    """A cache node. Bytes and milliseconds as the names say."""

    name: str
    number: int
    incarnation: int
    state: NodeState
    tcp: str
    shm: str
    rdma: str = Field(description="Where it offers RDMA and over which devices; empty: it does not.")
    host_id: str
    memory_bytes: int
    memory_used_bytes: int = Field(description="Slots that hold an entry, as carved.")
    memory_free_bytes: int = Field(description="Free slots, and slabs without slots.")
    memory_quarantined_bytes: int = Field(description="Slots at rest; used, free and quarantined are all usable.")
    memory_usable_bytes: int = Field(description="All memory but what slots leave over in their slabs.")
    memory_entries: int
    disk_bytes: int
    disk_used_bytes: int = Field(description="Files that exist, are written or are deleted, as allocated.")
    disk_only_entries: int
    dirty_bytes: int = Field(description="Bytes of entries that only memory has.")
    quarantined_slots: int
    operations: int = Field(description="Commands that its disk server has not answered yet.")
    holds: int = Field(description="Entries that leases and tickets hold; a drain waits for them.")
    heard_ms_ago: int = Field(description="Silence of the more silent role.")
    inventory_complete: bool = Field(
        description="Whether this life has reported all that memory and disk hold: an Active node serves before it has."
    )
    read_bytes: int = Field(description="Payload bytes granted to readers; goes on when the node registers again.")
    stored_bytes: int = Field(description="Payload bytes committed here; goes on when the node registers again.")


class Nodes(Model):
    """Every cache node that is known, lost ones too."""

    epoch: int = Field(description="This life of the manager: counters begin with it.")
    uptime_s: float = Field(description="How long it has been up: a node that lives has registered within seconds.")
    nodes: list[NodeView]


class Drain(Model):
    """How to drain."""

    mode: DrainMode = Field(default=DrainMode.FLUSH, description="Flush: to disk first; Discard: drop memory copies.")


class EntryView(Model):
    """An entry."""

    key: str
    state: str
    node: str
    tenant: str
    length_bytes: int
    stride_bytes: int
    checksum: str
    leases: int = Field(description="Live leases and their holders' count.")
    pinned_ms: int = Field(description="How long it stays pinned; 0: not pinned.")


class Entries(Model):
    """One page. ``next`` is the ``after`` of the page that follows; none: this was the last."""

    entries: list[EntryView]
    next: str | None


class Selection(Model):
    """Some entries, or all."""

    keys: list[KeyHex] = Field(default=[], max_length=65_536, description="These entries.")
    all: bool = Field(default=False, description="Every entry.")

    @model_validator(mode="after")
    def _one_of_both(self) -> Selection:
        if self.all == bool(self.keys):
            raise ValueError("name keys, or set all, and not both")
        return self


class Pin(Selection):
    """Keep entries cached."""

    ttl_ms: int = Field(ge=0, le=10 * 365 * 86_400_000, description="For how long; 0 ends their pins.")


class Evict(Selection):
    """Drop memory copies that disk has too, or whole entries."""

    purge: bool = Field(default=False, description="Drop the entries, memory and disk.")


class Pinned(Model):
    """How many entries it was done for, and how many not: absent, or too much is pinned."""

    pinned: int
    not_now: int


class Evicted(Model):
    """How many entries it was done for, and how many not now: held by a lease, busy, or time was up."""

    evicted: int
    not_now: int


class TenantView(Model):
    """A tenant."""

    name: str
    number: int
    quota_bytes: int = Field(description="0: no limit.")
    used_bytes: int
    quota_from: Literal["file", "admin", "none"] = Field(description="Where its quota was set.")


class Tenants(Model):
    """All that have a token or entries."""

    tenants: list[TenantView]


class Quota(Model):
    """A tenant's quota; it outlives restarts if there is a metadata store."""

    quota_bytes: int | None = Field(ge=0, description="0: no limit; null: what the tokens file says.")


class Stats(Model):
    """Totals since the manager's start, and what is there now."""

    epoch: int
    uptime_s: float
    entries: int
    entries_by_state: dict[str, int]
    memory_bytes: int
    memory_used_bytes: int
    disk_bytes: int
    disk_used_bytes: int
    pinned_bytes: int
    leases: int
    tickets: int
    waiting_calls: int
    connections: int
    hits_memory: int
    hits_disk: int
    misses: int
    cross_node_bytes: int
    metadata_connected: bool
    metadata_waiting: int
    counts: dict[str, int] = Field(description="Every total by name: the core's, the shell's and the metadata store's.")
    node_counters: dict[str, dict[str, dict[str, float]]] = Field(description="By node and role, as last reported.")


class Health(Model):
    """Whether it can serve."""

    status: Literal["ok", "starting"]
    epoch: int
    active_nodes: int
