"""Cache nodes come, prove what they hold, drain, and go."""

from __future__ import annotations

from collections.abc import Iterable

from polarkv_client.layout import stride_bytes
from polarkv_client.protocol.messages import InventoryItem
from polarkv_client.states import DrainMode, NodeState
from polarkv_client.states import EntryState as S
from polarkv_dataplane.manager.core.ledger import Ledger
from polarkv_dataplane.manager.core.table import Event
from polarkv_dataplane.manager.core.tiering import Tiering
from polarkv_dataplane.manager.records.effects import NodeChanged
from polarkv_dataplane.manager.records.model import CacheNode, Entry
from polarkv_dataplane.manager.records.slots import SlotPool


class Membership:
    """The node table of one ledger."""

    def __init__(self, ledger: Ledger, tiering: Tiering) -> None:
        self.ledger = ledger
        self.tiering = tiering
        self._incarnations: dict[str, tuple[int, int]] = {}  # by name: number, last incarnation

    def known(self, name: str, number: int, incarnation: int) -> None:
        """Remember a node from an earlier life of the manager: its number stays, its incarnations only rise."""
        self._incarnations[name] = (number, incarnation)

    def present(self, number: int, incarnation: int) -> CacheNode | None:
        """The node, if this is its present life; whatever comes from another life is dropped by who asks."""
        node = self.ledger.nodes.get(number)
        return node if node is not None and node.incarnation == incarnation else None

    def join(self, name: str, incarnation: int, memory_bytes: int, slab_bytes: int, fresh: bool, now: int) -> CacheNode:
        """A slab server registers: a new life begins, the former one, if any, is lost.

        Memory that is not fresh may still be written and read under the tickets and leases of the former life: no slot
        is granted before the last of them has ended.
        """
        unused = 1 + max((number for number, _ in self._incarnations.values()), default=0)
        number, last = self._incarnations.get(name, (unused, 0))
        if number in self.ledger.nodes:
            self.lose(self.ledger.nodes[number], now)
        settings = self.ledger.settings
        longest_ms = max(settings.write_ticket_ms, settings.read_lease_ms) + settings.quarantine_ms
        fence = 0 if fresh else now + longest_ms
        pool = SlotPool(memory_bytes, slab_bytes)
        node = CacheNode(name, number, max(last, incarnation) + 1, pool, now, fence)
        self._incarnations[name] = (number, node.incarnation)
        self.ledger.nodes[number] = node
        self._set_state(node, NodeState.JOINING)
        return node

    def attach_disk(self, node: CacheNode, disk_bytes: int, now: int, volumes: int = 1) -> None:
        """The node's disk server registered for the node's present life."""
        node.has_disk, node.disk_bytes = True, disk_bytes
        node.offloads.spread(volumes)
        self._activate(node, now)

    def prove_memory(self, node: CacheNode, items: Iterable[InventoryItem], last: bool, now: int) -> None:
        """Valid headers that a slab server found: entries again, unless the key is already held somewhere."""
        for item in () if node.memory_proved else items:
            stride = stride_bytes(item.length_bytes)
            if item.key not in self.ledger.entries and node.pool.claim(item.offset_bytes, stride):
                entry = Entry(item.key, node, item.length_bytes, self.ledger.tenant(item.tenant), item.checksum)
                self.ledger.change(entry, Event.PROVED_IN_MEMORY, now, item.offset_bytes)
        if last:
            node.memory_proved = True
            self._activate(node, now)

    def prove_disk(self, node: CacheNode, items: Iterable[InventoryItem], now: int) -> None:
        """Files that a disk server found; a file that contradicts the entry of its key, or has a twin, is deleted."""
        for item in items:
            entry = self.ledger.entries.get(item.key)
            if entry is None:
                entry = Entry(item.key, node, item.length_bytes, self.ledger.tenant(item.tenant), item.checksum)
                self.ledger.change(entry, Event.PROVED_ON_DISK, now)
            elif entry.node is not node:
                self.tiering.forget_file(node, item.key)
            elif entry.state is S.MEMORY and (entry.length_bytes, entry.checksum) == (item.length_bytes, item.checksum):
                self.ledger.change(entry, Event.PROVED_ON_DISK, now)
            elif entry.state in (S.WRITING, S.MEMORY):
                self.tiering.forget_file(node, item.key)

    def heard(self, node: CacheNode, now: int) -> None:
        """A sign of life."""
        node.heard_ms = now

    def lose(self, node: CacheNode, now: int) -> None:
        """The node is gone: every entry on it is absent, no other is touched. Its record is of no use any more."""
        doomed = [*node.pool.entries(), *node.disk]
        doomed += [operation.entry for operation in node.operations.values() if operation.entry.state is S.PURGING]
        for entry in doomed:
            self.ledger.change(entry, Event.NODE_LOST, now)
        node.operations.clear()
        node.offloads.clear()
        self._set_state(node, NodeState.DOWN)
        del self.ledger.nodes[node.number]

    def drain(self, node: CacheNode, mode: DrainMode, now: int) -> None:
        """Stop granting; when the grants have ended, offload (Flush) or drop (Discard) what only memory has."""
        node.drain_mode = mode
        if node.state in (NodeState.ACTIVE, NodeState.DRAINED):
            self._set_state(node, NodeState.DRAINING)
        self.advance_drain(node, now)

    def cancel_drain(self, node: CacheNode) -> None:
        if node.state in (NodeState.DRAINING, NodeState.DRAINED):
            self._set_state(node, NodeState.ACTIVE)

    def advance_drain(self, node: CacheNode, now: int) -> None:
        """Take the next step of a drain, as far as grants and operations allow."""
        if node.state is not NodeState.DRAINING or node.holds:
            return
        if node.drain_mode is DrainMode.DISCARD:
            for entry in [entry for entry in node.memory if entry.state is not S.OFFLOADING]:
                self.tiering.evict(entry, now, forced=True)
        else:
            self.tiering.pump(node, now)
        if not node.dirty_bytes and not node.operations:
            self._set_state(node, NodeState.DRAINED)

    def _activate(self, node: CacheNode, now: int) -> None:
        if node.state is NodeState.JOINING and node.memory_proved and node.has_disk:
            self._set_state(node, NodeState.ACTIVE)
            self.tiering.pump(node, now)

    def _set_state(self, node: CacheNode, state: NodeState) -> None:
        node.state = state
        self.ledger.effects.append(NodeChanged(node.number))
