"""The routes under /v1: what an administrator asks of a manager."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, FastAPI, Path, Query

from polarkv_client.errors import ConfigurationError
from polarkv_client.states import NodeState
from polarkv_dataplane.manager.records.model import Entry, Tenant
from polarkv_dataplane.manager.shell import api
from polarkv_dataplane.manager.shell.listing import Listing, slices
from polarkv_dataplane.runtime.settings import check_node_name

if TYPE_CHECKING:
    from polarkv_dataplane.manager.records.model import CacheNode
    from polarkv_dataplane.manager.shell.manager import Manager
    from polarkv_dataplane.manager.shell.nodes import NodeRecord

SLICE = 256
LONGEST_S = 8.0  # callers wait ten seconds
_MOST_TENANTS = 10_000


class Refusal(Exception):
    """An answer that is not a success."""

    def __init__(self, status: int, field: str, value: object, fix: str) -> None:
        super().__init__(fix)
        self.status = status
        self.problem = api.Problem(detail=f"{field}={value!r}: {fix}", field=field, value=str(value), fix=fix)


def add_routes(app: FastAPI, manager: Manager, guard: Any, started: float) -> None:
    """Add everything under /v1, behind ``guard``."""
    router = APIRouter(prefix="/v1", dependencies=[guard])
    _add_nodes(router, manager, started)
    _add_entries(router, manager)
    _add_tenants(router, manager)

    @router.get("/stats", tags=["cache"], summary="Totals and what is there now")
    async def stats() -> api.Stats:
        return make_stats(manager, started)

    @router.get("/settings", tags=["cache"], summary="The manager's settings, without secrets")
    async def settings() -> dict[str, Any]:
        return manager.settings.model_dump(mode="json")  # secrets show as asterisks

    app.include_router(router)


def _add_nodes(router: APIRouter, manager: Manager, started: float) -> None:
    def find(name: str) -> tuple[NodeRecord, CacheNode]:
        record = manager.nodes.by_name(name)
        if record is None:
            raise Refusal(404, "name", name, "no cache node has this name: see GET /v1/nodes")
        node = manager.nodes.core(record)
        if node is None:
            raise Refusal(409, "name", name, "this cache node is Down: it drains once it has registered again")
        return record, node

    @router.get("/nodes", tags=["nodes"], summary="Every cache node")
    async def nodes() -> api.Nodes:
        views = [view_node(manager, record) for record in manager.nodes.records.values()]
        return api.Nodes(epoch=manager.epoch, uptime_s=time.monotonic() - started, nodes=views)

    @router.post("/nodes/{name}/drain", tags=["nodes"], summary="Stop granting on a cache node, then flush or discard")
    async def drain(name: str, request: api.Drain) -> api.NodeView:
        record, node = find(name)
        if node.state is NodeState.JOINING:
            raise Refusal(409, "name", name, "this cache node is Joining: drain it once it is Active")
        now = manager.now()
        manager.directory.members.drain(node, request.mode, now)
        manager.settle(now)
        return view_node(manager, record)

    @router.post("/nodes/{name}/cancel-drain", tags=["nodes"], summary="Let a cache node serve again")
    async def cancel_drain(name: str) -> api.NodeView:
        record, node = find(name)
        manager.directory.members.cancel_drain(node)
        manager.settle(manager.now())
        return view_node(manager, record)


def _add_entries(router: APIRouter, manager: Manager) -> None:
    listing = Listing(manager.ledger.entries)
    one_key = Query(default="", pattern="^([0-9a-fA-F]{64})?$", description="Key that the page before ended with.")
    some_digits = Query(default="", pattern="^[0-9a-fA-F]{0,64}$", description="First hexadecimal digits of the keys.")

    @router.get("/entries", tags=["cache"], summary="Entries in the order of their keys")
    async def entries(
        limit: Annotated[int, Query(ge=1, le=10_000)] = 1000, after: str = one_key, prefix: str = some_digits
    ) -> api.Entries:
        first, last = bytes.fromhex(prefix.ljust(64, "0")), bytes.fromhex(prefix.ljust(64, "f"))
        found = await listing.page(limit, bytes.fromhex(after), first, last)
        now = manager.now()
        views = [view_entry(entry, now) for entry in found if entry.state is not None]
        return api.Entries(entries=views, next=found[-1].key.hex() if len(found) == limit else None)

    @router.get("/entries/{key}", tags=["cache"], summary="One entry")
    async def entry(key: Annotated[str, Path(pattern="^[0-9a-fA-F]{64}$")]) -> api.EntryView:
        found = manager.ledger.entries.get(bytes.fromhex(key))
        if found is None:
            raise Refusal(404, "key", key, "there is no such entry")
        return view_entry(found, manager.now())

    @router.post("/pin", tags=["cache"], summary="Keep entries cached for a time, or no longer")
    async def pin(request: api.Pin) -> api.Pinned:
        until_wall_ms = time.time_ns() // 1_000_000 + request.ttl_ms if request.ttl_ms else 0
        done = total = 0
        async for part in slices(_selected(manager, request), SLICE):
            keys, now = list(part), manager.now()
            pinned = manager.directory.pin(keys, now + request.ttl_ms if request.ttl_ms else 0, now)
            manager.recorder.pinned({key: until_wall_ms for key, ok in zip(keys, pinned, strict=True) if ok})
            done, total = done + sum(pinned), total + len(keys)
        return api.Pinned(pinned=done, not_now=total - done)

    @router.post("/evict", tags=["cache"], summary="Drop memory copies that disk has too, or whole entries")
    async def evict(request: api.Evict) -> api.Evicted:
        deadline = time.monotonic() + LONGEST_S
        keys = _selected(manager, request)
        done = 0
        async for part in slices(keys, SLICE):
            if time.monotonic() >= deadline or not await _quiet(manager, deadline):
                break
            now = manager.now()
            done += sum(manager.directory.evict(list(part), purge=request.purge, now=now))
            manager.settle(now)
        manager.waiting.room()
        return api.Evicted(evicted=done, not_now=len(keys) - done)


def _add_tenants(router: APIRouter, manager: Manager) -> None:
    @router.get("/tenants", tags=["tenants"], summary="Tenants, their quotas and use")
    async def tenants() -> api.Tenants:
        known = sorted(manager.ledger.tenants.values(), key=lambda tenant: tenant.name)
        return api.Tenants(tenants=[view_tenant(manager, tenant) for tenant in known])

    @router.put("/tenants/{name}", tags=["tenants"], summary="Set a tenant's quota")
    async def put_tenant(name: str, request: api.Quota) -> api.TenantView:
        try:
            check_node_name(name)
        except ConfigurationError as error:
            raise Refusal(422, "name", name, error.fix) from error
        if len(manager.ledger.tenants) >= _MOST_TENANTS:
            raise Refusal(409, "name", name, f"there are {_MOST_TENANTS} tenants already")
        if request.quota_bytes is None:
            manager.quotas_set.discard(name)
            tenant = manager.set_quota(name, manager.credentials.quotas.get(name, 0))
        else:
            manager.quotas_set.add(name)
            tenant = manager.set_quota(name, request.quota_bytes)
        manager.recorder.quota(name, request.quota_bytes)
        return view_tenant(manager, tenant)


def _selected(manager: Manager, request: api.Selection) -> list[bytes]:
    return list(manager.ledger.entries) if request.all else [bytes.fromhex(key) for key in request.keys]


async def _quiet(manager: Manager, deadline: float) -> bool:
    """Wait until no disk server has so much to do that a purge more could be overdue. False: not in time."""
    most = 4 * manager.settings.operations_per_node
    while any(len(node.operations) >= most for node in manager.ledger.nodes.values()):
        if time.monotonic() >= deadline:
            return False
        await asyncio.sleep(0.01)
    return True


def view_node(manager: Manager, record: NodeRecord) -> api.NodeView:
    """A cache node as the API shows it."""
    node, info, now = manager.nodes.core(record), manager.nodes.info(record), manager.now()
    return api.NodeView(
        name=record.name,
        number=record.number,
        incarnation=record.incarnation,
        state=NodeState(info.state),
        tcp=info.tcp,
        shm=info.shm,
        rdma=info.rdma,
        host_id=info.host_id,
        memory_bytes=node.pool.memory_bytes if node else 0,
        memory_used_bytes=node.pool.used_bytes if node else 0,
        memory_free_bytes=node.pool.free_bytes() if node else 0,
        memory_quarantined_bytes=node.pool.quarantined_bytes() if node else 0,
        memory_usable_bytes=node.pool.usable_bytes if node else 0,
        memory_entries=node.memory.count if node else 0,
        disk_bytes=node.disk_bytes if node else 0,
        disk_used_bytes=node.disk_used_bytes if node else 0,
        disk_only_entries=node.disk.count if node else 0,
        dirty_bytes=node.dirty_bytes if node else 0,
        quarantined_slots=len(node.pool.quarantined) if node else 0,
        operations=len(node.operations) if node else 0,
        holds=node.holds if node else 0,
        heard_ms_ago=max(0, now - min(record.heard.values(), default=now)),
        inventory_complete=record.inventory_complete,
        read_bytes=record.read_bytes,
        stored_bytes=record.stored_bytes,
    )


def view_entry(entry: Entry, now: int) -> api.EntryView:
    """An entry as the API shows it."""
    return api.EntryView(
        key=entry.key.hex(),
        state=entry.state.word if entry.state is not None else "Absent",
        node=entry.node.name,
        tenant=entry.tenant.name,
        length_bytes=entry.length_bytes,
        stride_bytes=entry.stride_bytes,
        checksum=f"{entry.checksum:016x}",
        leases=entry.holds,
        pinned_ms=max(0, entry.pinned_until_ms - now),
    )


def view_tenant(manager: Manager, tenant: Tenant) -> api.TenantView:
    """A tenant as the API shows it."""
    in_file = "file" if tenant.name in manager.credentials.quotas else "none"
    return api.TenantView(
        name=tenant.name,
        number=tenant.number,
        quota_bytes=tenant.quota_bytes,
        used_bytes=tenant.used_bytes,
        quota_from="admin" if tenant.name in manager.quotas_set else in_file,
    )


def make_stats(manager: Manager, started: float) -> api.Stats:
    """Everything that is counted."""
    ledger, nodes = manager.ledger, list(manager.ledger.nodes.values())
    counts = manager.all_counts()
    return api.Stats(
        epoch=manager.epoch,
        uptime_s=time.monotonic() - started,
        entries=len(ledger.entries),
        entries_by_state={state.word: count for state, count in ledger.counts.items() if state is not None},
        memory_bytes=sum(node.pool.memory_bytes for node in nodes),
        memory_used_bytes=sum(node.pool.used_bytes for node in nodes),
        disk_bytes=sum(node.disk_bytes for node in nodes),
        disk_used_bytes=sum(node.disk_used_bytes for node in nodes),
        pinned_bytes=ledger.pins.bytes,
        leases=len(manager.directory.leases),
        tickets=len(manager.directory.tickets),
        waiting_calls=len(manager.waiting),
        connections=len(manager.peers),
        hits_memory=counts.get("hits_memory", 0),
        hits_disk=counts.get("hits_disk", 0),
        misses=counts.get("misses", 0),
        cross_node_bytes=counts.get("cross_node_bytes", 0),
        metadata_connected=manager.recorder.connected,
        metadata_waiting=manager.recorder.waiting,
        counts=counts,
        node_counters={record.name: record.counters for record in manager.nodes.records.values()},
    )
