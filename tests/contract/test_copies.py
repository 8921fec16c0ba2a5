"""One suite for both ways of copying on the same host, on a file that stands for a cache node's memory."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from polarkv_client import buffers, errors, layout, native
from polarkv_client.protocol.grants import Extent
from polarkv_client.transport import copies
from polarkv_client.transport.base import Pick
from polarkv_dataplane.slab import machine
from tests.contract.peers import key, soon

MEMORY_BYTES = 16 << 20
OFFSET = 8192
TENANT = 7
LENGTHS = (1, 240, 241, 4095, 4096, 4097, 65_535, 131_072, 1_048_576, 3 * 1_048_576 + 17)


@pytest.fixture(params=["calls", "mapped"])
def way(request: pytest.FixtureRequest, memory: int) -> Iterator[copies.Copies]:
    assert native.compiled is not None, native.missing  # the machine that runs tests has a compiler
    made = copies.choose(memory, MEMORY_BYTES, "calls" if request.param == "calls" else "auto")
    assert isinstance(made, copies.Mapped) == (request.param == "mapped")
    yield made
    made.close()


@pytest.fixture
def memory() -> Iterator[int]:
    descriptor = os.memfd_create("memory")
    os.posix_fallocate(descriptor, 0, MEMORY_BYTES)
    os.pwrite(descriptor, b"\xee" * MEMORY_BYTES, 0)
    yield descriptor
    os.close(descriptor)


@contextmanager
def small_tmpfs(size_bytes: int) -> Iterator[int]:
    """An empty file on a tmpfs of this size."""
    try:
        root = machine.mount_tmpfs(size_bytes, b"never")
    except OSError as error:
        pytest.skip(f"a small file system takes root: {error}")
    descriptor = os.open("memory", os.O_RDWR | os.O_CREAT, dir_fd=root)
    yield descriptor
    os.close(descriptor)
    os.close(root)


def pick(views: list[memoryview], offset: int = OFFSET) -> Pick:
    length = buffers.length_of(views)
    return Pick(0, Extent(0, key(1), offset, length, 0), views)


def parted(content: bytes | bytearray, seed: int) -> list[memoryview]:
    """The same bytes as a scatter list of random parts, at odd places."""
    chance = random.Random(seed)
    whole = memoryview(content)
    cuts = sorted(chance.sample(range(1, len(content)), min(len(content) - 1, chance.randrange(6))))
    return [whole[start:end] for start, end in zip([0, *cuts], [*cuts, len(content)], strict=True)]


@pytest.mark.parametrize("length", LENGTHS)
def test_what_is_written_is_read_with_the_librarys_checksum(way: copies.Copies, memory: int, length: int) -> None:
    content = random.Random(length).randbytes(length)
    checksum = way.write(pick(parted(content, length)), TENANT, soon())
    assert checksum == xxhash.xxh3_64_intdigest(content)
    raw = os.pread(memory, layout.stride_bytes(length), OFFSET)
    assert layout.unpack_header(raw) == layout.Header(key(1), length, checksum, TENANT)
    assert raw[layout.HEADER_BYTES :][:length] == content
    assert not any(raw[layout.HEADER_BYTES + length :]), "the slot's former owner shows behind the payload"
    assert os.pread(memory, 1, OFFSET + layout.stride_bytes(length)) == b"\xee"
    target, header = bytearray(length), bytearray(layout.HEADER_BYTES)
    assert way.read(pick(parted(target, length + 1)), header, soon()) == checksum
    assert (bytes(header), target) == (raw[: layout.HEADER_BYTES], content)


def test_many_at_once_are_what_they_would_be_one_by_one(way: copies.Copies, memory: int) -> None:
    """Of all lengths in turn, so that long and tiny ones, which go alone, lie between those that go together."""
    lengths = [*LENGTHS, 5000, 700_000, 1 << 20, 1 << 20, 1 << 20, 1 << 20, 4096, *LENGTHS[:4]]
    contents = [random.Random(number).randbytes(length) for number, length in enumerate(lengths)]
    offsets = list(accumulate(map(layout.stride_bytes, lengths), initial=OFFSET))
    sources = [
        pick(parted(content, length), place) for content, length, place in zip(contents, lengths, offsets, strict=False)
    ]
    checksums = way.write_all(sources, TENANT, soon())
    assert checksums == [xxhash.xxh3_64_intdigest(content) for content in contents]
    targets = [bytearray(length) for length in lengths]
    wanted = [
        pick(parted(target, length + 1), place)
        for target, length, place in zip(targets, lengths, offsets, strict=False)
    ]
    for number, (header, checksum) in enumerate(way.read_each(wanted, soon())):
        assert layout.unpack_header(header) == layout.Header(key(1), lengths[number], checksums[number], TENANT)
        assert checksum == checksums[number]
        raw = os.pread(memory, layout.stride_bytes(lengths[number]), offsets[number])
        assert (raw[:64], raw[64:][: lengths[number]]) == (header, contents[number])
        assert not any(raw[64 + lengths[number] :]), "the slot's former owner shows behind the payload"
    assert targets == contents
    assert os.pread(memory, 1, offsets[-1]) == b"\xee"


def test_of_many_none_is_whole_once_the_ticket_has_ended(memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ticket ends while payloads that go together are copied: not one header is written."""
    way = copies.choose(memory, MEMORY_BYTES, "auto")
    scope = soon().until(time.monotonic() + 4)
    together, calls = native.gather_all, []

    def slow(payloads: Sequence[native.Payload]) -> list[int]:
        calls.append(len(payloads))
        scope.deadline = time.monotonic() - 1
        return together(payloads)

    monkeypatch.setattr(native, "gather_all", slow)
    places = [OFFSET + number * layout.stride_bytes(1 << 20) for number in range(6)]
    with pytest.raises(errors.LeaseEnded):
        way.write_all([pick([memoryview(bytes(1 << 20))], place) for place in places], TENANT, scope)
    assert calls == [copies.CALL_BYTES >> 20]
    assert not any(layout.unpack_header(os.pread(memory, 64, place)) for place in places)
    assert os.pread(memory, 64, places[-1]) == b"\xee" * 64, "a call was made after the ticket's end"
    way.close()


