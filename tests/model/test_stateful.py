"""Larger worlds at random, with a fixed seed: nodes, size classes, tenants with quotas, pins, a cap on keys, LRU order.

The model beside the core is small: what must be visible, who may still commit, in which order memory copies were used.
The books are recounted after every step.
"""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from polarkv_client.layout import stride_bytes
from polarkv_client.protocol.messages import InventoryItem, OperationResult
from polarkv_client.states import CommitOutcome, DrainMode, NodeState, ReadOutcome, StoreOutcome, Tier
from polarkv_client.states import EntryState as S
from polarkv_dataplane.manager.core.directory import Directory, Granted
from polarkv_dataplane.manager.records.effects import DiskWork
from polarkv_dataplane.manager.records.model import CacheNode, LruList, Settings
from tests.model.audit import audit, settles
from tests.model.scenario import key

KEYS = [key(f"chunk {number}") for number in range(14)]
LENGTHS = [4000, 8000, 16000]  # three size classes
SLAB_BYTES = 16384 + 4096
MAX_KEYS = 12
QUOTA_BYTES = 10 * 4096

keys = st.lists(st.sampled_from(KEYS), min_size=1, max_size=6, unique=True)
seldom = st.sampled_from([False] * 7 + [True])  # what takes a node away leaves little to look at
places = st.integers(min_value=0, max_value=40)


