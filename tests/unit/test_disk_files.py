"""Files of chunks: what is written can be read, and what cannot be trusted is never handed out."""

from __future__ import annotations

import errno
import mmap
import os
import random
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from polarkv_client import layout
from polarkv_client.errors import ConfigurationError, Damaged
from polarkv_dataplane.disk.executor import KeyedExecutor, Task
from polarkv_dataplane.disk.files import Dropped, Files, Missing, NoSpace, verify_memory
from polarkv_dataplane.disk.index import Index
from tests.support.cache_node import MIB, chunk
from tests.support.waiting import wait_until


def nothing() -> None:
    pass


@pytest.fixture
def memory() -> memoryview:
    return memoryview(mmap.mmap(-1, 24 * MIB))


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files([tmp_path])


def fill(memory: memoryview, number: int, length_bytes: int) -> tuple[layout.Header, memoryview]:
    """Put a chunk into memory: (its header, its slot)."""
    key, payload, checksum = chunk(number, length_bytes)
    header = layout.Header(key, length_bytes, checksum, 9)
    slot = memory[: layout.stride_bytes(length_bytes)]
    slot[:] = bytes(len(slot))
    slot[: layout.HEADER_BYTES] = layout.pack_header(header)
    slot[layout.HEADER_BYTES : layout.HEADER_BYTES + length_bytes] = payload
    return header, slot


@pytest.mark.parametrize("length_bytes", [0, 1, 4032, 4033, 100_000, MIB, 17 * MIB + 5])
@pytest.mark.parametrize("direct", [True, False])
def test_what_is_written_is_read_back(
    tmp_path: Path, memory: memoryview, files: Files, length_bytes: int, direct: bool
) -> None:
    if not direct:
        files.direct = [0]
    header, slot = fill(memory, 1, length_bytes)
    whole = bytes(slot)
    allocated = files.write(header, slot, lambda: verify_memory(header, slot))
    path = Path(files.path(header.key))
    assert path == tmp_path / "data/00/00" / header.key.hex()
    assert path.read_bytes() == whole  # exactly the slot's bytes
    assert allocated == path.stat().st_blocks * 512 >= len(whole)
    slot[:] = b"\xaa" * len(slot)
    assert files.read(header, slot, nothing) == allocated
    assert bytes(slot) == whole
    assert list((tmp_path / "tmp").iterdir()) == []


def test_unverified_bytes_are_never_published(tmp_path: Path, memory: memoryview, files: Files) -> None:
    header, slot = fill(memory, 1, 100_000)
    slot[5000] ^= 1
    with pytest.raises(Damaged, match="do not match"):
        files.write(header, slot, lambda: verify_memory(header, slot))
    header, slot = fill(memory, 1, 100_000)
    other = header._replace(checksum=header.checksum ^ 1)
    with pytest.raises(Damaged, match="another than the manager's"):
        files.write(other, slot, lambda: verify_memory(other, slot))
    other = header._replace(key=b"o" * 32)
    with pytest.raises(Damaged, match="in its place"):
        files.write(other, slot, lambda: verify_memory(other, slot))
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def corrupt_byte(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(random.randrange(layout.HEADER_BYTES, 100_000))
        old = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([old[0] ^ 0x40]))


