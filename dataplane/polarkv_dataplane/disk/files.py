"""Files of chunks on one set of volumes: written and read without a copy between disk and the pool's memory."""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from polarkv_client.errors import ConfigurationError, Damaged
from polarkv_client.keys import short
from polarkv_client.layout import ALIGNMENT_BYTES, ERASED, HEADER_BYTES, Header, checksum, expect_header, volume_of
from polarkv_dataplane.disk.transfers import Transfers

PIECE_BYTES = 16 << 20
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_log = logging.getLogger(__name__)


class NoSpace(Exception):
    """The file system is full."""


class Missing(Exception):
    """There is no file of this key."""


class Dropped(Exception):
    """The operation is too late to touch memory or files."""


class Files:
    """The data directories. Safe for several threads as long as each key is used by one at a time."""

    def __init__(self, folders: Sequence[Path], depth: int = 8) -> None:
        """Prepare the directories, and remove what a dead process left half written.

        ``depth`` bounds the transfers of one volume (:class:`Transfers`). More threads than that verify what was read
        meanwhile: transfers that begin together end together, and the disk would idle while all of them are verified.

        Raises:
            ConfigurationError: a directory cannot be used.
        """
        self.folders = list(folders)
        self._serial = itertools.count()
        self._made: set[str] = set()
        self._local = threading.local()
        self._transfers = [Transfers(depth) for _ in self.folders]
        self.direct = [self._prepare(folder) for folder in self.folders]

    @staticmethod
    def _prepare(folder: Path) -> int:
        """Make the directories of one volume; return O_DIRECT, or 0 where the file system refuses it."""
        try:
            (folder / "data").mkdir(exist_ok=True)
            (folder / "tmp").mkdir(exist_ok=True)
            for entry in os.scandir(folder / "tmp"):
                os.unlink(entry.path)
            probe = folder / "tmp" / "probe"
            try:
                descriptor = os.open(probe, os.O_RDWR | os.O_CREAT | os.O_DIRECT | os.O_CLOEXEC, 0o600)
                try:
                    os.pwrite(descriptor, mmap.mmap(-1, ALIGNMENT_BYTES), 0)
                finally:
                    os.close(descriptor)
                return os.O_DIRECT
            except OSError as error:
                if error.errno in _NO_SPACE:  # full, but it takes O_DIRECT: the open said so
                    return os.O_DIRECT
                _log.warning("%s: no O_DIRECT (%s): files pass through the page cache", folder, error.strerror)
                return 0
            finally:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(probe)
        except OSError as error:
            raise ConfigurationError("directories", str(folder), f"{error.strerror}: make it writable") from error

    def volume(self, key: bytes) -> int:
        """Which volume a key's file is on."""
        return volume_of(key, len(self.folders))

    def path(self, key: bytes) -> str:
        """Where a key's file is."""
        name = key.hex()
        return f"{self.folders[self.volume(key)]}/data/{name[:2]}/{name[2:4]}/{name}"

    def write(self, header: Header, slot: memoryview, verify: Callable[[], None]) -> int:
        """Put the bytes of ``slot`` (header, payload, padding) on disk; return the file's allocated bytes.

        ``verify`` runs when they are written and before the file has its name; what it raises leaves no file.

        Raises:
            NoSpace: the file system is full. OSError: as the system says.
        """
        volume = self.volume(header.key)
        temporary = f"{self.folders[volume]}/tmp/{next(self._serial)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | self.direct[volume]
        try:
            descriptor = os.open(temporary, flags, 0o600)
            try:
                with self._transfers[volume].under_way(len(slot)):
                    for start in range(0, len(slot), PIECE_BYTES):
                        _write_all(descriptor, slot[start : start + PIECE_BYTES], start)
                allocated_bytes = os.fstat(descriptor).st_blocks * 512
            finally:
                os.close(descriptor)
            verify()
            self._publish(temporary, self.path(header.key))
            return allocated_bytes
        except BaseException as error:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            if isinstance(error, OSError) and error.errno in _NO_SPACE:
                raise NoSpace(error.strerror) from error
            raise

    def _publish(self, temporary: str, path: str) -> None:
        folder = os.path.dirname(path)
        if folder not in self._made:
            os.makedirs(folder, mode=0o700, exist_ok=True)
            self._made.add(folder)  # at most 65,536 a volume
        os.rename(temporary, path)

    def read(self, header: Header, slot: memoryview, check: Callable[[], None]) -> int:
        """Fill ``slot`` from the key's file and verify all of it; return the file's allocated bytes.

        The slot holds no valid header until payload and checksum have been found right. ``check`` runs before each
        piece and may raise.

        Raises:
            Missing: no such file. Damaged: its bytes are not those of ``header``. OSError: as the system says.
        """
        volume = self.volume(header.key)
        try:
            descriptor = os.open(self.path(header.key), os.O_RDONLY | os.O_CLOEXEC | self.direct[volume])
        except FileNotFoundError:
            raise Missing(f"{short(header.key)}: no file") from None
        try:
            check()
            slot[:HEADER_BYTES] = ERASED
            found = os.fstat(descriptor)
            if found.st_size != len(slot):
                raise Damaged(f"{short(header.key)}: the file has {found.st_size} bytes, expected {len(slot)}")
            first = self._first_block()
            with self._transfers[volume].under_way(len(slot)):
                check()
                _fill(descriptor, header.key, first, slot, check)
        finally:
            os.close(descriptor)
        self._verify(header, first, slot)
        check()
        slot[HEADER_BYTES:ALIGNMENT_BYTES] = first[HEADER_BYTES:]
        slot[:HEADER_BYTES] = first[:HEADER_BYTES]
        return found.st_blocks * 512

    @staticmethod
    def _verify(header: Header, first: memoryview, slot: memoryview) -> None:
        found = expect_header(first, header.key, header.length_bytes)
        if found.checksum != header.checksum:
            raise Damaged(f"{short(header.key)}: the file's checksum is another than the manager's")
        end = HEADER_BYTES + header.length_bytes
        if checksum((first[HEADER_BYTES : min(end, ALIGNMENT_BYTES)], slot[ALIGNMENT_BYTES:end])) != header.checksum:
            raise Damaged(f"{short(header.key)}: the file's bytes do not match their checksum")

    def _first_block(self) -> memoryview:
        """An aligned block of this thread's, where a file's header waits until the payload is known to be right."""
        block: memoryview | None = getattr(self._local, "block", None)
        if block is None:
            block = self._local.block = memoryview(mmap.mmap(-1, ALIGNMENT_BYTES))
        return block

    def delete(self, key: bytes) -> None:
        """Remove a key's file, if there is one. Raises OSError as the system says."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path(key))


def verify_memory(header: Header, slot: memoryview) -> None:
    """Check that a slot holds what ``header`` says.

    Raises:
        Damaged: it does not.
    """
    found = expect_header(slot, header.key, header.length_bytes)
    if found.checksum != header.checksum:
        raise Damaged(f"{short(header.key)}: the checksum in memory is another than the manager's")
    if checksum((slot[HEADER_BYTES : HEADER_BYTES + header.length_bytes],)) != header.checksum:
        raise Damaged(f"{short(header.key)}: the bytes in memory do not match their checksum")


def _fill(descriptor: int, key: bytes, first: memoryview, slot: memoryview, check: Callable[[], None]) -> None:
    """A file's first block into ``first``, the rest into the rest of ``slot``."""
    got = os.preadv(descriptor, [first, slot[ALIGNMENT_BYTES:PIECE_BYTES]], 0)
    while got < len(slot):
        check()
        more = os.preadv(descriptor, [slot[got : got + PIECE_BYTES]], got) if got >= ALIGNMENT_BYTES else 0
        if not more:
            raise Damaged(f"{short(key)}: the file ended after {got} bytes, expected {len(slot)}")
        got += more


def _write_all(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, offset)
        data = data[written:]
        offset += written
