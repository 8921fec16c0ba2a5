"""Cache nodes: two connections each, one of its slab server and one of its disk server."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from polarkv_client import errors
from polarkv_client.layout import ALIGNMENT_BYTES, MAX_PAYLOAD_BYTES, MOST_VOLUMES, stride_bytes
from polarkv_client.protocol.messages import (
    Empty,
    Heartbeat,
    HeartbeatAnswer,
    InventoryItem,
    NodeInfo,
    Op,
    OperationDone,
    OperationResult,
    Register,
    Registered,
    ReportInventory,
)
from polarkv_client.protocol.wire import MAX_BODY_BYTES, decode_body
from polarkv_client.states import NodeState
from polarkv_dataplane.manager.records.model import CacheNode
from polarkv_dataplane.manager.shell.versions import common_version
from polarkv_dataplane.runtime.settings import check_node_name

if TYPE_CHECKING:
    from polarkv_dataplane.manager.shell.manager import Manager
    from polarkv_dataplane.manager.shell.peer import Peer

INVENTORY_SLICE = 512  # items taken in before others get a turn
MOST_SLABS = 1 << 20
MOST_NODES = 1024
_MOST_COUNTERS = 512
_log = logging.getLogger(__name__)


@dataclass(eq=False)
class NodeRecord:
    """What the shell knows of one life of a cache node, beside what the core knows."""

    name: str
    number: int
    incarnation: int
    registered: Register
    slab: NodeLink | None = None
    disk: NodeLink | None = None
    heard: dict[str, int] = field(default_factory=dict)  # by role: manager's clock, ms
    counters: dict[str, dict[str, float]] = field(default_factory=dict)  # by role
    inventoried: set[str] = field(default_factory=set)  # roles that have reported all
    read_bytes: int = 0  # granted to readers, since the manager's start: over all lives of this name
    stored_bytes: int = 0  # committed, likewise
    lost: bool = False

    @property
    def inventory_complete(self) -> bool:
        """Whether this life has reported all that it holds; a node is Active before its files are known."""
        return not self.lost and self.inventoried == {"slab", "disk"}


class Nodes:
    """Every cache node that has registered; a lost one stays known by name."""

    def __init__(self, manager: Manager) -> None:
        self._manager = manager
        self.records: dict[int, NodeRecord] = {}

    def register(self, peer: Peer, request_id: int, body: bytes) -> None:
        """A slab or disk server presents itself.

        Raises:
            ProtocolError, VersionMismatch, Unauthorized, ConfigurationError, Refused: it is not taken.
        """
        manager, now = self._manager, self._manager.now()
        request = decode_body(body, Register)
        wire = common_version(request.wire_min, request.wire_max)
        manager.credentials.check_node(request.token)
        check_node_name(request.node)
        if request.role == "slab":
            record = self._join(request, now)
        elif request.role == "disk":
            record = self._pair(request, now)
        else:
            raise errors.ConfigurationError("role", request.role, "use slab or disk")
        link = NodeLink(manager, peer, record, request)
        peer.become(link)
        record.heard[request.role] = now
        if request.role == "slab":
            record.slab = link
        else:
            record.disk = link
        _log.info("cache node %s: %s registered, incarnation %d", record.name, request.role, record.incarnation)
        peer.answer(
            Op.REGISTER,
            request_id,
            Registered(
                wire=wire,
                epoch=manager.epoch,
                number=record.number,
                incarnation=record.incarnation,
                manager_now_ms=now,
                heartbeat_ms=manager.settings.heartbeat_ms,
                timeout_ms=manager.settings.node_timeout_ms,
                quarantine_ms=manager.settings.quarantine_ms,
            ),
        )
        if request.role == "disk":  # after the answer: attaching may bring the first commands
            node = manager.ledger.nodes[record.number]
            manager.directory.members.attach_disk(node, request.disk_bytes, now, request.volumes)
        manager.settle(now)

    def present(self) -> list[NodeInfo]:
        """The cache nodes that are there, for clients."""
        return [self.info(record) for record in self.records.values() if not record.lost]

    def info(self, record: NodeRecord) -> NodeInfo:
        node = self.core(record)
        request = record.registered
        state = node.state if node is not None else NodeState.DOWN
        return NodeInfo(
            record.name, record.number, record.incarnation, state, request.tcp, request.shm, request.host_id,
            request.rdma,
        )  # fmt: skip

    def by_name(self, name: str) -> NodeRecord | None:
        return next((record for record in self.records.values() if record.name == name), None)

    def core(self, record: NodeRecord) -> CacheNode | None:
        """The core's record of this life, if it is the present one."""
        return self._manager.directory.members.present(record.number, record.incarnation)

    def count(self, amounts: Mapping[int, int], *, stored: bool) -> None:
        """Add payload bytes that clients read or stored, by the cache node's number."""
        for number, size_bytes in amounts.items():
            record = self.records[number]
            if stored:
                record.stored_bytes += size_bytes
            else:
                record.read_bytes += size_bytes

    def push(self, number: int, incarnation: int, role: str, frame: bytes) -> None:
        """Send a command. Dropped when its target is gone: the loss of the node cleans up."""
        record = self.records.get(number)
        if record is None or record.incarnation != incarnation:
            return
        link = record.slab if role == "slab" else record.disk
        if link is not None:
            link.peer.send(frame)

    def changed(self, number: int, now: int) -> bool:
        """The core changed a node's state; True when a life ended: its connections close, it must register again."""
        record = self.records.get(number)
        if record is None or record.lost:
            return False
        node = self.core(record)
        if node is not None:
            _log.info("cache node %s is %s", record.name, node.state)
            return False
        self._end(record)
        return True

    def _end(self, record: NodeRecord) -> None:
        record.lost = True
        self._manager.counts.add("nodes_lost")
        _log.warning("cache node %s is lost, incarnation %d", record.name, record.incarnation)
        for link in (record.slab, record.disk):
            if link is not None:
                link.peer.close()
        record.slab = record.disk = None

    def heard(self, record: NodeRecord, role: str, now: int) -> None:
        """A sign of life of one role; the node lives as long as all that it has do."""
        record.heard[role] = now
        node = self.core(record)
        if node is not None:
            self._manager.directory.members.heard(node, min(record.heard.values()))

    def lose(self, record: NodeRecord, reason: str) -> None:
        """End this life now."""
        node = self.core(record)
        if node is not None:
            _log.warning("cache node %s: %s", record.name, reason)
            now = self._manager.now()
            self._manager.directory.members.lose(node, now)
            self._manager.settle(now)

    def check(self, now: int) -> None:
        """A slab server whose disk server has never come, or went unnoticed, keeps no record alive that is lost."""
        for record in self.records.values():
            if not record.lost and self.core(record) is None:
                self._end(record)

    def _join(self, request: Register, now: int) -> NodeRecord:
        manager = self._manager
        slab, memory = request.slab_bytes, request.memory_bytes
        if slab < ALIGNMENT_BYTES or slab % ALIGNMENT_BYTES or slab > stride_bytes(MAX_PAYLOAD_BYTES):
            raise errors.ConfigurationError("slab_bytes", slab, f"use a multiple of {ALIGNMENT_BYTES} up to 1 GiB")
        if memory // slab > MOST_SLABS:
            raise errors.ConfigurationError("slab_bytes", slab, f"use larger slabs: a node has at most {MOST_SLABS}")
        if not slab <= memory <= 1 << 46:
            raise errors.ConfigurationError("memory_bytes", memory, "use at least one slab")
        former = self.by_name(request.node)
        if former is None and len(self.records) >= MOST_NODES:
            raise errors.Refused(f"{MOST_NODES} cache nodes are known already: one manager serves no more")
        if former is not None:
            self.lose(former, "registers anew")
            del self.records[former.number]
        node = manager.directory.members.join(
            request.node, max(0, request.incarnation), memory, slab, request.fresh, now
        )
        record = NodeRecord(request.node, node.number, node.incarnation, request)
        if former is not None:
            record.read_bytes, record.stored_bytes = former.read_bytes, former.stored_bytes
        self.records[node.number] = record
        manager.recorder.node(node.name, node.number, node.incarnation)
        return record

    def _pair(self, request: Register, now: int) -> NodeRecord:
        """The life of the slab server that this disk server belongs to. Raises Refused when it is not paired."""
        record = self.by_name(request.node)
        if record is None or record.lost:
            raise errors.Refused("slab not registered yet: try again")
        for what, mine, theirs in (
            ("incarnation", request.incarnation, record.incarnation),
            ("pool", request.pool, record.registered.pool),
            ("host_id", request.host_id, record.registered.host_id),
        ):
            if mine != theirs:
                raise errors.Refused(
                    f"{what} {mine!r} is not that of the slab server of {request.node} ({theirs!r}): a disk server "
                    "must map the memory of its own slab server; attach to it again"
                )
        if request.disk_bytes < 0:
            raise errors.ConfigurationError("disk_bytes", request.disk_bytes, "use 0 or more")
        if not 1 <= request.volumes <= MOST_VOLUMES:
            raise errors.ConfigurationError("volumes", request.volumes, f"use 1 to {MOST_VOLUMES}")
        if record.disk is not None:
            self.lose(record, "a second disk server registers")
            raise errors.Refused("the former disk server was still connected: slab and disk must register again")
        return record


