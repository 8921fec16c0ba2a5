"""The books of the core, counted again from nothing: what design calls invariants 1 to 4, 6, 7 and 12."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from polarkv_client.states import HAS_MEMORY, READABLE, NodeState
from polarkv_client.states import EntryState as S
from polarkv_dataplane.manager.core.directory import Directory
from polarkv_dataplane.manager.records.books import DIRTY, USES_DISK
from polarkv_dataplane.manager.records.effects import Work
from polarkv_dataplane.manager.records.model import CacheNode, Entry

PASSING = frozenset({S.WRITING, S.OFFLOADING, S.LOADING, S.PURGING})
WORK_BY_STATE = {S.OFFLOADING: Work.OFFLOAD, S.LOADING: Work.LOAD, S.PURGING: Work.PURGE}


class Violation(AssertionError):
    """An invariant does not hold."""


def require(holds: bool, rule: str, *context: object) -> None:
    """Raise Violation, naming the rule, unless it ``holds``."""
    if not holds:
        raise Violation(rule + "".join(f"; {item}" for item in context))


def audit(directory: Directory) -> None:
    """Recount everything. Raises Violation."""
    ledger = directory.ledger
    for key, entry in ledger.entries.items():
        require(entry.key == key and entry.state is not None, "what is in the directory has a state", entry.state)
        require(ledger.nodes.get(entry.node.number) is entry.node, "an entry lies on a node that is there")
    _audit_grants(directory)
    for node in ledger.nodes.values():
        _audit_node(node, [entry for entry in ledger.entries.values() if entry.node is node])
    for tenant in ledger.tenants.values():
        used = sum(entry.stride_bytes for entry in ledger.entries.values() if entry.tenant is tenant)
        require(tenant.used_bytes == used, "a tenant's bytes are those of its entries", tenant.used_bytes, used)
    pinned = sum(entry.stride_bytes for entry in ledger.entries.values() if entry.pinned_until_ms)
    require(ledger.pins.bytes == pinned, "pinned bytes are those of pinned entries", ledger.pins.bytes, pinned)


def _audit_grants(directory: Directory) -> None:
    entries = directory.ledger.entries
    ends = {number for _, number in directory._ends}
    holds: Counter[int] = Counter()
    for number, lease in directory.leases.items():
        require(number in ends, "every lease ends by itself")
        for entry in lease.entries:
            if entry.state is not None:
                require(entry.state in READABLE, "leases exist only on readable states", entry.state.name)
                holds[id(entry)] += 1
    tickets: Counter[int] = Counter()
    for number, ticket in directory.tickets.items():
        require(number in ends, "every ticket ends by itself")
        for entry in ticket.entries.values():
            if entry.state is not None:
                require(entry.state is S.WRITING, "an open ticket is on a Writing entry", entry.state.name)
                require(entry.operation == number, "a Writing entry names its ticket")
                tickets[id(entry)] += 1
    for entry in entries.values():
        require(entry.holds == holds[id(entry)], "holds count live leases", entry.holds, holds[id(entry)])
        require(tickets[id(entry)] == (entry.state is S.WRITING), "a Writing entry has exactly one ticket")


def _audit_node(node: CacheNode, entries: list[Entry]) -> None:
    for entry in entries:
        has_memory = entry.state in HAS_MEMORY
        require((entry.offset_bytes >= 0) == has_memory, "an entry holds an extent iff it has a memory copy")
        work = WORK_BY_STATE.get(entry.state) if entry.state else None
        operation = node.operations.get(entry.operation)
        if work is not None:
            require(operation is not None and operation.entry is entry and operation.work is work,
                    "what waits for the disk server has an operation", entry.state)  # fmt: skip
    require(len(node.operations) == sum(entry.state in WORK_BY_STATE for entry in entries), "no operation is left over")
    _audit_slots(node, [entry for entry in entries if entry.state in HAS_MEMORY])
    for name, lru, states in (("memory", node.memory, READABLE), ("disk", node.disk, {S.DISK})):
        listed = list(lru)
        expected = {id(entry) for entry in entries if entry.state in states}
        require({id(entry) for entry in listed} == expected and len(listed) == len(expected) == lru.count,
                f"the {name} list has every entry of its states once")  # fmt: skip
        require(all(b.older is a for a, b in pairwise(listed)), "links go both ways")
    counts = {
        "disk_used_bytes": sum(entry.stride_bytes for entry in entries if entry.state in USES_DISK),
        "purging_bytes": sum(entry.stride_bytes for entry in entries if entry.state is S.PURGING),
        "dirty_bytes": sum(entry.stride_bytes for entry in entries if entry.state in DIRTY),
        "holds": sum(entry.holds + (entry.state is S.WRITING) for entry in entries),
    }
    for name, counted in counts.items():
        require(getattr(node, name) == counted, f"{name} is what a recount finds", getattr(node, name), counted)
    queue = node.offloads
    queued = {id(entry) for entry in (*queue.parked, *queue.waiting) if entry.state is S.MEMORY}
    dirty = {id(entry) for entry in entries if entry.state is S.MEMORY}
    require(queued == dirty, "every Memory entry waits for its offload")
    require(len(queue) <= 2 * len(entries) + 1000, "the queue for offload is bounded", len(queue))
    if node.state is NodeState.DRAINED:
        require(node.holds == 0, "a Drained node has no grant", node.holds)
        require(node.dirty_bytes == 0, "a Drained node has nothing that only memory has")
    if node.state is NodeState.JOINING:
        require(node.holds == 0, "a Joining node has no grant", node.holds)


def _audit_slots(node: CacheNode, holders: list[Entry]) -> None:
    pool = node.pool
    bases = sorted([*pool.bare, *pool.slabs])
    require(bases == list(range(0, pool.memory_bytes, pool.slab_bytes)), "every slab is bare or carved, once")
    quarantined = [offset for _, offset in pool.quarantined]
    require(len(set(quarantined)) == len(quarantined), "no slot is quarantined twice")
    waiting = set(quarantined)
    held = 0
    for slab in pool.slabs.values():
        offsets = {slab.base_bytes + index * slab.stride_bytes: index for index in range(len(slab.holders))}
        used = {offset for offset, index in offsets.items() if slab.holders[index] is not None}
        free = {slab.base_bytes + index * slab.stride_bytes for index in slab.free}
        mine = waiting & offsets.keys()
        waiting -= mine
        require(len(used) + len(free) + len(mine) == len(offsets) and used | free | mine == offsets.keys(),
                "used + free + quarantined = all, nothing held twice", used, free, mine)  # fmt: skip
        held += len(used)
        can_give = bool(slab.free) and not slab.closing
        require((pool.open.get(slab.stride_bytes, {}).get(slab.base_bytes) is slab) == can_give,
                "slabs with a free slot, and no others, are open")  # fmt: skip
        require(len(free) < len(offsets), "an empty slab returns to the pool")
        pinned = sum(holder is not None and holder.pinned_until_ms > 0 for holder in slab.holders)
        require(slab.pins == pinned, "a slab counts its pinned entries", slab.pins, pinned)
        require(not (slab.closing and slab.pins), "no slab waits for a pin to end")
    require(not waiting, "what is quarantined lies in a slab")
    require(held == len(holders), "every slot in use is an entry's", held, len(holders))
    for entry in holders:
        slab = pool.slab_of(entry.offset_bytes)
        index, rest = divmod(entry.offset_bytes - slab.base_bytes, slab.stride_bytes)
        require(not rest and slab.holders[index] is entry, "an extent is a slot that names its entry")
        require(slab.stride_bytes == entry.stride_bytes, "a slot is of its entry's class")
    wasted = sum(pool.slab_bytes % slab.stride_bytes for slab in pool.slabs.values())
    require(pool.usable_bytes == pool.memory_bytes - wasted, "usable bytes are what slots can take", pool.usable_bytes)
    require(pool.used_bytes == sum(entry.stride_bytes for entry in holders), "used bytes are those of extents")


def settles(directory: Directory, now: int, longest_ms: int, step_ms: int = 1) -> bool:
    """With every client and disk server silent: does everything that waits end by itself? Spends ``directory``."""
    for later in range(now + step_ms, now + longest_ms, step_ms):
        for node in directory.ledger.nodes.values():
            directory.members.heard(node, later)
        directory.tick(later)
        waiting = any(entry.state in PASSING for entry in directory.ledger.entries.values())
        quarantined = any(node.pool.quarantined for node in directory.ledger.nodes.values())
        if not (waiting or quarantined or directory.tickets or directory.leases):
            return True
    return False