def other_key(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    header = layout.unpack_header(raw)
    assert header is not None
    raw[: layout.HEADER_BYTES] = layout.pack_header(header._replace(key=b"o" * 32))
    path.write_bytes(raw)


def other_content(path: Path) -> None:
    """A whole and valid file of the same key and length, of other bytes."""
    raw = bytearray(path.read_bytes())
    header = layout.unpack_header(raw)
    assert header is not None
    end = layout.HEADER_BYTES + header.length_bytes
    raw[layout.HEADER_BYTES : end] = bytes(header.length_bytes)
    checksum = layout.checksum([raw[layout.HEADER_BYTES : end]])
    raw[: layout.HEADER_BYTES] = layout.pack_header(header._replace(checksum=checksum))
    path.write_bytes(raw)


@pytest.mark.parametrize(
    "damage",
    [
        corrupt_byte,
        other_key,
        other_content,
        lambda path: os.truncate(path, 50_000),
        lambda path: os.truncate(path, 0),
        lambda path: os.truncate(path, 200_000),
        lambda path: path.write_bytes(bytes(path.stat().st_size)),
    ],
    ids=["flipped", "other-key", "other-content", "truncated", "empty", "longer", "zeros"],
)
def test_a_bad_file_leaves_no_valid_header_in_memory(
    memory: memoryview, files: Files, damage: Callable[[Path], None]
) -> None:
    header, slot = fill(memory, 1, 100_000)
    files.write(header, slot, nothing)
    damage(Path(files.path(header.key)))
    with pytest.raises(Damaged):
        files.read(header, slot, nothing)
    assert layout.unpack_header(slot) is None


def test_a_missing_file_is_missing(memory: memoryview, files: Files) -> None:
    header, slot = fill(memory, 1, 100_000)
    with pytest.raises(Missing):
        files.read(header, slot, nothing)
    files.delete(header.key)  # of nothing: no error


def test_a_load_that_is_too_late_touches_no_memory(memory: memoryview, files: Files) -> None:
    header, slot = fill(memory, 1, 100_000)
    files.write(header, slot, nothing)
    slot[:] = b"\xee" * len(slot)

    def late() -> None:
        raise Dropped("late")

    with pytest.raises(Dropped):
        files.read(header, slot, late)
    assert slot == b"\xee" * len(slot)


def test_left_over_temporary_files_are_removed(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp" / "17").write_bytes(b"half")
    Files([tmp_path])
    assert list((tmp_path / "tmp").iterdir()) == []


def test_keys_are_spread_over_volumes_by_their_last_byte(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in "abc"]
    for folder in folders:
        folder.mkdir()
    files = Files(folders)
    assert [files.volume(bytes(31) + bytes([last])) for last in (0, 1, 2, 3, 255)] == [0, 1, 2, 0, 0]


@pytest.fixture
def small_file_system(tmp_path: Path) -> Iterator[Path]:
    """An ext4 file system of 16 MiB on a loop device."""
    if os.geteuid() != 0 or shutil.which("mkfs.ext4") is None:
        pytest.skip("mounting a small ext4 file system takes root and mkfs.ext4")
    image, folder = tmp_path / "image", tmp_path / "mounted"
    folder.mkdir()
    with image.open("wb") as file:
        file.truncate(16 * MIB)
    subprocess.run(["mkfs.ext4", "-q", "-O", "^has_journal", str(image)], check=True, timeout=30)
    mounted = subprocess.run(
        ["mount", "-o", "loop", str(image), str(folder)], check=False, capture_output=True, text=True, timeout=30
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a loop device: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True, timeout=30)


def test_a_full_file_system_is_no_space_and_recovers(small_file_system: Path, memory: memoryview) -> None:
    files = Files([small_file_system])
    written: list[layout.Header] = []

    def write_until_full() -> None:
        for number in range(32):
            header, slot = fill(memory, number, MIB)
            files.write(header, slot, nothing)
            written.append(header)

    with pytest.raises(NoSpace):
        write_until_full()
    assert 8 <= len(written) <= 15
    assert list((small_file_system / "tmp").iterdir()) == []
    files.delete(written[0].key)
    header, slot = fill(memory, 99, MIB)
    files.write(header, slot, nothing)
    assert files.direct == [os.O_DIRECT]


def test_no_o_direct_is_said_and_worked_around(
    tmp_path: Path, memory: memoryview, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = os.open

    def refusing(path: str, flags: int, *rest: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *rest)

    monkeypatch.setattr(os, "open", refusing)
    files = Files([tmp_path])
    assert "no O_DIRECT" in caplog.text
    header, slot = fill(memory, 1, 100_000)
    files.write(header, slot, nothing)
    files.read(header, slot, nothing)


def test_an_unusable_directory_is_a_configuration_error(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(b"")
    with pytest.raises(ConfigurationError, match="directories"):
        Files([tmp_path])


def test_operations_on_one_key_run_in_order_and_others_side_by_side() -> None:
    executor = KeyedExecutor(4, 1000)
    order: dict[bytes, list[int]] = {bytes([k]): [] for k in range(8)}
    running: set[bytes] = set()
    overlaps: list[bytes] = []
    together = threading.Barrier(4)

    def work(key: bytes, number: int) -> None:
        if key in running:
            overlaps.append(key)
        running.add(key)
        order[key].append(number)
        running.discard(key)

    for _ in range(4):
        executor.submit(Task(os.urandom(32), lambda: together.wait(30) and None))  # needs four at once
    wait_until(lambda: len(executor) == 0, "four operations of different keys at a time")
    assert not together.broken
    for number in range(100):
        for key in order:
            assert executor.submit(Task(key, lambda key=key, number=number: work(key, number)))  # type: ignore[misc]
    wait_until(lambda: len(executor) == 0, "all operations")
    assert overlaps == []
    assert all(numbers == list(range(100)) for numbers in order.values())
    executor.close()


def test_the_queue_is_bounded_and_a_failure_costs_no_thread() -> None:
    executor = KeyedExecutor(1, 2)
    gate, done = threading.Event(), threading.Event()
    assert executor.submit(Task(b"a", lambda: gate.wait(30) and None))
    assert executor.submit(Task(b"b", lambda: 1 // 0 and None))
    assert not executor.submit(Task(b"c", nothing))
    gate.set()
    wait_until(lambda: len(executor) == 0, "room")
    assert executor.submit(Task(b"c", done.set))
    assert done.wait(30)
    executor.close()


def test_a_fence_drops_what_waits_and_waits_for_what_runs() -> None:
    executor = KeyedExecutor(1, 100)
    begun, gate, ran = threading.Event(), threading.Event(), []

    def first() -> None:
        begun.set()
        gate.wait(30)
        ran.append("first")

    executor.submit(Task(b"a", first))
    for key in (b"a", b"b", b"b"):
        executor.submit(Task(key, lambda: ran.append("dropped")))
        executor.submit(Task(key, lambda: ran.append("kept"), fenced=False))
    assert begun.wait(30)
    assert not executor.fence(lambda: True)  # given up while the first one runs
    fenced: list[bool] = []
    thread = threading.Thread(target=lambda: fenced.append(executor.fence(lambda: False)))
    thread.start()
    assert fenced == []
    gate.set()
    thread.join(30)
    assert fenced == [True]
    after = threading.Event()
    executor.submit(Task(b"a", after.set))
    assert after.wait(30)
    wait_until(lambda: len(executor) == 0, "the end")
    assert ran == ["first", *["kept"] * 3]
    executor.close()


def test_the_index_counts_bytes_and_holds_the_capacity() -> None:
    index = Index(100)
    a, b = layout.Header(b"a" * 32, 1, 2, 3), layout.Header(b"b" * 32, 1, 2, 3)
    assert index.reserve(a.key, 60)
    assert not index.reserve(b.key, 60)  # what is being written counts
    index.put(a, 64, reserved_bytes=60)
    assert index.used_bytes == 64
    assert not index.reserve(b.key, 40)
    assert index.reserve(a.key, 100)  # in place of the one that is there
    index.unreserve(100)
    index.put(a, 50)
    assert index.used_bytes == 50
    index.remove(a.key)
    index.remove(a.key)
    assert (index.used_bytes, len(index)) == (0, 0)


def test_the_index_takes_an_operations_word_over_the_scans_and_the_reports() -> None:
    index = Index(1000)
    headers = [layout.Header(bytes([i]) * 32, 1, 2, 3) for i in range(5)]
    index.put(headers[0], 10)
    report = index.begin_report()
    index.touch(headers[1].key)
    assert not index.discover(headers[1], 10)  # purged since, perhaps
    assert index.discover(headers[2], 10)
    assert index.discover(headers[3], 10)
    index.touch(headers[3].key)
    told = []
    index.scanned()
    while (keys := index.next_keys(report, 2, 0.1)) is not None:
        told += [item.key for item in index.items(report, keys)]
    assert told == [headers[0].key, headers[2].key]
    index.end_report(report)
    again = index.begin_report()  # a restarted manager is told from memory, also of what operations wrote
    told = []
    while (keys := index.next_keys(again, 2, 0.1)) is not None:
        told += [item.key for item in index.items(again, keys)]
    assert sorted(told) == [headers[0].key, headers[2].key, headers[3].key]
