"""Races that users of such systems have met, told as stories."""

import pytest

from polarkv_client.states import CommitOutcome, DrainMode, NodeState, ReadOutcome, StoreOutcome, Tier
from polarkv_client.states import EntryState as S
from polarkv_dataplane.manager.core.ledger import next_step
from polarkv_dataplane.manager.core.table import TABLE, Event, IllegalTransition
from polarkv_dataplane.manager.records.effects import Work
from polarkv_dataplane.manager.records.model import Settings
from tests.model.scenario import DAMAGED, FAILED, FULL, NO_SPACE, SLOT_BYTES, Story, checksum, key


def on_disk_too(story: Story, name: str) -> None:
    story.put(name)
    story.disk(Work.OFFLOAD)
    story.expect(name, S.MEMORY_AND_DISK)


def test_a_slot_is_not_reused_while_a_reader_stalls() -> None:
    story = Story()
    story.node()
    on_disk_too(story, "old")
    story.acquire("old")  # and the reader stalls
    story.begin("new", StoreOutcome.NO_SPACE)
    story.wait(story.settings.read_lease_ms)
    story.begin("new", StoreOutcome.NO_SPACE)  # the lease ended: what it still reads, it reads in quarantine
    story.wait(story.settings.quarantine_ms)
    story.begin("new")


@pytest.mark.parametrize("clean", [True, False])
def test_a_damaged_chunks_slot_rests_when_its_reader_may_still_be_reading(clean: bool) -> None:
    story = Story()
    story.node()
    on_disk_too(story, "old")
    lease = story.acquire("old")
    story.directory.report_damaged(lease.number, [key("old")], clean, story.now)
    story.done()
    story.begin("new", StoreOutcome.GRANTED if clean else StoreOutcome.NO_SPACE)
    story.wait(story.settings.read_lease_ms + story.settings.quarantine_ms)
    if not clean:
        story.begin("new")


def test_a_crashed_writers_key_is_not_stuck() -> None:
    story = Story()
    story.node()
    crashed = story.begin("chunk")
    story.begin("chunk", StoreOutcome.IN_PROGRESS)
    story.wait(story.settings.write_ticket_ms)
    story.expect("chunk", None, Tier.NONE)
    story.begin("chunk", StoreOutcome.NO_SPACE)  # a write may still be on its way
    story.wait(story.settings.quarantine_ms)
    other = story.begin("chunk")
    story.commit(crashed, "chunk", CommitOutcome.EXPIRED)
    story.expect("chunk", S.WRITING, Tier.NONE)
    story.commit(other, "chunk")
    story.expect("chunk", S.OFFLOADING, Tier.MEMORY)


def test_a_late_delete_does_not_meet_the_next_file() -> None:
    story = Story()
    story.node(slots=2)
    on_disk_too(story, "chunk")
    assert story.directory.evict([key("chunk")], purge=True, now=story.now) == [True]
    story.done()
    story.expect("chunk", S.PURGING, Tier.NONE)
    story.begin("chunk", StoreOutcome.IN_PROGRESS)
    story.disk(Work.PURGE)
    story.put("chunk")
    story.disk(Work.OFFLOAD)
    story.expect("chunk", S.MEMORY_AND_DISK)


def test_looking_does_not_keep_a_chunk() -> None:
    story = Story()
    story.node()
    on_disk_too(story, "old")
    lease = story.acquire("old")
    for _ in range(100):
        assert story.directory.exists([key("old")]) == bytes([Tier.MEMORY])
        assert story.directory.match_prefix([key("old")]) == bytes([Tier.MEMORY])
    assert story.directory.leases[lease.number].deadline_ms == story.now + story.settings.read_lease_ms
    story.release(lease)
    story.begin("new")


def test_a_drain_keeps_on_disk_what_only_memory_had() -> None:
    story = Story()
    node = story.node(slots=2)
    on_disk_too(story, "cold")
    story.put("dirty")
    lease = story.acquire("cold")
    story.drain(node, DrainMode.FLUSH)
    story.begin("new", StoreOutcome.NO_SPACE)
    story.acquire("cold", ReadOutcome.MISS)
    story.disk(Work.OFFLOAD)
    assert node.state is NodeState.DRAINING  # a reader is still there
    story.release(lease)
    assert node.state is NodeState.DRAINED
    back = story.directory.members.join("n", 0, 2 * SLOT_BYTES, SLOT_BYTES, True, story.now)
    story.directory.members.prove_memory(back, [], True, story.now)
    story.directory.members.attach_disk(back, 8 * SLOT_BYTES, story.now)
    story.directory.members.prove_disk(back, [story.item("cold"), story.item("dirty")], story.now)
    story.expect("cold", S.DISK, Tier.DISK)
    story.expect("dirty", S.DISK, Tier.DISK)


