"""Clients that die or stall while they may read or write: late bytes are never anyone's, and memory comes back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from polarkv_client.results import Reason
from polarkv_client.states import ReadOutcome, Tier
from polarkv_client.transport.base import PIECE_BYTES
from tests.local.support.invariants import settled
from tests.local.support.oracle import Caller, Chunks
from tests.local.support.raw import RawClient
from tests.local.support.workers import Halted
from tests.local.support.world import World, recovers, running
from tests.support.waiting import wait_until

# One slab of one slot: whoever stores next gets the very memory that a late writer still aims at.
SLOT_BYTES = 16 << 20
LENGTH_BYTES = 9 << 20
PIECES = LENGTH_BYTES // PIECE_BYTES


@pytest.fixture(scope="module")
def one_slot() -> Iterator[World]:
    with running(1, "16MiB", "256MiB", patient=True, slab={"slab_bytes": SLOT_BYTES}) as world:
        yield world


@pytest.fixture
def chunks(request: pytest.FixtureRequest) -> Chunks:
    return Chunks(request.node.name, (LENGTH_BYTES,))


def takes_the_slot(caller: Caller, number: int) -> None:
    """Store a chunk in the one slot, once its former holder's right and the quarantine are over."""
    wait_until(
        lambda: caller.store([number]).stored, f"the slot to be given to chunk {number}; so far {caller.reasons}", 20
    )


@pytest.mark.parametrize(
    ("transport", "call", "nth"),
    [
        ("shm", "gather", PIECES // 2),  # in the middle of the payload
        ("shm", "put", 0),  # right before the header, which would make the slot look whole
        ("shm", "pwritev", PIECES // 2),
        ("shm", "pwritev", 0),
        ("tcp", "sendmsg", PIECES // 2),
    ],
)
def test_a_write_that_goes_on_after_its_ticket_never_shows(
    one_slot: World, chunks: Chunks, transport: str, call: str, nth: int
) -> None:
    with one_slot.caller(chunks) as caller:
        late = Halted(
            one_slot.cluster.connection, chunks, [0], operation="store", transport=transport, call=call, nth=nth
        )
        try:
            takes_the_slot(caller, 1)
            assert caller.load([1]).complete
            said = late.go_on()
        finally:
            late.kill()
        assert said["calls_after"] >= 1, "the late write was never made: this test shows nothing"
        assert said["outcomes"][0].startswith("failed"), said
        # Every byte of a hit is compared by the caller. The late writer's own chunk must not have appeared either.
        caller.load([1])
        caller.load([0])
        assert recovers(caller, [2]) < 20
        settled(one_slot)


def test_a_late_header_proves_nothing_to_a_manager_that_was_started_again(chunks: Chunks) -> None:
    # The worst of lies: a valid header of one chunk over the bytes of another, found by the inventory. Nothing goes to
    # disk by itself here: an offload, which verifies what it copies, would find it out before a reader does.
    calm = {"offload_ahead": False, "memory_high_percent": 100}
    with (
        running(1, "16MiB", "256MiB", slab={"slab_bytes": SLOT_BYTES}, manager=calm) as world,
        world.caller(chunks) as caller,
    ):
        late = Halted(world.cluster.connection, chunks, [0], operation="store", transport="shm", call="put", nth=0)
        try:
            takes_the_slot(caller, 1)
            late.go_on()
        finally:
            late.kill()
        former = world.kill("manager")
        world.started_again("manager", former)
        wait_until(lambda: caller.client.exists(chunks.keys([0])) == [Tier.MEMORY], "the lie to be believed")
        assert caller.load([0]).chunks[0].reason is Reason.DAMAGED
        caller.load([1])  # compared with the oracle if a file serves it
        assert recovers(caller, [2]) < 20
        settled(world)


@pytest.mark.parametrize(
    ("transport", "call", "nth"),
    [("shm", "scatter", 2), ("shm", "preadv", 2), ("tcp", "recvmsg_into", 1), ("tcp", "recv_into", 2)],
)
def test_a_read_that_goes_on_after_its_lease_is_a_miss(
    one_slot: World, chunks: Chunks, transport: str, call: str, nth: int
) -> None:
    with one_slot.caller(chunks) as caller:
        takes_the_slot(caller, 0)
        late = Halted(
            one_slot.cluster.connection, chunks, [0], operation="load", transport=transport, call=call, nth=nth
        )
        try:
            takes_the_slot(caller, 1)
            said = late.go_on()
        finally:
            late.kill()
        assert not said["wrong"]
        # TCP may still have had bytes of its own chunk under way: then they came too late.
        assert said["outcomes"][0].startswith("miss"), said
        assert caller.load([1]).complete
        settled(one_slot)


def test_a_client_that_dies_with_tickets_and_leases_gives_them_back() -> None:
    chunks = Chunks("dies holding", (60_000,))
    # Long enough to be counted before they end.
    long = {"read_lease_ms": 5000, "write_ticket_ms": 5000}
    with running(1, "16MiB", "64MiB", patient=True, manager=long) as small, small.caller(chunks) as caller:
        assert caller.store(list(range(20))).present == 20
        dead = RawClient(small.cluster.connection)
        leased = dead.acquire(chunks.keys(range(20)))
        assert set(leased.outcomes) == {ReadOutcome.GRANTED}
        granted = dead.begin(chunks.keys(range(100, 120)), 60_000)
        assert granted.ticket
        stats = small.stats()
        assert stats["leases"] >= 1 and stats["tickets"] >= 1, stats
        dead.connection.sock.close()  # no goodbye
        settled(small)
        # Its unfinished keys are free again, and all of memory can be given to others.
        assert recovers(caller, list(range(100, 120))) < 20


def test_a_writer_killed_in_the_middle_frees_its_key_and_memory(one_slot: World, chunks: Chunks) -> None:
    with one_slot.caller(chunks) as caller:
        dead = Halted(
            one_slot.cluster.connection,
            chunks,
            [0],
            operation="store",
            transport="shm",
            call="gather",
            nth=PIECES // 2,
        )
        assert not caller.load([0]).hits
        dead.kill()
        takes_the_slot(caller, 0)  # the same key, by another writer
        assert caller.load([0]).complete
        settled(one_slot)
