"""Files and memory that hold something else than they should: misses, never wrong bytes, and the bad copy goes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from polarkv_client.layout import HEADER_BYTES, Header, checksum, pack_header, unpack_header
from polarkv_client.results import Reason
from polarkv_dataplane.disk.attachment import Attachment
from tests.local.support.invariants import settled
from tests.local.support.oracle import Caller, Chunks, payload
from tests.local.support.raw import RawClient
from tests.local.support.world import World, recovers, running

LENGTH_BYTES = 100_000


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with running(1, "16MiB", "64MiB", patient=True) as world:
        yield world


@pytest.fixture
def chunks(request: pytest.FixtureRequest) -> Chunks:
    return Chunks(request.node.name, (LENGTH_BYTES,))


def only_on_disk(world: World, caller: Caller, numbers: list[int]) -> list[Path]:
    """Store chunks, have them copied to disk, drop their memory copies; return their files."""
    keys = caller.chunks.keys(numbers)
    recovers(caller, numbers)
    world.leave_only_on_disk(caller.client, keys)
    return [world.file_of(key) for key in keys]


def flip(path: Path, at: int) -> None:
    with path.open("r+b", buffering=0) as file:
        byte = os.pread(file.fileno(), 1, at)
        os.pwrite(file.fileno(), bytes([byte[0] ^ 0x40]), at)


def renamed_over(path: Path) -> None:
    """Another key's whole and valid file takes its place."""
    other = next(file for file in path.parents[2].rglob("*") if file.is_file() and file != path)
    shutil.copyfile(other, path)


def valid_lie(path: Path) -> None:
    """A whole file of the right key and length, with a checksum that fits other bytes."""
    raw = bytearray(path.read_bytes())
    header = unpack_header(raw)
    assert header is not None
    other = payload(b"\x01" * 32, header.length_bytes)
    raw[:HEADER_BYTES] = pack_header(Header(header.key, header.length_bytes, checksum([other]), header.tenant))
    raw[HEADER_BYTES : HEADER_BYTES + header.length_bytes] = other
    path.write_bytes(raw)


FILE_FAULTS: dict[str, Callable[[Path], object]] = {
    "first byte of the payload": lambda path: flip(path, HEADER_BYTES),
    "middle of the payload": lambda path: flip(path, LENGTH_BYTES // 2),
    "last byte of the payload": lambda path: flip(path, HEADER_BYTES + LENGTH_BYTES - 1),
    "header": lambda path: flip(path, 20),
    "garbage header": lambda path: path.write_bytes(os.urandom(HEADER_BYTES) + path.read_bytes()[HEADER_BYTES:]),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "cut in the middle": lambda path: os.truncate(path, 40_000),
    "cut by one block": lambda path: os.truncate(path, path.stat().st_size - 4096),
    "empty": lambda path: os.truncate(path, 0),
    "longer": lambda path: os.truncate(path, path.stat().st_size + 4096),
    "file of another key": renamed_over,
    "same key, other bytes, all checksums in order": valid_lie,
    "deleted": Path.unlink,
}


@pytest.mark.parametrize("fault", FILE_FAULTS)
def test_a_bad_file_is_a_miss_and_goes(world: World, chunks: Chunks, fault: str) -> None:
    with world.caller(chunks) as caller:
        files = only_on_disk(world, caller, [0, 1, 2])
        FILE_FAULTS[fault](files[0])
        first = caller.load([0, 1, 2])
        assert [chunk.hit for chunk in first.chunks] == [False, True, True], (fault, first.chunks)
        # The bad copy is gone for good, and the key can be stored anew.
        assert recovers(caller, [0, 1, 2]) < 20
        settled(world)


def test_a_directory_in_place_of_a_file_is_a_miss(world: World, chunks: Chunks) -> None:
    with world.caller(chunks) as caller:
        files = only_on_disk(world, caller, [0, 1])
        files[0].unlink()
        files[0].mkdir()
        assert [chunk.hit for chunk in caller.load([0, 1]).chunks] == [False, True]
        files[0].rmdir()
        assert recovers(caller, [0, 1]) < 20
        settled(world)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize(
    ("where", "length_bytes"),
    [(-HEADER_BYTES, HEADER_BYTES), (-HEADER_BYTES + 8, 32), (0, 1), (LENGTH_BYTES // 2, 5000), (LENGTH_BYTES - 1, 1)],
)
def test_damaged_memory_is_never_delivered(
    world: World, chunks: Chunks, transport: str, where: int, length_bytes: int
) -> None:
    with world.caller(chunks, transport) as caller:
        recovers(caller, [0, 1])
        # An offload that comes upon the damage takes the memory copy away before the reader does.
        world.wait_on_disk_too(chunks.keys([0, 1]))
        with RawClient(world.cluster.connection) as raw:
            _, extent = raw.extent(chunks.key(0))
        memory = Attachment.open(str(world.places.socket("slab-0")), world.node_token())
        try:
            start = extent.offset_bytes + HEADER_BYTES + where
            memory.view[start : start + length_bytes] = bytes(
                b ^ 0xFF for b in memory.view[start : start + length_bytes]
            )
        finally:
            memory.close()
        result = caller.load([0, 1])
        assert [chunk.hit for chunk in result.chunks] == [False, True]
        assert result.chunks[0].reason is Reason.DAMAGED
        assert recovers(caller, [0, 1]) < 20
        settled(world)


def test_damaged_memory_is_never_copied_to_disk(chunks: Chunks) -> None:
    # Nothing goes to disk before memory is short, so that there is time to damage it.
    with (
        running(1, "16MiB", "64MiB", patient=True, manager={"offload_ahead": False}) as world,
        world.caller(chunks) as caller,
    ):
        recovers(caller, [0, 1, 2])
        with RawClient(world.cluster.connection) as raw:
            _, extent = raw.extent(chunks.key(0))
        memory = Attachment.open(str(world.places.socket("slab-0")), world.node_token())
        try:
            memory.view[extent.offset_bytes + HEADER_BYTES + 7] ^= 0xFF
        finally:
            memory.close()
        for first in range(10, 400, 30):  # more than memory holds: what is old goes to disk
            recovers(caller, list(range(first, first + 30)))
        caller.load([0])  # compared with the oracle if it is a hit
        assert not world.file_of(chunks.key(0)).exists()
        assert recovers(caller, [0]) < 20
        settled(world)