class NodeLink:
    """One connection of a cache node."""

    frame_bytes = MAX_BODY_BYTES

    def __init__(self, manager: Manager, peer: Peer, record: NodeRecord, request: Register) -> None:
        self.manager = manager
        self.peer = peer
        self.record = record
        self.role = request.role
        self.host_id = request.host_id

    def handle(self, op: int, request_id: int, body: bytes) -> None:
        now = self.manager.now()
        if op == Op.HEARTBEAT:
            self._heartbeat(request_id, decode_body(body, Heartbeat), now)
        elif op == Op.REPORT_INVENTORY:
            self._inventory(request_id, decode_body(body, ReportInventory))
        elif op == Op.OPERATION_DONE and self.role == "disk":
            self._done(request_id, decode_body(body, OperationDone), now)
        else:
            raise errors.ProtocolError(f"a {self.role} server cannot ask for {op}")
        self.manager.settle(now)

    def gone(self) -> None:
        record = self.record
        if record.slab is self:
            record.slab = None
        elif record.disk is self:
            record.disk = None
        else:
            return  # replaced or closed already
        self.manager.nodes.lose(record, f"the connection of its {self.role} server ended")

    def _node(self, number: int, incarnation: int) -> CacheNode:
        """The present life. Raises Refused when the message is of another one."""
        node = self.manager.directory.members.present(number, incarnation)
        if node is None or (number, incarnation) != (self.record.number, self.record.incarnation):
            raise errors.Refused(f"incarnation {incarnation} of cache node {number} is over: register again")
        return node

    def _heartbeat(self, request_id: int, request: Heartbeat, now: int) -> None:
        self._node(request.number, request.incarnation)
        self.record.counters[self.role] = dict(list(request.counters.items())[:_MOST_COUNTERS])
        self.manager.nodes.heard(self.record, self.role, now)
        self.peer.answer(Op.HEARTBEAT, request_id, HeartbeatAnswer(now))

    def _done(self, request_id: int, request: OperationDone, now: int) -> None:
        node = self._node(request.number, request.incarnation)
        slab = self.record.registered
        local = request.pool == slab.pool and self.host_id == slab.host_id
        if request.moved_bytes > 0:
            self.manager.counts.add("local_bytes" if local else "cross_node_bytes", request.moved_bytes)
        try:
            result = OperationResult(request.result)
        except ValueError as error:
            raise errors.ProtocolError(f"{request.result} is no result of an operation") from error
        known = self.manager.directory.tiering.complete(node, request.operation, result, now)
        self.manager.counts.add(f"operations_{result.name.lower()}" if known else "operations_stale")
        if result is not OperationResult.OK:
            what = (node.name, request.operation, result.name, request.text[:200])
            _log.info("cache node %s: operation %d: %s %s", *what)
        self.manager.nodes.heard(self.record, self.role, now)
        self.manager.waiting.room()
        self.peer.answer(Op.OPERATION_DONE, request_id, Empty())

    def _inventory(self, request_id: int, request: ReportInventory) -> None:
        node = self._node(request.number, request.incarnation)
        for item in request.items:
            if len(item.key) != 32 or not 0 <= item.length_bytes <= MAX_PAYLOAD_BYTES:
                raise errors.ProtocolError("an inventory item without a whole key or with an impossible length")
            if self.role == "slab" and not 0 <= item.offset_bytes < node.pool.memory_bytes:
                raise errors.ProtocolError(f"an inventory item at {item.offset_bytes}, outside of the memory")
        self.peer.hold()
        self._take(request_id, request.items, 0, request.last)

    def _take(self, request_id: int, items: list[InventoryItem], at: int, last: bool) -> None:
        try:
            self._take_slice(request_id, items, at, last)
        except Exception:
            _log.exception("cache node %s: its inventory cannot be taken in", self.record.name)
            self.manager.counts.add("internal_errors")
            self.peer.close()

    def _take_slice(self, request_id: int, items: list[InventoryItem], at: int, last: bool) -> None:
        """A slice of an inventory; the next one follows in a later turn of the loop."""
        manager, now = self.manager, self.manager.now()
        node = manager.nodes.core(self.record)
        if node is None or self.peer.transport is None:
            return  # this life ended meanwhile
        part = items[at : at + INVENTORY_SLICE]
        ended = last and at + INVENTORY_SLICE >= len(items)
        members = manager.directory.members
        if self.role == "slab":
            members.prove_memory(node, part, ended, now)
        else:
            too_long = [item for item in part if stride_bytes(item.length_bytes) > node.pool.slab_bytes]
            for item in too_long:  # no slot of this node can ever hold it
                manager.directory.tiering.forget_file(node, item.key)
            members.prove_disk(node, [item for item in part if item not in too_long] if too_long else part, now)
        manager.settle(now)
        manager.recorder.proved(node.name, [item.key for item in part])
        manager.nodes.heard(self.record, self.role, now)
        if at + INVENTORY_SLICE < len(items):
            manager.loop.call_soon(self._take, request_id, items, at + INVENTORY_SLICE, last)
            return
        if ended:
            self.record.inventoried.add(self.role)
            if self.record.inventory_complete:
                manager.recovered(node.name)
        self.peer.answer(Op.REPORT_INVENTORY, request_id, Empty())
        self.peer.release()
