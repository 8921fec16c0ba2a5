"""A race told as a story: actors act, and after each act one says what must be true.

The core is the real one; the clock is moved by hand, and disk servers answer when told to.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from polarkv_client.layout import HEADER_BYTES
from polarkv_client.protocol.messages import InventoryItem, OperationResult
from polarkv_client.states import CommitOutcome, DrainMode, EntryState, ReadOutcome, StoreOutcome, Tier
from polarkv_dataplane.manager.core.directory import Directory, Granted
from polarkv_dataplane.manager.records.effects import DiskWork, Work
from polarkv_dataplane.manager.records.model import CacheNode, Entry, Settings
from tests.model.audit import audit

SLOT_BYTES = 4096
FULL = SLOT_BYTES - HEADER_BYTES  # the payload that fills one slot
OK, FAILED, NO_SPACE, DAMAGED = (
    OperationResult.OK, OperationResult.FAILED, OperationResult.NO_SPACE, OperationResult.DAMAGED,
)  # fmt: skip


def key(name: str) -> bytes:
    """A ChunkKey that is easy to read in a failure; its last bytes are as good as random, as real ones are."""
    return name.encode().ljust(16, b".") + hashlib.blake2b(name.encode(), digest_size=16).digest()


def checksum(name: str) -> int:
    return sum(name.encode()) + 1


@dataclass
class Story:
    """The cluster, and what the narrator may ask for. Every step ends with a recount of the books."""

    settings: Settings = field(default_factory=Settings)
    now: int = 1000
    disk_queue: list[DiskWork] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.directory = Directory(self.settings)
        self.tenant = self.directory.ledger.tenant(7, "tenant")

    # Nodes

    def node(
        self, name: str = "n", slots: int = 1, files: int = 8, last: int = 0, fresh: bool = True,
        slab_slots: int = 1, volumes: int = 1,
    ) -> CacheNode:  # fmt: skip
        """A cache node joins and is Active; its slabs have one slot each, or ``slab_slots``."""
        node = self.directory.members.join(name, last, slots * SLOT_BYTES, slab_slots * SLOT_BYTES, fresh, self.now)
        self.directory.members.prove_memory(node, [], True, self.now)
        self.directory.members.attach_disk(node, files * SLOT_BYTES, self.now, volumes)
        self.done()
        return node

    def item(self, name: str, offset_bytes: int = -1, told_checksum: int | None = None) -> InventoryItem:
        return InventoryItem(key(name), FULL, told_checksum or checksum(name), 7, offset_bytes)

    def drain(self, node: CacheNode, mode: DrainMode) -> None:
        self.directory.members.drain(node, mode, self.now)
        self.done()

    # Clients

    def begin(self, name: str, expect: StoreOutcome = StoreOutcome.GRANTED) -> Granted:
        granted = self.directory.begin_store([key(name)], [FULL], self.tenant, self.now)
        assert StoreOutcome(granted.outcomes[0]) is expect
        self.done()
        return granted

    def commit(self, granted: Granted, name: str, expect: CommitOutcome = CommitOutcome.COMMITTED) -> None:
        outcomes = self.directory.commit_store(granted.number, [key(name)], [checksum(name)], self.now)
        assert CommitOutcome(outcomes[0]) is expect
        self.done()

    def put(self, name: str) -> None:
        self.commit(self.begin(name), name)

    def acquire(self, name: str, expect: ReadOutcome = ReadOutcome.GRANTED) -> Granted:
        granted = self.directory.acquire_read([key(name)], self.now)
        assert ReadOutcome(granted.outcomes[0]) is expect
        self.done()
        return granted

    def release(self, granted: Granted, clean: bool = True) -> None:
        self.directory.release_read(granted.number, clean, self.now)
        self.done()

    # The disk server, and time

    def disk(self, work: Work, result: OperationResult = OK) -> DiskWork:
        """The disk server finishes its oldest command, which must be this ``work``."""
        command = self.disk_queue.pop(0)
        assert command.work is work, command
        node = self.directory.members.present(command.node, command.incarnation)
        if node is not None and command.operation:
            self.directory.tiering.complete(node, command.operation, result, self.now)
        self.done()
        return command

    def wait(self, span_ms: int, silent: tuple[CacheNode, ...] = ()) -> None:
        """Time passes; nodes that are not ``silent`` show signs of life, and the manager ticks."""
        self.now += span_ms
        for node in self.directory.ledger.nodes.values():
            if node not in silent:
                self.directory.members.heard(node, self.now)
        self.directory.tick(self.now)
        self.done()

    # What is true

    def expect(self, name: str, state: EntryState | None, tier: Tier | None = None) -> Entry | None:
        entry = self.directory.ledger.entries.get(key(name))
        assert (entry.state if entry else None) is state
        if tier is not None:
            assert self.directory.exists([key(name)]) == bytes([tier])
        return entry

    def done(self) -> None:
        self.disk_queue += [e for e in self.directory.ledger.take_effects() if isinstance(e, DiskWork)]
        audit(self.directory)
