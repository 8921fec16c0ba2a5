"""The core with one rule taken away at a time. Each is found by the search, which shows what the rule is for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from polarkv_client.protocol.messages import OperationResult
from polarkv_client.states import CommitOutcome, NodeState
from polarkv_client.states import EntryState as S
from polarkv_dataplane.manager.core.directory import Directory
from polarkv_dataplane.manager.core.ledger import Ledger
from polarkv_dataplane.manager.core.membership import Membership
from polarkv_dataplane.manager.core.table import Event
from polarkv_dataplane.manager.core.tiering import Tiering
from polarkv_dataplane.manager.records.effects import Work
from polarkv_dataplane.manager.records.model import CacheNode, Entry, Lease
from polarkv_dataplane.manager.records.slots import SlotPool
from tests.model.scope import Scope

Patch = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class Mutant:
    """``breaks`` is a part of the rule that the search must report."""

    name: str
    patch: Patch
    scope: Scope
    breaks: str


def no_quarantine(patch: pytest.MonkeyPatch) -> None:
    give_back = SlotPool.give_back

    def at_once(self: SlotPool, offset_bytes: int, from_ms: int, now: int) -> None:
        give_back(self, offset_bytes, 0, now)

    patch.setattr(SlotPool, "give_back", at_once)


def late_completion_accepted(patch: pytest.MonkeyPatch) -> None:
    complete = Tiering.complete

    def whatever_is_open(self: Tiering, node: CacheNode, operation: int, result: OperationResult, now: int) -> bool:
        answered = operation if operation in node.operations else min(node.operations, default=0)
        return complete(self, node, answered, result, now)

    patch.setattr(Tiering, "complete", whatever_is_open)


def no_tombstone(patch: pytest.MonkeyPatch) -> None:
    def forgotten_at_once(self: Tiering, entry: Entry, now: int) -> None:
        self.ledger.change(entry, Event.EVICT, now)
        self.ledger.change(entry, Event.PURGED, now)
        self.forget_file(entry.node, entry.key)

    patch.setattr(Tiering, "purge", forgotten_at_once)


def lease_ignored_by_evict(patch: pytest.MonkeyPatch) -> None:
    evict = Tiering.evict

    def evict_anyway(self: Tiering, entry: Entry, now: int, *, forced: bool = False) -> bool:
        holds, entry.holds = entry.holds, 0
        try:
            return evict(self, entry, now, forced=forced)
        finally:
            entry.holds = holds

    patch.setattr(Tiering, "evict", evict_anyway)


def lease_ignored_by_drain(patch: pytest.MonkeyPatch) -> None:
    advance_drain = Membership.advance_drain

    def advance_anyway(self: Membership, node: CacheNode, now: int) -> None:
        holds, node.holds = node.holds, 0
        try:
            advance_drain(self, node, now)
        finally:
            node.holds += holds

    patch.setattr(Membership, "advance_drain", advance_anyway)


def slot_granted_on_a_drained_node(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CacheNode, "serving", property(lambda node: node.state in (NodeState.ACTIVE, NodeState.DRAINED)))


def no_incarnation_check(patch: pytest.MonkeyPatch) -> None:
    def whoever_has_the_number(self: Membership, number: int, incarnation: int) -> CacheNode | None:
        return self.ledger.nodes.get(number)

    patch.setattr(Membership, "present", whoever_has_the_number)


def former_life_not_fenced(patch: pytest.MonkeyPatch) -> None:
    join = Membership.join

    def join_as_fresh(self: Membership, *what: Any) -> CacheNode:
        name, incarnation, memory_bytes, slab_bytes, _fresh, now = what
        return join(self, name, incarnation, memory_bytes, slab_bytes, True, now)

    patch.setattr(Membership, "join", join_as_fresh)


def expired_lease_not_fenced(patch: pytest.MonkeyPatch) -> None:
    end_lease = Directory._end_lease

    def end_as_clean(self: Directory, lease: Lease, *, fenced: bool) -> None:
        end_lease(self, lease, fenced=False)

    patch.setattr(Directory, "_end_lease", end_as_clean)


def aborted_ticket_not_fenced(patch: pytest.MonkeyPatch) -> None:
    change = Ledger.change

    def change_unfenced(self: Ledger, entry: Entry, event: Event, now: int, offset_bytes: int = -1) -> None:
        if event is Event.ABORT:
            entry.fence_ms = 0
        change(self, entry, event, now, offset_bytes)

    patch.setattr(Ledger, "change", change_unfenced)


def commit_of_anothers_entry_accepted(patch: pytest.MonkeyPatch) -> None:
    commit_store = Directory.commit_store

    def commit_by_key(self: Directory, number: int, keys: list[bytes], checksums: list[int], now: int) -> bytes:
        outcomes = bytearray(commit_store(self, number, keys, checksums, now))
        for place, (key, checksum) in enumerate(zip(keys, checksums, strict=True)):
            entry = self.ledger.entries.get(key)
            if outcomes[place] == CommitOutcome.EXPIRED and entry is not None and entry.state is S.WRITING:
                self.tickets[entry.operation].entries.pop(key)
                entry.checksum = checksum
                self.ledger.change(entry, Event.COMMIT, now)
                outcomes[place] = CommitOutcome.COMMITTED
        return bytes(outcomes)

    patch.setattr(Directory, "commit_store", commit_by_key)


def readable_while_loading(patch: pytest.MonkeyPatch) -> None:
    ask_disk = Ledger.ask_disk

    def done_when_asked(self: Ledger, entry: Entry, work: Work, now: int) -> None:
        ask_disk(self, entry, work, now)
        if work is Work.LOAD:
            del entry.node.operations[entry.operation]
            self.change(entry, Event.LOADED, now)

    patch.setattr(Ledger, "ask_disk", done_when_asked)


def stray_files_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Tiering, "forget_file", lambda self, node, key: None)


MEMORY = Scope("memory alone", files=0, horizon_ms=5)
DRAIN = Scope("drain", drains=("Flush",), horizon_ms=3)
MUTANTS = [
    Mutant("no quarantine", no_quarantine, MEMORY, "lies whole in its slot"),
    Mutant("late completion accepted", late_completion_accepted, Scope("echo", echoes=1, horizon_ms=3),
           "completion of another"),
    Mutant("no tombstone", no_tombstone, Scope("disk reorders", files=2, ordered_disk=False, admin=True, horizon_ms=1),
           "lies whole in its file"),
    Mutant("no tombstone, ordered disk", no_tombstone, Scope("full disk", horizon_ms=3), "more than it has"),
    Mutant("lease ignored by evict", lease_ignored_by_evict, Scope("leases", horizon_ms=3), "leases exist only"),
    Mutant("lease ignored by drain", lease_ignored_by_drain, DRAIN, "a Drained node has no grant"),
    Mutant("slot granted on a Drained node", slot_granted_on_a_drained_node, DRAIN, "a Drained node has no grant"),
    Mutant("no incarnation check", no_incarnation_check,
           Scope("crash", fresh_crashes=1, returns=2, horizon_ms=1), "lies whole in its slot"),
    Mutant("former life not fenced", former_life_not_fenced,
           Scope("return", returns=1, horizon_ms=3), "lies whole in its slot"),
    Mutant("expired lease not fenced", expired_lease_not_fenced,
           Scope("late reader", prompt_readers=False, horizon_ms=5), "a load returns"),
    Mutant("aborted ticket not fenced", aborted_ticket_not_fenced, MEMORY, "lies whole in its slot"),
    Mutant("commit of another's entry accepted", commit_of_anothers_entry_accepted, MEMORY, "lies whole in its slot"),
    Mutant("readable while loading", readable_while_loading, Scope("load", horizon_ms=3), "lies whole in its slot"),
    Mutant("stray files kept", stray_files_kept, Scope("stray", returns=1, horizon_ms=6), "accounted"),
]  # fmt: skip