@pytest.mark.parametrize("length", [5000, 3 << 20])
def test_both_ways_notice_what_changed(way: copies.Copies, memory: int, length: int) -> None:
    content = random.Random(1).randbytes(length)
    checksum = way.write(pick([memoryview(content)]), TENANT, soon())
    for place in (0, length // 2, length - 1):
        os.pwrite(memory, bytes([content[place] ^ 1]), OFFSET + layout.HEADER_BYTES + place)
        assert way.read(pick([memoryview(bytearray(length))]), bytearray(64), soon()) != checksum
        os.pwrite(memory, content[place : place + 1], OFFSET + layout.HEADER_BYTES + place)
    assert way.read(pick([memoryview(bytearray(length))]), bytearray(64), soon()) == checksum


def test_nothing_is_written_once_the_ticket_has_ended(way: copies.Copies, memory: int) -> None:
    ended = soon().until(time.monotonic() - 1)
    with pytest.raises(errors.LeaseEnded):
        way.write(pick([memoryview(bytes(1 << 20))]), TENANT, ended)
    assert os.pread(memory, 1 << 20, OFFSET) == b"\xee" * (1 << 20)


def test_a_file_that_is_too_short_is_refused(memory: int) -> None:
    with pytest.raises(errors.Unavailable, match="handed out"):
        copies.choose(memory, MEMORY_BYTES + 1, "auto")


def test_where_there_is_no_memory_yet_a_write_fails_by_an_error() -> None:
    """Through a mapping it would be a signal, which no engine survives."""
    with small_tmpfs(8 << 20) as descriptor:
        os.ftruncate(descriptor, MEMORY_BYTES)
        os.pwrite(descriptor, bytes(2 << 20), 0)
        way = copies.choose(descriptor, MEMORY_BYTES, "auto")
        content = memoryview(random.Random(2).randbytes(1 << 20))
        way.write(pick([content]), TENANT, soon())
        written = 0
        with pytest.raises((OSError, errors.Unavailable)) as caught:  # noqa: PT012 (which write fails is up to the kernel)
            for written in range(2, 14):
                way.write(pick([content], written << 20), TENANT, soon())
        assert not isinstance(caught.value, OSError) or caught.value.errno == errno.ENOSPC
        assert written >= 5, "what there was room for was not written"
        target = bytearray(1 << 20)
        way.read(pick([memoryview(target)]), bytearray(64), soon())
        assert target == content
        way.close()


@settings(deadline=None, max_examples=200)
@given(st.binary(min_size=1, max_size=3000), st.integers(4096, 20_000), st.integers(0, 63), st.integers())
def test_one_pass_is_a_copy_and_xxh3(seed: bytes, length: int, shift: int, cuts: int) -> None:
    """Whatever the alignment of either side, and however the payload is cut."""
    content = (seed * (length // len(seed) + 1))[:length]
    place = bytearray(length + 64)
    move = native.Move(length)
    address = buffers.address_of(memoryview(place)) + shift
    for part in parted(content, cuts):
        move.gather([part], address)
        address += part.nbytes
    assert bytes(place[shift : shift + length]) == content
    assert not any(place[:shift]) and not any(place[shift + length :])
    assert move.checksum() == xxhash.xxh3_64_intdigest(content)
    back = bytearray(length)
    again = native.Move(length)
    again.scatter(buffers.address_of(memoryview(place)) + shift, parted(back, cuts + 1))
    assert (bytes(back), again.checksum()) == (content, move.checksum())


def test_a_library_of_other_sources_is_not_used(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="built from other sources"):
        native._Library(_compiled(tmp_path, "int polarkv_move_version(void) { return -1; }"))


def _compiled(folder: Path, source: str) -> Path:
    (folder / "move.c").write_text(source)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", folder / "move.so", folder / "move.c"], check=True)
    return folder / "move.so"
