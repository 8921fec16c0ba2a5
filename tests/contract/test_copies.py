"""One suite for both ways of copying on the same host, on a file that stands for a cache node's memory."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
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
