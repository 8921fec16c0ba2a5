"""The inventory: what the files' own headers say, read at start in the background, then reported from memory."""

from __future__ import annotations

import functools
import logging
import os
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from polarkv_client.keys import KEY_BYTES
from polarkv_client.layout import HEADER_BYTES, Header, stride_bytes, unpack_header
from polarkv_client.protocol.messages import InventoryItem
from polarkv_dataplane.disk.executor import KeyedExecutor, Task
from polarkv_dataplane.disk.files import Files
from polarkv_dataplane.disk.index import Index, Report
from polarkv_dataplane.runtime.counters import Counters
from polarkv_dataplane.runtime.log import LimitedLogger
from polarkv_dataplane.runtime.session import INVENTORY_BATCH

_limited = LimitedLogger(logging.getLogger(__name__))


def read_header(path: str, key: bytes) -> tuple[Header, int] | None:
    """(header, allocated bytes) of a key's file, None when it is not a whole file of this key.

    Raises:
        OSError: as the system says.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        found = os.fstat(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # one block, not a read-ahead of many
        header = unpack_header(os.pread(descriptor, HEADER_BYTES, 0))
    finally:
        os.close(descriptor)
    if header is None or header.key != key or found.st_size != stride_bytes(header.length_bytes):
        return None
    return header, found.st_blocks * 512


class Scan:
    """Fills the index from the disks, several directories at a time."""

    def __init__(self, files: Files, index: Index, executor: KeyedExecutor, counters: Counters, threads: int) -> None:
        self._files = files
        self._index = index
        self._executor = executor
        self._counters = counters
        self._threads = threads
        counters.add("polarkv_disk_scanned_files_total", 0)

    def run(self, stopping: Callable[[], bool]) -> None:
        """Read every header; operations go on meanwhile."""
        folders = [path for folder in self._files.folders for path in _subfolders(folder / "data")]
        with ThreadPoolExecutor(self._threads, "disk-scan") as pool:
            for _ in pool.map(functools.partial(self._folder, stopping), folders):
                if stopping():
                    pool.shutdown(cancel_futures=True)
                    return
        self._index.scanned()

    def _folder(self, stopping: Callable[[], bool], folder: Path) -> None:
        for inner in _subfolders(folder):
            if stopping():
                return
            try:
                with os.scandir(inner) as entries:
                    for entry in entries:
                        self._file(entry.path, entry.name)
            except OSError as error:
                self._reject(f"{inner}: {error}")

    def _file(self, path: str, name: str) -> None:
        try:
            key = bytes.fromhex(name)
            if len(key) != KEY_BYTES or self._files.path(key) != path:
                raise ValueError
        except ValueError:
            self._reject(f"{path}: not the name of a chunk's file in this place; it is left alone")
            return
        self._counters.add("polarkv_disk_scanned_files_total")
        try:
            found = read_header(path, key)
            if found is not None:
                self._index.discover(*found)
                return
        except FileNotFoundError:
            return
        except OSError as error:
            self._reject(f"{path}: {error}")
            return
        self._reject(f"{path}: not a whole file of its key; it is removed")
        # In turn with the key's other operations: an offload may just be putting a good file there.
        self._executor.submit(Task(key, functools.partial(self._remove_if_bad, path, key), fenced=False))

    def _remove_if_bad(self, path: str, key: bytes) -> None:
        try:
            if stat.S_ISREG(os.lstat(path).st_mode) and read_header(path, key) is None:
                self._files.delete(key)
        except FileNotFoundError:
            pass
        except OSError as error:
            self._reject(f"{path}: {error}")

    def _reject(self, text: str) -> None:
        self._counters.add("polarkv_disk_scan_rejected_total")
        _limited.warning("scan", "%s", text)


def _subfolders(folder: Path) -> list[Path]:
    """The fan-out directories (two hex digits) in a folder, in order."""
    try:
        with os.scandir(folder) as entries:
            return sorted(Path(entry.path) for entry in entries if len(entry.name) == 2 and entry.is_dir())
    except OSError as error:
        _limited.warning("scan", "%s: %s", folder, error)
        return []


def batches(index: Index, report: Report, going_on: Callable[[], bool]) -> Iterator[Callable[[], list[InventoryItem]]]:
    """Yield what builds each batch of a report, until all is told or ``going_on`` says no."""
    while going_on():
        keys = index.next_keys(report, INVENTORY_BATCH, 0.2)
        if keys is None:
            return
        if keys:
            yield functools.partial(index.items, report, keys)
