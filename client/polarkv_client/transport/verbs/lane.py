"""A lane: one queue pair to one device of one cache node, with what it takes to move chunks over it.

One call uses a lane at a time. After any error, a deadline or a cancellation its queue pair is destroyed before the
call returns: nothing can land in the caller's buffers any more, and nothing of it in the node's memory once the slab
server has destroyed the other end.
"""

from __future__ import annotations

import mmap
import os
import select
import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import Generic, Protocol, TypeVar

from polarkv_client import errors, layout
from polarkv_client.buffers import address_of
from polarkv_client.protocol.messages import QueuePair, RdmaConnected, RdmaRegion
from polarkv_client.transport.base import POLL_S, Scope
from polarkv_client.transport.verbs.local import LocalDevice
from polarkv_client.transport.verbs.seam import (
    Access,
    Completion,
    Completions,
    Opcode,
    Pair,
    Region,
    Status,
    Work,
)

QUEUED = 128  # work requests under way
IN_FLIGHT_BYTES = 16 << 20
HEADERS = 64  # chunks under way
BLOCK_BYTES, BLOCKS = 128 << 10, 8
_HEADERS_AT, _ZEROS_AT, _BLOCKS_AT = 0, layout.ALIGNMENT_BYTES, 2 * layout.ALIGNMENT_BYTES
_MEMORY_BYTES = _BLOCKS_AT + BLOCKS * BLOCK_BYTES
NEVER = float("inf")
_POLLED = 32
_TEXTS = {
    Status.LOCAL_PROTECTION: "this side's memory is not registered (any more)",
    Status.FLUSHED: "the queue pair had failed",
    Status.REMOTE_ACCESS: "the slab server's device does not allow this access: wrong key, or outside the memory",
    Status.RETRIES_EXCEEDED: "the slab server's device does not answer",
}


class RemoteMemory:
    """A node's memory as its registrations: where an offset lies, and by which key it may be accessed."""

    def __init__(self, regions: Sequence[RdmaRegion], size_bytes: int) -> None:
        self._regions = sorted(regions, key=lambda region: region.offset_bytes)
        self._starts = [region.offset_bytes for region in self._regions]
        self.size_bytes = size_bytes

    def runs(self, offset_bytes: int, size_bytes: int) -> list[tuple[int, int, int]]:
        """(address, key, bytes) of each registration's part, in order.

        Raises:
            ProtocolError: the slab server did not say of a part where it is.
        """
        found = []
        while size_bytes:
            place = bisect_right(self._starts, offset_bytes) - 1
            region = self._regions[place] if place >= 0 else None
            inside = offset_bytes - region.offset_bytes if region else 0
            if region is None or inside >= region.size_bytes:
                raise errors.ProtocolError(f"the slab server has not registered its memory at {offset_bytes}")
            run = min(size_bytes, region.size_bytes - inside)
            found.append((region.address + inside, region.rkey, run))
            offset_bytes += run
            size_bytes -= run
        return found


class Step(Protocol):
    """Something posted that ends with one signaled operation. ``works`` and ``size_bytes`` count against the bounds."""

    works: int
    size_bytes: int


Posted = TypeVar("Posted", bound=Step)


