"""What every transport promises, against a real slab server in a process of its own."""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
import time

import pytest

from polarkv_client import errors, layout
from polarkv_client.protocol.grants import Access, Extent
from polarkv_client.transport.base import HeldGrant, Scope
from tests.contract.peers import Bench, key, make, payload, picks, replace_checksum, soon

LENGTHS = [1, 63, 64, 4031, 4032, 4033, (256 << 10) - 64, 256 << 10, (256 << 10) + 1, (3 << 20) + 7]


def test_bytes_come_back_whatever_their_length(bench: Bench) -> None:
    chunks = [payload(length, seed) for seed, length in enumerate(LENGTHS)]
    extents = bench.store(chunks)
    assert [extent.checksum for extent in extents] == [layout.checksum([chunk]) for chunk in chunks]
    targets = [bytearray(length) for length in LENGTHS]
    assert bench.transport.read(bench.grant(Access.READ, extents), picks(extents, list(targets)), soon()) == [
        None
    ] * len(LENGTHS)
    assert targets == chunks


@pytest.mark.parametrize("other", ["shm", "tcp"])
def test_all_kinds_share_one_format(bench: Bench, other: str) -> None:
    chunks = [payload(5000, 3), payload(300_000, 4)]
    extents = bench.store(chunks)
    transport = make(other, bench.slab.info)
    grant = bench.grant(Access.READ, extents)
    transport.reach(grant, soon())
    targets = [bytearray(5000), bytearray(300_000)]
    assert transport.read(grant, picks(extents, list(targets)), soon()) == [None, None]
    assert targets == chunks
    transport.close()


def test_a_slot_holds_header_payload_and_nothing_of_its_previous_owner(bench: Bench) -> None:
    (extent,) = bench.store([payload(9000)])
    again = Extent(0, key(2), extent.offset_bytes, 5000)
    grant = bench.grant(Access.WRITE, [again])
    (checksum,) = bench.transport.write(grant, picks([again], [payload(5000, 9)]), soon())
    raw = bench.peek(extent.offset_bytes, layout.stride_bytes(5000))
    assert layout.unpack_header(raw) == layout.Header(key(2), 5000, checksum, 9)
    assert raw[64:5064] == payload(5000, 9)
    assert raw[5064:] == bytes(len(raw) - 5064)


@pytest.mark.parametrize("order", [1, -1], ids=["ascending", "descending"])
def test_neighbouring_slots_hold_nothing_of_their_previous_owners(bench: Bench, order: int) -> None:
    """With every length of rest: none, one byte, all but a header's length of 4 KiB, all but a byte of it."""
    lengths = [5000, 8128, 8127, 4097, 4096, 4033, 8000]
    stride = layout.stride_bytes(max(lengths))
    old = bench.store([payload(8128, seed) for seed in range(len(lengths))])
    chunks = [payload(length, 100 + place) for place, length in enumerate(lengths)]
    new = [
        Extent(place, key(50 + place), before.offset_bytes, length)
        for place, (before, length) in enumerate(zip(old, lengths, strict=True))
    ]
    assert [extent.offset_bytes - old[0].offset_bytes for extent in new] == [stride * place for place in range(7)]
    bench.transport.write(bench.grant(Access.WRITE, new), picks(new, list(chunks))[::order], soon())
    for extent, chunk in zip(new, chunks, strict=True):
        raw = bench.peek(extent.offset_bytes, stride)
        assert layout.unpack_header(raw) == layout.Header(extent.key, len(chunk), layout.checksum([chunk]), 9)
        assert raw[layout.HEADER_BYTES :] == chunk + bytes(stride - layout.HEADER_BYTES - len(chunk))


@pytest.mark.parametrize("seed", range(8))
def test_scatter_lists_of_any_cut(bench: Bench, seed: int) -> None:
    rng = random.Random(seed)
    whole = payload(rng.randrange(1, 1 << 20), seed)

    def cut(buffer: memoryview) -> list[memoryview]:
        ends = sorted({0, len(buffer), *(rng.randrange(len(buffer) + 1) for _ in range(rng.choice([0, 3, 60, 1500])))})
        return [buffer[a:b] for a, b in itertools.pairwise(ends)]

    extents = bench.extents([len(whole)])
    grant = bench.grant(Access.WRITE, extents)
    bench.transport.reach(grant, soon())
    (checksum,) = bench.transport.write(grant, picks(extents, [cut(memoryview(whole))]), soon())
    assert checksum == layout.checksum([whole])
    target = bytearray(len(whole))
    extents = [replace_checksum(extents[0], checksum)]
    grant = bench.grant(Access.READ, extents)
    assert bench.transport.read(grant, picks(extents, [cut(memoryview(target))]), soon()) == [None]
    assert target == whole