def test_a_discarding_drain_drops_and_a_cancelled_one_serves() -> None:
    story = Story()
    node = story.node(slots=2)
    story.put("dirty")
    story.disk(Work.OFFLOAD, FAILED)
    story.drain(node, DrainMode.DISCARD)
    story.expect("dirty", None)
    assert node.state is NodeState.DRAINED
    story.directory.members.cancel_drain(node)
    story.put("new")


def test_a_new_empty_node_gets_its_share_and_no_more() -> None:
    story = Story()
    old, new = story.node("old", slots=256), None
    for number in range(60):
        story.begin(f"old {number}")
    new = story.node("new", slots=256)
    before = old.pool.used_bytes
    for number in range(100):
        granted = story.directory.begin_store([key(f"new {number}")], [FULL], story.tenant, story.now)
        assert granted.number
    shares = (old.pool.used_bytes - before) // SLOT_BYTES, new.pool.used_bytes // SLOT_BYTES
    assert sum(shares) == 100 and 30 <= shares[1] <= 70


def test_many_expired_leases_are_misses_and_nothing_else() -> None:
    story = Story()
    story.node(slots=4)
    story.put("chunk")
    leases = [story.acquire("chunk") for _ in range(1000)]
    story.wait(story.settings.read_lease_ms)
    assert not story.directory.leases
    for lease in leases:
        story.directory.release_read(lease.number, True, story.now)
    story.acquire("chunk")


def test_readers_of_a_former_life_are_fenced_off() -> None:
    """Kind: a bound that named one of two grants. The fence counted tickets only; leases may be longer."""
    story = Story(Settings(read_lease_ms=9000, write_ticket_ms=1000))
    node = story.node()
    story.put("chunk")
    story.acquire("chunk")
    node = story.node(last=node.incarnation, fresh=False)
    story.wait(2500)
    story.begin("new", StoreOutcome.NO_SPACE)
    assert node.fence_ms == 1000 + 9000 + story.settings.quarantine_ms


def test_a_pin_that_ended_gives_its_bytes_back() -> None:
    """Kind: a limit that counts what is over. Ended pins used up what may be pinned until the entries went."""
    story = Story()
    story.node(slots=4, files=2)  # half of the disk may be pinned: one chunk
    story.put("a")
    story.put("b")
    assert story.directory.pin([key("a")], story.now + 10, story.now) == [True]
    assert story.directory.pin([key("b")], story.now + 10, story.now) == [False]
    story.wait(10)
    assert story.directory.ledger.pins.bytes == 0
    assert story.directory.pin([key("b")], story.now + 10, story.now) == [True]
    for _ in range(1000):
        story.directory.pin([key("b")], story.now + 10, story.now)
    assert len(story.directory.ledger.pins._ends) <= 67
    story.done()


def test_a_file_that_contradicts_its_entry_is_deleted() -> None:
    """Kind: a stray. An inventory that named a key being stored left a file that nothing accounts for."""
    story = Story()
    node = story.node(slots=4)
    writing = story.begin("writing")
    story.put("other")
    story.disk_queue.clear()
    told = [story.item("writing"), story.item("other", told_checksum=checksum("other") + 1)]
    story.directory.tiering.complete(node, next(iter(node.operations)), FAILED, story.now)
    story.done()
    story.disk(Work.PURGE)  # a failed offload leaves no file
    story.directory.members.prove_disk(node, told, story.now)
    story.done()
    assert [work.key for work in story.disk_queue if work.work is Work.PURGE] == [key("writing"), key("other")]
    story.commit(writing, "writing")


def test_what_moved_on_does_not_pile_up_where_nothing_is_offloaded() -> None:
    """Kind: a queue without a bound. Without disk capacity, every evicted entry stayed queued for offload."""
    story = Story()
    node = story.node(slots=2, files=0)
    for number in range(1000):
        story.put(str(number))
    assert len(node.offloads) <= 2 * node.memory.count + 65


def test_damage_that_a_reader_holds_is_not_offloaded_again_at_once() -> None:
    """Kind: a busy loop. Damaged bytes were offered to the disk server again in the moment of its answer."""
    story = Story()
    story.node()
    story.put("chunk")
    story.acquire("chunk")
    story.disk(Work.OFFLOAD, DAMAGED)
    story.disk(Work.PURGE)
    assert not story.disk_queue
    story.wait(story.settings.offload_retry_ms)
    assert [work.work for work in story.disk_queue] == [Work.OFFLOAD]


def test_a_header_that_is_no_slots_takes_no_slab() -> None:
    """Kind: a leak on a refused path. A slab was carved for a claim that was then refused, and stayed carved."""
    story = Story()
    node = story.directory.members.join("n", 0, 8 * SLOT_BYTES, 4 * SLOT_BYTES, False, story.now)
    story.directory.members.prove_memory(node, [story.item("odd", offset_bytes=512)], True, story.now)
    story.done()
    assert len(node.pool.bare) == 2