class Lane(Generic[Posted]):
    """See above. Made by :meth:`make`, of use after :meth:`connect`."""

    def __init__(self, device: LocalDevice, memory: mmap.mmap, region: Region, events: Completions, pair: Pair) -> None:
        self.device = device
        self.can_write = False
        self.number = -1  # the session's for it
        self.remote = RemoteMemory([], 0)
        self.bytes_left = IN_FLIGHT_BYTES
        self.works_left = min(QUEUED, device.device.limits.queued)
        self.free_blocks = list(range(BLOCKS))
        self.broken = ""  # why it is of no more use
        # Until when the write under way may go on, by time.monotonic(). Set before a write's first look at the time,
        # cleared when nothing of it can be under way: what the session's renewals go by.
        self.write_until = NEVER
        self._memory = memory
        self.view = memoryview(memory)
        self._address = address_of(self.view)
        self._region: Region | None = region
        self._events: Completions | None = events
        self._pair: Pair | None = pair
        self._posted: deque[Posted] = deque()
        self._number = 0
        self._moved_at = 0.0
        self._waker = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._waker_lock = threading.Lock()
        self._poll = select.poll()
        self._poll.register(events.descriptor, select.POLLIN)
        self._poll.register(self._waker, select.POLLIN)

    @classmethod
    def make(cls, device: LocalDevice) -> Lane[Posted]:
        """A lane on a device, not connected yet. Raises Unavailable (VerbsError)."""
        # Its owner may close the device at any time; what is made of a closed one crashes the bindings.
        with device.kept(), ExitStack() as undo:
            memory = mmap.mmap(-1, _MEMORY_BYTES)
            with memoryview(memory) as view:
                address = address_of(view)
            region = device.device.register(address, _MEMORY_BYTES, Access.LOCAL_WRITE)
            undo.callback(region.close)
            events = device.device.completions(QUEUED, events=True)
            undo.callback(events.close)
            pair = device.device.pair(events, device.port_number, min(QUEUED, device.device.limits.queued))
            undo.callback(pair.close)
            lane = cls(device, memory, region, events, pair)
            device.hold(lane)
            undo.pop_all()
        return lane

    def describe(self) -> QueuePair:
        """This end, for the other one. Raises Unavailable."""
        assert self._pair is not None
        return self.device.describe(self._pair)

    def connect(self, mine: QueuePair, answer: RdmaConnected, *, can_write: bool) -> None:
        """Join the other end. Raises Unavailable."""
        assert self._pair is not None
        # What the other end may do here: nothing, not even when it lies about who it is.
        self._pair.connect(self.device.gid.number, mine, answer.pair, Access.NONE)
        self.remote = RemoteMemory(answer.regions, answer.memory_bytes)
        self.number, self.can_write = answer.lane, can_write

    def header_address(self, slot: int) -> int:
        """Where the header of the chunk with this slot lies in the lane's own memory."""
        return self._address + _HEADERS_AT + slot * layout.HEADER_BYTES

    def header(self, slot: int) -> memoryview:
        """The same, as bytes."""
        start = _HEADERS_AT + slot * layout.HEADER_BYTES
        return self.view[start : start + layout.HEADER_BYTES]

    @property
    def zeros_address(self) -> int:
        """4 KiB of zeros."""
        return self._address + _ZEROS_AT

    def block_address(self, block: int) -> int:
        """Where a block begins."""
        return self._address + _BLOCKS_AT + block * BLOCK_BYTES

    def block(self, block: int, size_bytes: int) -> memoryview:
        """The first bytes of a block."""
        start = _BLOCKS_AT + block * BLOCK_BYTES
        return self.view[start : start + size_bytes]

    def works(self, opcode: Opcode, address: int, lkey: int, offset_bytes: int, size_bytes: int) -> list[Work]:
        """Unsignaled work between this side's ``address`` and the node's memory at ``offset_bytes``.

        ``lkey`` 0: the lane's own memory.
        """
        assert self._region is not None
        made = []
        for remote, rkey, run in self.remote.runs(offset_bytes, size_bytes):
            made.append(Work(0, opcode, address, run, lkey or self._region.lkey, remote, rkey, False))
            address += run
        return made

    def has_room(self, step: Posted) -> bool:
        """Whether a step may be posted now; a single one always may."""
        return not self._posted or (self.works_left >= step.works and self.bytes_left >= step.size_bytes)

    def sign(self, works: list[Work], step: Posted) -> list[Work]:
        """Take a step in: its last operation is signaled, and :meth:`finished` names the step when that is over."""
        works[-1] = works[-1]._replace(number=self._number, signaled=True)
        self._number += 1
        self.works_left -= step.works
        self.bytes_left -= step.size_bytes
        self._posted.append(step)
        return works

    def post(self, works: Sequence[Work]) -> None:
        """Begin what was signed. Raises Unavailable."""
        self._check()
        assert self._pair is not None
        self._pair.post(works)

    @property
    def busy(self) -> bool:
        """Whether steps are under way."""
        return bool(self._posted)

    def finished(self, scope: Scope) -> list[Posted]:
        """Steps that are over, in order; waits for at least one.

        Raises:
            Unavailable: the transfer failed. DeadlineExceeded, LeaseEnded, Cancelled: it took too long.
        """
        assert self._events is not None
        self._moved_at = time.monotonic()
        while True:
            found = self._events.poll(_POLLED) or self._wait(scope)
            if found:
                break
        done = []
        for completion in found:
            if completion.status != Status.SUCCESS:
                raise errors.Unavailable(
                    _TEXTS.get(completion.status, f"the transfer failed with status {completion.status}")  # type: ignore[call-overload]
                )
            step = self._posted.popleft()
            self.works_left += step.works
            self.bytes_left += step.size_bytes
            done.append(step)
        return done

    def _wait(self, scope: Scope) -> Sequence[Completion]:
        assert self._events is not None
        self._check()
        try:
            timeout_s = scope.remaining()
        except errors.LeaseEnded as ended:
            ended.peer_silent = time.monotonic() - self._moved_at >= POLL_S
            raise
        self._events.arm()
        if found := self._events.poll(_POLLED):  # between the last look and the arming
            return found
        for descriptor, _ in self._poll.poll(timeout_s * 1000):
            if descriptor == self._waker:
                with suppress(BlockingIOError):
                    os.eventfd_read(self._waker)
            else:
                self._events.take_event()
        return ()

    def wake(self) -> None:
        """Have a wait look at the scope, and at :attr:`broken`, again. Any thread."""
        with self._waker_lock:
            if self._waker >= 0:
                with suppress(BlockingIOError):
                    os.eventfd_write(self._waker, 1)

    def give_up(self, why: str) -> None:
        """It is of no more use: whoever waits ends with an error. Any thread."""
        self.broken = self.broken or why
        self.wake()

    def _check(self) -> None:
        if self.broken:
            raise errors.Unavailable(self.broken)

    def close(self) -> None:
        """Destroy the queue pair, then the rest. For the thread that has the lane. A second call does nothing."""
        pair, self._pair = self._pair, None
        if pair is None:
            return
        self.broken = self.broken or "the lane is closed"
        # If this fails the lane's memory must stay, and the write's note: the device may still be at work on both.
        pair.close()
        self.write_until = NEVER
        region, events = self._region, self._events
        self._region = self._events = None
        assert region is not None and events is not None
        region.close()
        events.close()
        self._posted.clear()
        with self._waker_lock:
            os.close(self._waker)
            self._waker = -1
        # Unmapped when the last view of it has gone: an error's traceback may keep one for a while.
        del self.view, self._memory
        self.device.let_go(self)