def test_a_part_of_a_grant_in_any_order(bench: Bench) -> None:
    chunks = [payload(4096, seed) for seed in range(6)]
    extents = bench.store(chunks)
    targets = [bytearray(4096) for _ in range(6)]
    chosen = [picks(extents, list(targets))[place] for place in (4, 1, 5)]
    assert bench.transport.read(bench.grant(Access.READ, extents), chosen, soon()) == [None] * 3
    assert [target == chunk for target, chunk in zip(targets, chunks, strict=True)] == [0, 1, 0, 0, 1, 1]


def test_several_threads_share_a_transport(bench: Bench) -> None:
    failures: list[object] = []

    def work(number: int) -> None:
        chunks = [payload(200_000, number + seed) for seed in range(4)]
        extents = bench_of[number].store(chunks)
        for _ in range(5):
            targets = [bytearray(200_000) for _ in chunks]
            results = bench.transport.read(bench.grant(Access.READ, extents), picks(extents, list(targets)), soon())
            if results != [None] * 4 or targets != chunks:
                failures.append((number, results))

    bench_of = [Bench(bench.slab, bench.transport, next_bytes=(number + 1) << 24) for number in range(4)]
    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not failures


def damage(bench: Bench, extent: Extent, how: str) -> Extent:
    """Do harm; the extent as the manager still believes it to be."""
    start = extent.offset_bytes
    middle = start + layout.HEADER_BYTES + extent.length_bytes // 2
    if how == "payload":
        bench.poke(middle, bytes([bench.peek(middle, 1)[0] ^ 1]))
    elif how == "last byte":
        last = start + layout.HEADER_BYTES + extent.length_bytes - 1
        bench.poke(last, bytes([bench.peek(last, 1)[0] ^ 128]))
    elif how == "header":
        bench.poke(start + 20, b"\xff")
    elif how == "erased":
        bench.poke(start, layout.ERASED)
    elif how == "another chunk":
        bench.poke(start, layout.pack_header(layout.Header(key(77), extent.length_bytes, extent.checksum, 9)))
    elif how == "another length":
        bench.poke(start, layout.pack_header(layout.Header(extent.key, extent.length_bytes + 1, extent.checksum, 9)))
    else:  # the same key was stored again, with other bytes
        other = payload(extent.length_bytes, 99)
        header = layout.Header(extent.key, extent.length_bytes, layout.checksum([other]), 9)
        bench.poke(start, layout.pack_header(header) + other)
    return extent


@pytest.mark.parametrize(
    "how", ["payload", "last byte", "header", "erased", "another chunk", "another length", "another generation"]
)
def test_damage_is_noticed_and_costs_its_own_chunk_only(bench: Bench, how: str) -> None:
    chunks = [payload(300_000, seed) for seed in range(3)]
    extents = bench.store(chunks)
    damage(bench, extents[1], how)
    targets = [bytearray(300_000) for _ in range(3)]
    results = bench.transport.read(bench.grant(Access.READ, extents), picks(extents, list(targets)), soon())
    assert [type(result) for result in results] == [type(None), errors.Damaged, type(None)]
    assert (targets[0], targets[2]) == (chunks[0], chunks[2])


def refusal(bench: Bench, grant: HeldGrant, extents: list[Extent], access: Access) -> errors.PolarKVError:
    """How a transport says no, at the first contact or at the transfer."""
    buffers: list[object] = [bytearray(b"?" * extent.length_bytes) for extent in extents]
    move = bench.transport.read if access is Access.READ else bench.transport.write

    def contact() -> None:
        bench.transport.reach(grant, soon())
        move(grant, picks(extents, buffers), soon())

    with pytest.raises(errors.PolarKVError) as caught:
        contact()
    assert all(set(bytes(buffer)) == {ord("?")} for buffer in buffers)  # type: ignore[call-overload]
    return caught.value


@pytest.mark.parametrize("access", list(Access))
@pytest.mark.parametrize("by", [-1, 1])
def test_another_incarnation_is_refused(bench: Bench, access: Access, by: int) -> None:
    extents = bench.extents([5000])
    before = bench.peek(0, 8192)
    grant = bench.grant(access, extents, incarnation=bench.slab.manager.incarnation + by)
    assert isinstance(refusal(bench, grant, extents, access), errors.Refused)
    assert bench.peek(0, 8192) == before


