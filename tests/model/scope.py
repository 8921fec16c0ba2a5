"""How small the world is that is searched, and which walls stand in it."""

from __future__ import annotations

from dataclasses import dataclass, field

from polarkv_dataplane.manager.records.model import Settings

STILL = -1  # a horizon: the clock does not move
LATE_MS = 1  # a one-sided access that began in time lands at most this late; quarantine exceeds it

TINY = Settings(
    read_lease_ms=2, write_ticket_ms=1, quarantine_ms=1, operation_timeout_ms=2, offload_retry_ms=1, node_timeout_ms=3,
    disk_high_percent=100, operations_per_node=4, pinned_percent=100,
)  # fmt: skip


@dataclass(frozen=True)
class Scope:
    """One tiny world. Faults are budgets: so many in one history."""

    name: str
    files: int = 1  # what the disk has room for; 0: the node's disk server has no capacity
    checksums: bool = False  # readers and disk servers verify header and checksum
    prompt_readers: bool = True  # readers throw away what they read after their deadline
    ordered_disk: bool = True  # the disk server keeps the order of one key's commands
    fresh_crashes: int = 0  # the node dies, and its memory with it
    returns: int = 0  # the node registers again, after a crash, a loss, or just so
    unprompted: bool = True  # … just so; else only after a crash or a loss
    restarts: int = 0  # the manager dies
    failures: int = 0  # the disk server fails a command
    echoes: int = 0  # an answer is delivered twice
    drains: tuple[str, ...] = ()
    drain_budget: int = 2
    admin: bool = False  # evict, purge by hand
    prefetch: bool = False
    pins: int = 0
    horizon_ms: int = 0  # 0: time has no end, and the search covers everything that can ever happen
    settings: Settings = field(default=TINY)
