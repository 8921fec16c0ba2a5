"""What one thing that is stuck must not hold up: a failing volume the others, a pinned chunk its slab."""

from __future__ import annotations

from polarkv_client.layout import volume_of
from polarkv_client.states import EntryState as S
from polarkv_client.states import StoreOutcome
from polarkv_dataplane.manager.records.effects import DiskWork, Work
from polarkv_dataplane.manager.records.model import Settings
from tests.model.scenario import FAILED, FULL, NO_SPACE, SLOT_BYTES, Story, checksum, key

VOLUMES = 3
LARGE = FULL + SLOT_BYTES  # the payload that fills two slots' room


def on_volume(volume: int, count: int) -> list[str]:
    """Names of chunks whose files lie on this volume."""
    names = (f"chunk {number}" for number in range(10_000))
    return [name for name in names if volume_of(key(name), VOLUMES) == volume][:count]


def offloads(story: Story) -> list[bytes]:
    """Take the open commands: the keys to offload. What is to be purged is answered."""
    found = []
    for command in [work for work in story.disk_queue if work.work is Work.OFFLOAD]:
        story.disk_queue.remove(command)
        found.append(command)
    return [command.key for command in found]


def test_a_failing_volume_holds_up_its_own_offloads_only() -> None:
    """Kind: one bad disk of several stopped all offloads of its node for as long as it kept failing."""
    story = Story()
    node = story.node(slots=40, files=100, volumes=VOLUMES)
    bad, good = on_volume(0, 8), on_volume(1, 4) + on_volume(2, 4)
    story.put(bad[0])
    story.disk(Work.OFFLOAD, FAILED)
    story.disk(Work.PURGE)
    for name in (*bad[1:], *good):
        story.put(name)
    assert offloads(story) == [key(name) for name in good]
    assert not node.can_offload(story.directory.ledger.entries[key(bad[0])], story.now)
    story.wait(story.settings.offload_retry_ms)
    assert set(offloads(story)) == {key(name) for name in bad}, "its turn comes again"


def test_what_waited_for_a_volume_keeps_its_place_in_the_order() -> None:
    story = Story(Settings(operations_per_node=1))
    story.node(slots=40, files=100, volumes=VOLUMES)
    bad, good = on_volume(0, 3), on_volume(1, 3)
    story.put(bad[0])
    story.disk(Work.OFFLOAD, FAILED)
    story.disk_queue.clear()
    for pair in zip(good, bad[1:], strict=False):
        for name in pair:
            story.put(name)
    story.now += story.settings.offload_retry_ms
    order = []
    while story.disk_queue:
        order.append(story.disk(Work.OFFLOAD).key)
    assert order == [key(name) for name in (good[0], bad[0], bad[1], good[1], bad[2])]


def test_a_full_volume_is_given_room_by_its_own_files() -> None:
    story = Story()
    story.node(slots=40, files=100, volumes=VOLUMES)
    old = [*on_volume(1, 2), *on_volume(0, 3)]
    for name in old:
        story.put(name)
        story.disk(Work.OFFLOAD)
    new = on_volume(0, 4)[-1]
    story.put(new)
    story.disk(Work.OFFLOAD, NO_SPACE)
    purged = [work.key for work in story.disk_queue if work.work is Work.PURGE and work.operation]
    assert purged == [key(name) for name in old[2:4]], "the oldest two of this volume, and none of another"


def test_a_disk_that_attaches_later_has_as_many_volumes_as_it_says() -> None:
    """What memory proved waits before the disk server has said how many there are."""
    story = Story()
    members = story.directory.members
    node = members.join("n", 0, 16 * SLOT_BYTES, SLOT_BYTES, False, story.now)
    names = on_volume(0, 2) + on_volume(1, 2)
    items = [story.item(name, offset_bytes=place * SLOT_BYTES) for place, name in enumerate(names)]
    members.prove_memory(node, items, True, story.now)
    members.attach_disk(node, 100 * SLOT_BYTES, story.now, VOLUMES)
    story.done()
    story.disk(Work.OFFLOAD, FAILED)
    assert node.offloads.retry_ms == [story.now + story.settings.offload_retry_ms, 0, 0]


# A slab of another class


def store_large(story: Story, name: str) -> StoreOutcome:
    granted = story.directory.begin_store([key(name)], [LARGE], story.tenant, story.now)
    if granted.number:
        story.directory.commit_store(granted.number, [key(name)], [checksum(name)], story.now)
    story.done()
    return StoreOutcome(granted.outcomes[0])


def offload_all(story: Story) -> None:
    while story.disk_queue:
        command: DiskWork = story.disk_queue[0]
        story.disk(command.work)


def test_a_slab_with_a_pinned_chunk_is_not_closed_for_another_class() -> None:
    """Kind: a slab that was closed to change its class gave slots to nobody until the pin of one chunk in it ended."""
    story = Story(Settings(pinned_percent=100))
    node = story.node(slots=4, files=40, slab_slots=2)
    names = [f"small {number}" for number in range(4)]
    for name in names:
        story.put(name)
    offload_all(story)
    oldest = names[0]
    assert story.directory.pin([key(oldest)], story.now + 1_000_000, story.now) == [True]
    assert store_large(story, "large") is StoreOutcome.GRANTED
    assert not any(slab.closing for slab in node.pool.slabs.values())
    story.expect(oldest, S.MEMORY_AND_DISK)
    assert store_large(story, "another") in (StoreOutcome.GRANTED, StoreOutcome.NO_SPACE)
    story.begin("small again")  # the pinned chunk's neighbour makes room as ever


def test_a_pin_opens_a_slab_that_was_being_emptied() -> None:
    story = Story(Settings(pinned_percent=100))
    node = story.node(slots=2, files=40, slab_slots=2)
    for name in ("held", "free"):
        story.put(name)
    offload_all(story)
    lease = story.acquire("held")
    assert store_large(story, "large") is StoreOutcome.NO_SPACE
    (slab,) = node.pool.slabs.values()
    assert slab.closing and slab.free
    story.directory.pin([key("held")], story.now + 1000, story.now)
    assert not slab.closing
    story.release(lease)
    story.begin("small again")
    story.wait(1001)  # the pin has ended: the slab may go to whoever needs it
    assert slab.pins == 0
