"""Too many keys: what the manager lets go, and how much of it at a time."""

from __future__ import annotations

from polarkv_client.protocol.messages import InventoryItem, OperationResult
from polarkv_client.states import EntryState
from polarkv_dataplane.manager.core.directory import Directory
from polarkv_dataplane.manager.records.model import CacheNode, Settings
from tests.support.managers import MIB, key


def full(settings: Settings, count: int) -> tuple[Directory, CacheNode]:
    """A directory whose one node has ``count`` entries on disk."""
    directory = Directory(settings)
    node = directory.members.join("n1", 0, MIB, MIB, True, 0)
    directory.members.attach_disk(node, 1 << 40, 0)
    directory.members.prove_memory(node, [], True, 0)
    directory.members.prove_disk(node, [InventoryItem(key(n), 1000, 7, 1) for n in range(count)], 0)
    return directory, node


def test_what_is_being_purged_is_not_purged_for_again() -> None:
    directory, node = full(Settings(max_keys=100), 150)
    for now in (0, 100, 200):
        directory.tick(now)
        assert directory.ledger.counts[EntryState.PURGING] == 52
    for operation in list(node.operations):
        directory.tiering.complete(node, operation, OperationResult.OK, 300)
    directory.tick(300)
    assert len(directory.ledger.entries) == 98


def test_no_more_is_asked_of_a_disk_than_it_can_answer_in_time() -> None:
    directory, node = full(Settings(max_keys=100, operations_per_node=2), 500)
    directory.tick(0)
    directory.tick(100)
    assert len(node.operations) == 64