@pytest.mark.parametrize("access", list(Access))
def test_a_transport_leads_to_one_life_only(bench: Bench, access: Access) -> None:
    """Attached memory stays usable after its node has begun another life: the client itself must stop."""
    (extent,) = bench.store([payload(5000)])
    grant = bench.grant(access, [extent], incarnation=bench.slab.manager.incarnation + 1)
    move = bench.transport.read if access is Access.READ else bench.transport.write
    with pytest.raises(errors.Refused):
        move(grant, picks([extent], [bytearray(5000)]), soon())
    assert bench.peek(extent.offset_bytes + 64, 5000) == payload(5000)


@pytest.mark.parametrize("access", list(Access))
@pytest.mark.parametrize("changes", [{"epoch": 99}, {"deadline_ms": -10_000}, {"node": 8}])
def test_a_grant_that_does_not_hold_is_refused(bench: Bench, access: Access, changes: dict[str, int]) -> None:
    extents = bench.extents([5000])
    grant = bench.grant(access, extents, **changes)
    assert isinstance(refusal(bench, grant, extents, access), errors.Refused)


@pytest.mark.parametrize("access", list(Access))
def test_a_forged_grant_is_refused(bench: Bench, access: Access) -> None:
    extents = bench.extents([5000])
    grant = bench.grant(access, extents)
    forged = HeldGrant(bytes([grant.signed[0] ^ 1]) + grant.signed[1:], grant.body)
    assert isinstance(refusal(bench, forged, extents, access), errors.Unauthorized)


@pytest.mark.parametrize("access", list(Access))
@pytest.mark.parametrize("offset_bytes", [-4096, 128 << 20, (128 << 20) - 4096, 1 << 40])
def test_an_extent_outside_the_memory_is_refused(bench: Bench, access: Access, offset_bytes: int) -> None:
    extents = [Extent(0, key(1), offset_bytes, 5000)]
    assert isinstance(refusal(bench, bench.grant(access, extents), extents, access), errors.Refused)


def test_a_refusal_does_not_spoil_what_comes_after(bench: Bench) -> None:
    (extent,) = bench.store([payload(5000)])
    refused = bench.grant(Access.READ, [extent], epoch=99)
    with contextlib.suppress(errors.Refused):
        bench.transport.read(refused, picks([extent], [bytearray(5000)]), soon())
    target = bytearray(5000)
    assert bench.transport.read(bench.grant(Access.READ, [extent]), picks([extent], [target]), soon()) == [None]
    assert target == payload(5000)


@pytest.mark.parametrize("access", list(Access))
def test_nothing_moves_after_the_deadline(bench: Bench, access: Access) -> None:
    (extent,) = bench.store([payload(5000)])
    grant = bench.grant(access, [extent])
    for scope, wanted in (
        (Scope(time.monotonic() - 1), errors.DeadlineExceeded),
        (soon().until(time.monotonic() - 1), errors.LeaseEnded),
    ):
        target = bytearray(b"?" * 5000)
        if access is Access.READ:
            (result,) = bench.transport.read(grant, picks([extent], [target]), scope)
            assert type(result) is wanted
            assert set(target) == {ord("?")}
        else:
            with pytest.raises(wanted):
                bench.transport.write(grant, picks([extent], [target]), scope)
            assert bench.peek(extent.offset_bytes + 64, 5000) == payload(5000)


def test_nothing_moves_after_a_cancellation(bench: Bench) -> None:
    (extent,) = bench.store([payload(5000)])
    scope = soon()
    scope.cancel()
    target = bytearray(b"?" * 5000)
    (result,) = bench.transport.read(bench.grant(Access.READ, [extent]), picks([extent], [target]), scope)
    assert type(result) is errors.Cancelled
    assert set(target) == {ord("?")}
    with pytest.raises(errors.Cancelled):
        bench.transport.write(bench.grant(Access.WRITE, [extent]), picks([extent], [target]), scope)


def test_a_closed_transport_is_unavailable(bench: Bench) -> None:
    (extent,) = bench.store([payload(5000)])
    bench.transport.close()
    bench.transport.close()
    (result,) = bench.transport.read(bench.grant(Access.READ, [extent]), picks([extent], [bytearray(5000)]), soon())
    assert isinstance(result, errors.Unavailable)
    with pytest.raises(errors.Unavailable):
        bench.transport.write(bench.grant(Access.WRITE, [extent]), picks([extent], [bytearray(5000)]), soon())
