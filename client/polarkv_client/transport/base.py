"""What every transport promises, and the scope that bounds an operation.

Problem, contract, residual race and tests: docs/design/transport.md.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple

from polarkv_client import errors, layout
from polarkv_client.buffers import Views
from polarkv_client.keys import short
from polarkv_client.protocol.grants import Extent, Grant
from polarkv_client.protocol.messages import NodeInfo

# What is moved at once, and hashed right after, out of the last-level cache; less costs calls and wake-ups.
PIECE_BYTES = 1 << 20
POLL_S = 0.1  # how long a socket waits before it looks at the scope again


class _Cancellation:
    """Shared by an operation's scopes: a flag, and what must be woken when it is raised."""

    __slots__ = ("lock", "raised", "wakers")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.raised = False
        self.wakers: set[Callable[[], None]] = set()


class Scope:
    """The bounds of an operation: a deadline (``time.monotonic()``) and whether the caller still waits.

    :meth:`until` makes a narrower scope, that of a lease or ticket, with the same cancellation.
    """

    __slots__ = ("_cancellation", "_narrowed", "deadline")

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self._narrowed = False
        self._cancellation = _Cancellation()

    def until(self, deadline: float) -> Scope:
        """This scope, ending at ``deadline`` if that is sooner."""
        scope = Scope.__new__(Scope)
        scope.deadline = min(deadline, self.deadline)
        scope._narrowed = deadline < self.deadline
        scope._cancellation = self._cancellation
        return scope

    @property
    def cancelled(self) -> bool:
        """Whether the caller has gone."""
        return self._cancellation.raised

    def check(self) -> None:
        """Raises LeaseEnded, DeadlineExceeded or Cancelled when there is no point in going on."""
        if time.monotonic() >= self.deadline:  # first: an operation that ran out of time cancels what it started
            if self._narrowed:
                raise errors.LeaseEnded("the lease or ticket has ended")
            raise errors.DeadlineExceeded("the operation's deadline has passed")
        if self._cancellation.raised:
            raise errors.Cancelled("the operation was cancelled")

    def remaining(self) -> float:
        """Seconds left, more than 0. Raises as :meth:`check`."""
        self.check()
        return max(self.deadline - time.monotonic(), 1e-4)

    def cancel(self) -> None:
        """Raise the flag and wake what waits. A second call does nothing."""
        with self._cancellation.lock:  # held while waking, so that forget() means what it says
            self._cancellation.raised = True
            for wake in self._cancellation.wakers:
                wake()
            self._cancellation.wakers.clear()

    def on_cancel(self, wake: Callable[[], None]) -> None:
        """Have ``wake`` called (from another thread; it must not block) at :meth:`cancel`; at once if that has been."""
        with self._cancellation.lock:
            if not self._cancellation.raised:
                self._cancellation.wakers.add(wake)
                return
        wake()

    def forget(self, wake: Callable[[], None]) -> None:
        """The opposite of :meth:`on_cancel`. When it returns, ``wake`` is not called any more."""
        with self._cancellation.lock:
            self._cancellation.wakers.discard(wake)


class HeldGrant(NamedTuple):
    """A grant as it came (signed) and what it says."""

    signed: bytes
    body: Grant


class Pick(NamedTuple):
    """One chunk to move: its ``place`` in the grant's extents, the extent, and the caller's views of the payload."""

    place: int
    extent: Extent
    views: Views


class Transport(ABC):
    """Moves the payloads of one grant's extents between the caller's buffers and one life of one cache node.

    Several threads may call at once. Calls block, and end at the scope's deadline plus at most one piece's copy or
    :data:`POLL_S`, whatever the peer does. What holds afterwards:

    - ``read`` returned None for a pick: the views hold what the header at that extent says was stored under the
      extent's key; length, header checksum, grant checksum and the bytes' own checksum agree. The caller still must
      throw it away when the lease has ended meanwhile.
    - ``read`` returned an error for a pick, or raised: the views hold anything. Nothing is written to them after the
      return.
    - ``write`` returned: payloads and headers lie in the node's memory.
    - ``write`` raised: the extents hold anything, and over TCP the peer may still be taking in what was sent; the
      extents must be aborted, and come back through quarantine.
    - A deadline or a cancellation is noticed between pieces; no piece is started after it. Connections in an unknown
      state are closed, never used again.
    """

    name: ClassVar[str]
    parts_a_thread: ClassVar[int] = 1  # more where a call costs little: a late thread then leaves less to wait for

    def __init__(self, node: NodeInfo, parallelism: int) -> None:
        self.node = node
        self.parallelism = parallelism  # how many calls at once are worth their threads

    @abstractmethod
    def read(self, grant: HeldGrant, picks: Sequence[Pick], scope: Scope) -> list[errors.PolarKVError | None]:
        """Read picks into their views. One result a pick: None, or what went wrong with it.

        Raises:
            Refused, Unauthorized: the node said no to the grant as a whole.
        """

    @abstractmethod
    def write(self, grant: HeldGrant, picks: Sequence[Pick], scope: Scope) -> list[int]:
        """Write picks from their views. Returns the payloads' checksums, in order.

        Raises:
            Refused, Unauthorized, Unavailable, DeadlineExceeded, LeaseEnded, ProtocolError: no pick counts as written.
        """

    @abstractmethod
    def reach(self, grant: HeldGrant, scope: Scope) -> None:
        """Prove that the node can be reached this way, and keep what that took.

        Raises:
            Unavailable, Refused, DeadlineExceeded, ProtocolError: it cannot, and why.
        """

    def expect_life(self, grant: HeldGrant) -> None:
        """Raises Refused when the grant is for another life of the node than this transport leads to."""
        if grant.body.incarnation != self.node.incarnation:
            raise errors.Refused(
                f"{self.node.name}: the grant is for incarnation {grant.body.incarnation}, not {self.node.incarnation}"
            )

    def expect_within(self, picks: Sequence[Pick], memory_bytes: int) -> None:
        """For ways on which nobody else checks what this side does. Raises Refused: a pick is not all in the memory."""
        for pick in picks:
            extent = pick.extent
            end = extent.offset_bytes + layout.stride_bytes(extent.length_bytes)
            if extent.offset_bytes < 0 or end > memory_bytes:
                raise errors.Refused(f"an extent at {extent.offset_bytes} lies outside the memory of {self.node.name}")

    def peer_gone(self) -> bool:
        """Whether the node's server is known to have gone, without asking it; what is held of it is of no use then."""
        return False

    def upkeep(self) -> None:  # noqa: B027 (most have nothing to mend)
        """Called now and then from a thread of the client's own, to mend what broke. Bounded in time.

        Raises:
            PolarKVError: it could not be mended now.
        """

    @abstractmethod
    def ended_cleanly(self, error: BaseException) -> bool:
        """Whether, after a read failed with ``error``, no transfer of it can still be running anywhere."""

    @abstractmethod
    def close(self) -> None:
        """Give up connections and descriptors once the calls that use them have ended."""


def verify(extent: Extent, header: bytes | bytearray, checksum: int) -> errors.Damaged | None:
    """Whether what was read is what the extent promises: its header's key and length, and the checksum of all three.

    ``checksum`` is that of the payload as it was copied.
    """
    try:
        found = layout.expect_header(header, extent.key, extent.length_bytes)
    except errors.Damaged as damage:
        return damage
    if found.checksum != extent.checksum:
        return errors.Damaged(f"{short(extent.key)}: the header's checksum is not the grant's")
    if found.checksum != checksum:
        return errors.Damaged(f"{short(extent.key)}: the payload does not match its checksum")
    return None
