"""Callers' buffers, registered once and kept for the next call.

A registration pins physical pages. If the memory were freed and mapped anew meanwhile, the device would move bytes from
and to pages that nobody sees. So what is kept holds the buffer as well: its memory cannot be freed before the
registration is. That is done only where holding hurts nobody (:func:`can_hold`); other buffers are copied through
registered memory of the lane's own. What is kept is bounded in bytes and number, the longest unused goes first, and
what nobody has used for :data:`IDLE_S` is let go of by the sweep.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import threading
import time
from bisect import bisect_right, insort
from collections import OrderedDict
from typing import Any

from polarkv_client.buffers import address_of
from polarkv_client.transport.verbs.seam import Access, Device, Region, VerbsError

LEAST_BYTES = 64 << 10  # a smaller buffer is copied in less time than it takes to register
IDLE_S = 30.0
MOST_REGIONS = 1024
_RETRY_S = 5.0  # after a registration failed


class Registered:
    """One kept registration. ``users`` are operations under way; it is not closed while there are any."""

    __slots__ = ("end", "region", "start", "used_at", "users", "view", "writable")

    def __init__(self, start: int, end: int, view: memoryview, writable: bool, region: Region) -> None:
        self.start = start
        self.end = end
        self.view = view
        self.writable = writable
        self.region = region
        self.users = 1
        self.used_at = time.monotonic()


class Registrations:
    """The registrations of one device; safe for several threads."""

    def __init__(self, device: Device, most_bytes: int) -> None:
        self._device = device
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._by_start: list[tuple[int, int]] = []  # (start, number), sorted
        self._kept: OrderedDict[int, Registered] = OrderedDict()  # by number, the longest unused first
        self._next = 0
        self._size_bytes = 0
        self._longest_bytes = 0
        self._retry_at = 0.0
        self._closed = False
        self.failures = 0
        self.last_failure = ""

    @property
    def size_bytes(self) -> int:
        """Bytes registered now."""
        return self._size_bytes

    def __len__(self) -> int:
        return len(self._kept)

    def use(self, view: memoryview, *, writable: bool) -> Registered | None:
        """A registration that covers ``view``, for the time until :meth:`done`; None: it must be copied."""
        if view.nbytes < LEAST_BYTES or not can_hold(view):
            return None
        start = address_of(view)
        end = start + view.nbytes
        with self._lock:
            if self._closed:
                return None
            found = self._find(start, end, writable)
            if found is not None:
                return found
            if time.monotonic() < self._retry_at or not self._make_room(view.nbytes):
                return None
            self._size_bytes += view.nbytes  # reserved, while the lock is let go: this may take milliseconds
        return self._register(start, end, view, writable)

    def done(self, registered: Registered) -> None:
        """The operation that used it has ended."""
        with self._lock:
            registered.users -= 1
            registered.used_at = time.monotonic()
            if self._closed and not registered.users:
                registered.region.close()

    def sweep(self, now: float) -> None:
        """Let go of what has been idle."""
        with self._lock:
            for number, registered in list(self._kept.items()):
                if not registered.users and now - registered.used_at >= IDLE_S:
                    self._drop(number)

    def close(self) -> None:
        """Let go of all of it; what is in use, at its end."""
        with self._lock:
            self._closed = True
            for number, registered in list(self._kept.items()):
                if not registered.users:
                    self._drop(number)
            self._kept.clear()
            self._by_start.clear()

    def _find(self, start: int, end: int, writable: bool) -> Registered | None:
        place = bisect_right(self._by_start, (start, self._next))
        while place:
            place -= 1
            begin, number = self._by_start[place]
            if begin + self._longest_bytes < end:
                return None
            registered = self._kept[number]
            if registered.end >= end and (registered.writable or not writable):
                registered.users += 1
                self._kept.move_to_end(number)
                return registered
        return None

    def _make_room(self, size_bytes: int) -> bool:
        if size_bytes > self._most_bytes:
            return False
        for number, registered in list(self._kept.items()):
            if self._size_bytes + size_bytes <= self._most_bytes and len(self._kept) < MOST_REGIONS:
                break
            if not registered.users:
                self._drop(number)
        return self._size_bytes + size_bytes <= self._most_bytes and len(self._kept) < MOST_REGIONS

    def _register(self, start: int, end: int, view: memoryview, writable: bool) -> Registered | None:
        # What may be written is registered for writing at once: a buffer that is stored from is often loaded into.
        writable = writable or not view.readonly
        access = Access.LOCAL_WRITE if writable else Access.NONE
        try:
            region = self._device.register(start, end - start, access)
        except VerbsError as error:
            with self._lock:
                self._size_bytes -= end - start
                self.failures += 1
                self.last_failure = str(error)
                if error.number in (errno.ENOMEM, errno.EAGAIN, errno.ENOSPC):  # not this buffer's fault
                    self._retry_at = time.monotonic() + _RETRY_S
            return None
        made = Registered(start, end, view, writable, region)
        with self._lock:
            if not self._closed:
                self._kept[self._next] = made
                insort(self._by_start, (start, self._next))
                self._next += 1
                self._longest_bytes = max(self._longest_bytes, end - start)
        return made

    def _drop(self, number: int) -> None:
        registered = self._kept.pop(number)
        self._by_start.remove((registered.start, number))
        self._size_bytes -= registered.end - registered.start
        registered.region.close()


def can_hold(view: memoryview) -> bool:
    """Whether keeping ``view`` for a while takes nothing from its owner but memory.

    A bytearray could not be resized any more, nor a mapping closed. Arrays and tensors cannot be told from here to give
    their memory up; bytes never change.
    """
    owner: Any = view.obj
    if isinstance(owner, (bytes, ctypes.Array)):
        return True
    if not hasattr(owner, "__array_interface__"):
        return False
    while owner is not None and not isinstance(owner, (bytearray, mmap.mmap)):  # an array made over one of these
        owner = owner.obj if isinstance(owner, memoryview) else getattr(owner, "base", None)
    return owner is None