class Cluster(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 1000
        self.directory = Directory(Settings(max_keys=MAX_KEYS, operations_per_node=4, victim_scan=8))
        self.tenants = [self.directory.ledger.tenant(1), self.directory.ledger.tenant(2)]
        self.tenants[1].quota_bytes = QUOTA_BYTES
        self.tickets: list[tuple[Granted, list[bytes], int]] = []
        self.leases: list[tuple[Granted, int]] = []
        self.work: list[DiskWork] = []
        self.recency: dict[int, list[bytes]] = {}  # by node: keys with a readable memory copy, oldest first
        for name in ("a", "b", "c"):
            self.join(name, True)

    @property
    def nodes(self) -> list[CacheNode]:
        return list(self.directory.ledger.nodes.values())

    def join(self, name: str, fresh: bool) -> None:
        members = self.directory.members
        node = members.join(name, 0, 3 * SLAB_BYTES, SLAB_BYTES, fresh, self.now)
        members.prove_memory(node, [], True, self.now)
        members.attach_disk(node, 10 * 4096, self.now)

    @rule(name=st.sampled_from("abc"), fresh=st.booleans(), found=keys, length=st.sampled_from(LENGTHS), luck=seldom)
    def node_returns(self, name: str, fresh: bool, found: list[bytes], length: int, luck: bool) -> None:
        if not luck:
            return
        self.join(name, fresh)
        node = next(node for node in self.nodes if node.name == name)
        items = [InventoryItem(one, length, 5, 1) for one in found]
        self.directory.members.prove_disk(node, items, self.now)
        for one in found:
            entry = self.directory.ledger.entries[one]
            assert entry.node is not node or entry.state in (S.DISK, S.MEMORY_AND_DISK)

    @rule(wanted=keys, lengths=st.lists(st.sampled_from(LENGTHS), min_size=6, max_size=6), place=st.integers(0, 1))
    def begin(self, wanted: list[bytes], lengths: list[int], place: int) -> None:
        there, count = dict(self.directory.ledger.entries), len(self.directory.ledger.entries)
        serving = [node for node in self.nodes if node.state is NodeState.ACTIVE]
        tenant, sizes = self.tenants[place], lengths[: len(wanted)]
        granted = self.directory.begin_store(wanted, sizes, tenant, self.now)
        for one, length, outcome, entry in zip(wanted, sizes, granted.outcomes, granted.entries, strict=True):
            assert (entry is not None) == (outcome == StoreOutcome.GRANTED)
            if one in there and there[one].state is not None:
                assert outcome in (StoreOutcome.EXISTS, StoreOutcome.IN_PROGRESS)
            if entry is not None:
                assert entry.node in serving and entry.length_bytes == length
                assert entry.node.pool.slab_of(entry.offset_bytes).stride_bytes == stride_bytes(length)
        assert not tenant.quota_bytes or tenant.used_bytes <= max(tenant.quota_bytes, tenant.used_bytes)
        assert len(self.directory.ledger.entries) <= max(MAX_KEYS, count)
        if granted.number:
            stored = [one for one, entry in zip(wanted, granted.entries, strict=True) if entry is not None]
            self.tickets.append((granted, stored, self.now + self.directory.settings.write_ticket_ms))

    @rule(wanted=keys, lengths=st.lists(st.sampled_from(LENGTHS), min_size=6, max_size=6), place=st.integers(0, 1))
    def store(self, wanted: list[bytes], lengths: list[int], place: int) -> None:
        before = len(self.tickets)
        self.begin(wanted, lengths, place)
        if len(self.tickets) > before:
            self.finish(before, False)

    @precondition(lambda self: self.tickets)
    @rule(place=places, abort=st.booleans())
    def finish(self, place: int, abort: bool) -> None:
        granted, stored, ends_ms = self.tickets.pop(place % len(self.tickets))
        if abort:
            self.directory.abort_store(granted.number, stored, self.now)
            return
        alive = [entry is not None and entry.state is S.WRITING and self.now < ends_ms for entry in granted.entries]
        alive = [one for one, entry in zip(alive, granted.entries, strict=True) if entry is not None]
        outcomes = self.directory.commit_store(granted.number, stored, [5] * len(stored), self.now)
        assert list(outcomes) == [CommitOutcome.COMMITTED if one else CommitOutcome.EXPIRED for one in alive]
        for one, good in zip(stored, alive, strict=True):
            assert not good or self.directory.exists([one])[0] or not self.is_served(one)

    def is_served(self, one: bytes) -> bool:
        entry = self.directory.ledger.entries.get(one)
        return entry is not None and entry.node.state is NodeState.ACTIVE and entry.state is not S.PURGING

    @rule(wanted=keys)
    def acquire(self, wanted: list[bytes]) -> None:
        before = self.directory.exists(wanted)
        granted = self.directory.acquire_read(wanted, self.now)
        for tier, outcome, entry in zip(before, granted.outcomes, granted.entries, strict=True):
            assert (outcome == ReadOutcome.MISS) == (tier == Tier.NONE) or outcome != ReadOutcome.GRANTED
            if entry is not None:
                assert tier == Tier.MEMORY and entry.holds and entry.node.memory.newest is not None
        last = [entry for entry in granted.entries if entry is not None][-1:]
        assert all(entry.node.memory.newest is entry for entry in last)
        for entry in granted.entries:
            if entry is not None:
                self.recency.get(entry.node.number, []).remove(entry.key)
                self.recency[entry.node.number].append(entry.key)
        if granted.number:
            self.leases.append((granted, self.now + self.directory.settings.read_lease_ms))

    @precondition(lambda self: self.leases)
    @rule(place=places, how=st.sampled_from(["clean", "unclean", "damaged"]))
    def release(self, place: int, how: str) -> None:
        granted, _ = self.leases.pop(place % len(self.leases))
        if how == "damaged":
            found = [entry.key for entry in granted.entries if entry is not None][:1]
            self.directory.report_damaged(granted.number, found, True, self.now)
        else:
            self.directory.release_read(granted.number, how == "clean", self.now)

    @precondition(lambda self: self.work)
    @rule(place=places, result=st.sampled_from([OperationResult.OK] * 6 + list(OperationResult)))
    def disk_answers(self, place: int, result: OperationResult) -> None:
        done = self.work.pop(place % len(self.work))
        node = self.directory.members.present(done.node, done.incarnation)
        if node is not None:
            assert self.directory.tiering.complete(node, done.operation, result, self.now) == bool(done.operation)
            assert not self.directory.tiering.complete(node, done.operation, result, self.now)

    @rule(name=st.sampled_from("abc"), mode=st.sampled_from([*DrainMode, None, None, None, None]))
    def drain(self, name: str, mode: DrainMode | None) -> None:
        for node in self.nodes:
            if node.name == name and mode is not None:
                self.directory.members.drain(node, mode, self.now)
            elif node.name == name:
                self.directory.members.cancel_drain(node)

    @rule(wanted=keys, span_ms=st.sampled_from([0, 500, 20000]))
    def pin(self, wanted: list[bytes], span_ms: int) -> None:
        kept = self.directory.pin(wanted, self.now + span_ms if span_ms else 0, self.now)
        for one, done in zip(wanted, kept, strict=True):
            entry = self.directory.ledger.entries.get(one)
            if done:
                assert entry is not None
                assert entry.pinned_until_ms == (self.now + span_ms if span_ms else 0)
        limit = sum(node.disk_bytes for node in self.nodes) // 2
        assert self.directory.ledger.pins.bytes <= max(limit, 0) or not any(kept)

    @rule(wanted=keys, purge=st.booleans())
    def evict(self, wanted: list[bytes], purge: bool) -> None:
        done = self.directory.evict(wanted, purge=purge, now=self.now)
        assert not any(tier for tier, gone in zip(self.directory.exists(wanted), done, strict=True) if purge and gone)

    @rule(wanted=keys)
    def prefetch(self, wanted: list[bytes]) -> None:
        self.directory.prefetch(wanted, self.now)

    @rule(span_ms=st.sampled_from([1, 1, 200, 200, 1000, 4000, 11000]), silent=st.sampled_from([""] * 9 + ["a"]))
    def time(self, span_ms: int, silent: str) -> None:
        self.now += span_ms
        for node in self.nodes:
            if node.name != silent:
                self.directory.members.heard(node, self.now)
        self.directory.tick(self.now)
        self.tickets = [ticket for ticket in self.tickets if ticket[2] > self.now - 3000]
        assert all(lease.deadline_ms > self.now for lease in self.directory.leases.values())

    @invariant()
    def the_books_are_right(self) -> None:
        self.work += [one for one in self.directory.ledger.take_effects() if isinstance(one, DiskWork)]
        self.work = [one for one in self.work if self.directory.members.present(one.node, one.incarnation)]
        audit(self.directory)
        for node in self.nodes:
            found = sum(entry.stride_bytes for entry in node.disk)  # what a node came back with may be more than fits
            assert node.disk_used_bytes <= max(node.disk_bytes, found + 3 * SLAB_BYTES)

    @invariant()
    def memory_is_listed_by_last_use(self) -> None:
        """The reference: a plain list, to which a key is appended when it becomes readable or is read.

        A pinned entry's place says nothing: eviction, which may not have it, puts it out of its way.
        """
        for node in self.nodes:
            listed = [entry.key for entry in node.memory]
            pinned = {entry.key for entry in node.memory if entry.pinned_until_ms > self.now}
            model = [one for one in self.recency.get(node.number, []) if one in set(listed)]
            model += [one for one in listed if one not in model]  # became readable in this step: the newest
            assert [one for one in listed if one not in pinned] == [one for one in model if one not in pinned]
            self.recency[node.number] = listed

    def teardown(self) -> None:
        assert settles(self.directory, self.now, 60_000, 500)


Cluster.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, derandomize=True, database=None,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
TestCluster = Cluster.TestCase


def test_the_model_notices_a_list_that_is_not_by_last_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LruList, "touch", lambda self, entry: None)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(Cluster, settings=settings(Cluster.TestCase.settings, phases=[Phase.generate]))
