"""What lies on disk, in memory: one small record a file, and the bytes that all files take."""

from __future__ import annotations

import struct
import threading
from typing import NamedTuple

from polarkv_client.layout import Header
from polarkv_client.protocol.messages import InventoryItem

# One bytes object a key (57 bytes) in place of a tuple of boxed numbers (about 200).
_RECORD = struct.Struct("<QIIQ")


class Record(NamedTuple):
    """What a file is known to hold; ``allocated_bytes`` are its blocks."""

    checksum: int
    length_bytes: int
    tenant: int
    allocated_bytes: int


class Report:
    """One inventory that is being sent: which keys were spoken of since it began, and how far it has come."""

    def __init__(self, keys: list[bytes], position: int) -> None:
        self.keys = keys
        self.position = position
        self.touched: set[bytes] = set()


class Index:
    """Files by key. It is filled by a scan of the disks, once, and by operations, which know better than the scan."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self._lock = threading.Lock()
        self._grown = threading.Condition(self._lock)
        self._records: dict[bytes, bytes] = {}
        self._used_bytes = 0
        self._reserved_bytes = 0
        self._report: Report | None = None
        self._scanning = True
        self._touched: set[bytes] = set()  # keys of operations while the scan runs
        self._discovered: list[bytes] = []  # keys that the scan found, in that order

    @property
    def used_bytes(self) -> int:
        """Allocated bytes of all known files."""
        return self._used_bytes

    def __len__(self) -> int:
        return len(self._records)

    def reserve(self, key: bytes, size_bytes: int) -> bool:
        """Hold room for a file that takes the place of ``key``'s present one, if any; False when there is none."""
        with self._lock:
            raw = self._records.get(key)
            frees = _RECORD.unpack(raw)[3] if raw else 0
            if self._used_bytes + self._reserved_bytes + size_bytes - frees > self.capacity_bytes:
                return False
            self._reserved_bytes += size_bytes
            return True

    def unreserve(self, size_bytes: int) -> None:
        """Give back what :meth:`reserve` held."""
        with self._lock:
            self._reserved_bytes -= size_bytes

    def put(self, header: Header, allocated_bytes: int, reserved_bytes: int = 0) -> None:
        """A file is there now, for which ``reserved_bytes`` were held."""
        with self._lock:
            self._reserved_bytes -= reserved_bytes
            self._put(header, allocated_bytes)

    def _put(self, header: Header, allocated_bytes: int) -> None:
        self._remove(header.key)
        self._records[header.key] = _RECORD.pack(header.checksum, header.length_bytes, header.tenant, allocated_bytes)
        self._used_bytes += allocated_bytes

    def remove(self, key: bytes) -> None:
        """No file is there now."""
        with self._lock:
            self._remove(key)

    def _remove(self, key: bytes) -> None:
        raw = self._records.pop(key, None)
        if raw is not None:
            self._used_bytes -= _RECORD.unpack(raw)[3]

    def touch(self, key: bytes) -> None:
        """An operation on this key was asked for: its end, neither scan nor report, will say what is there."""
        with self._lock:
            if self._scanning:
                self._touched.add(key)
            if self._report is not None:
                self._report.touched.add(key)

    def discover(self, header: Header, allocated_bytes: int) -> bool:
        """Take a file that the scan found, unless an operation on its key has come."""
        with self._lock:
            if header.key in self._touched:
                return False
            self._put(header, allocated_bytes)
            self._discovered.append(header.key)
            self._grown.notify_all()
            return True

    def scanned(self) -> None:
        """The scan has seen every file."""
        with self._lock:
            self._scanning = False
            self._touched.clear()
            self._grown.notify_all()

    def begin_report(self) -> Report:
        """Start an inventory of what is known now and what the scan goes on to find, in place of an older one."""
        with self._lock:
            self._report = Report(list(self._records), len(self._discovered))
            return self._report

    def end_report(self, report: Report) -> None:
        """Forget what an inventory needed."""
        with self._lock:
            if self._report is report:
                self._report = None
                if not self._scanning:
                    self._discovered.clear()

    def next_keys(self, report: Report, count: int, wait_s: float) -> list[bytes] | None:
        """Up to ``count`` keys to report next, none when the scan found none within ``wait_s``; None at the end."""
        with self._lock:
            if report.keys:
                keys = report.keys[-count:]
                del report.keys[-count:]
                return keys
            if report.position >= len(self._discovered):
                if not self._scanning:
                    return None
                self._grown.wait(wait_s)
            keys = self._discovered[report.position : report.position + count]
            report.position += len(keys)
            return keys

    def items(self, report: Report, keys: list[bytes]) -> list[InventoryItem]:
        """Items for those of ``keys`` that are there now and of which no operation has spoken."""
        found = []
        with self._lock:
            for key in keys:
                raw = self._records.get(key)
                if raw is not None and key not in report.touched:
                    checksum, length_bytes, tenant, _ = _RECORD.unpack(raw)
                    found.append(InventoryItem(key, length_bytes, checksum, tenant))
        return found