def test_a_full_disk_purges_its_oldest_and_fails_no_store() -> None:
    story = Story(Settings(disk_high_percent=100))
    node = story.node(slots=3, files=2)
    for number in range(20):
        story.put(str(number))
        while story.disk_queue:
            story.disk(story.disk_queue[0].work)
            assert node.disk_used_bytes <= 2 * SLOT_BYTES
    story.expect("0", None)
    story.expect("19", S.MEMORY)
    assert node.disk_used_bytes == 2 * SLOT_BYTES


def test_a_disk_that_has_less_than_the_books_say_is_believed() -> None:
    story = Story()
    story.node(slots=3)
    on_disk_too(story, "old")
    story.put("new")
    story.disk(Work.OFFLOAD, NO_SPACE)
    assert {work.key for work in story.disk_queue if work.work is Work.PURGE} == {key("new"), key("old")}
    story.expect("new", S.MEMORY)


def test_a_silent_node_takes_only_its_own_keys_with_it() -> None:
    story = Story()
    first, second = story.node("a", slots=64), story.node("b", slots=64)
    names = [str(number) for number in range(64)]
    for name in names:
        story.put(name)
    kept = {entry.key for entry in story.directory.ledger.entries.values() if entry.node is second}
    story.wait(story.settings.node_timeout_ms + 1, silent=(first,))
    assert first.state is NodeState.DOWN
    assert story.directory.ledger.entries.keys() == kept and 0 < len(kept) < 64


def test_what_is_not_in_the_table_raises_and_changes_nothing() -> None:
    for state in [None, *S]:
        for event in Event:
            if (state, event) not in TABLE:
                with pytest.raises(IllegalTransition, match=event.name):
                    next_step(state, event)
    story = Story()
    story.node()
    story.put("chunk")
    entry = story.directory.ledger.entries[key("chunk")]
    with pytest.raises(IllegalTransition, match="PURGED in state"):
        story.directory.ledger.change(entry, Event.PURGED, story.now)
    story.done()


def test_pinned_chunks_at_the_old_end_do_not_hide_the_others_from_eviction() -> None:
    story = Story(Settings(victim_scan=4))
    story.node(slots=12, files=40)
    names = [f"chunk {number}" for number in range(12)]
    for name in names:
        on_disk_too(story, name)
    pinned = [key(name) for name in names[:8]]  # the oldest, twice as many as one scan looks at
    assert all(story.directory.pin(pinned, story.now + 1_000_000, story.now))
    wanted = [story.directory.begin_store([key(f"new {n}")], [FULL], story.tenant, story.now) for n in range(4)]
    assert [granted.outcomes[0] for granted in wanted].count(StoreOutcome.GRANTED) >= 2
    assert story.directory.exists(pinned) == bytes([Tier.MEMORY]) * 8
    story.done()


def test_pinned_files_at_the_old_end_do_not_hide_the_others_from_a_purge() -> None:
    story = Story(Settings(victim_scan=2, pinned_percent=100))
    node = story.node(slots=1, files=6)
    names = [f"chunk {number}" for number in range(5)]
    for name in names:
        on_disk_too(story, name)
    assert all(story.directory.pin([key(name) for name in names[:3]], story.now + 1_000_000, story.now))
    for _ in range(2):  # each look passes the pins that it met
        story.directory.tiering._purge_oldest(node, SLOT_BYTES - node.purging_bytes, story.now)
    assert node.purging_bytes == SLOT_BYTES
    assert story.directory.exists([key(name) for name in names[:3]]) == bytes([Tier.DISK]) * 3
    story.done()


def test_a_slow_disk_is_not_asked_for_more_bytes_than_it_can_answer_in_time() -> None:
    story = Story(Settings(operations_bytes=6 * SLOT_BYTES))
    node = story.node(slots=8, files=16)
    for number in range(8):
        story.put(f"chunk {number}")
    assert len(node.operations) == 3  # bytes bound them, not their number, and half of them are for loads
    while node.operations:
        story.disk(Work.OFFLOAD)
    assert all(entry.state is S.MEMORY_AND_DISK for entry in node.memory)


def test_a_load_does_not_wait_until_no_offload_is_left() -> None:
    """Starvation: each offload that ended made room for the next one alone, and readers waited for all of them."""
    story = Story(Settings(operations_bytes=4 * SLOT_BYTES))
    node = story.node(slots=12, files=32)
    on_disk_too(story, "wanted")
    assert story.directory.evict([key("wanted")], purge=False, now=story.now) == [True]
    for number in range(8):
        story.put(f"chunk {number}")
    assert len(node.operations) == 2
    story.directory.acquire_read([key("wanted")], story.now)
    assert [operation.work for operation in node.operations.values()].count(Work.LOAD) == 1
