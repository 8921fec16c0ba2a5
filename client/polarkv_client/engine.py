"""What loads and stores share: manager, transports, the threads that move bytes, the loop that drives a batch.

Nothing here turns an error into a miss: errors are kept as values in the places of their chunks for ``client.py``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Generic, NamedTuple, TypeVar

from polarkv_client import errors
from polarkv_client.buffers import Views, length_of
from polarkv_client.channel import Channel
from polarkv_client.config import ClientConfig
from polarkv_client.host import host_id
from polarkv_client.manager_client import ManagerClient
from polarkv_client.placement import current_processor, step_aside
from polarkv_client.protocol import grants
from polarkv_client.protocol.messages import NodeInfo
from polarkv_client.transport.base import HeldGrant, Pick, Scope, Transport
from polarkv_client.transport.select import Transports
from polarkv_client.upkeep import Upkeep

log = logging.getLogger(__name__)
_BACKGROUND_CALLS = 1024
_BACKGROUND_S = 1.0
_LINGER_S = 0.02
_PART_BYTES = 1 << 20  # less than this is not worth another thread
Holder = TypeVar("Holder", bound="Held")


class _Forks:
    """Counts forks since the first process: a child shares its parent's sockets, but has not its threads."""

    count = 0

    @classmethod
    def note(cls) -> None:
        cls.count += 1


os.register_at_fork(after_in_child=_Forks.note)


class Counters:
    """Monotonic totals by name; safe for several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals: dict[str, int] = {}

    def add(self, name: str, amount: int = 1) -> None:
        """Count ``amount`` more."""
        with self._lock:
            self._totals[name] = self._totals.get(name, 0) + amount

    def totals(self) -> dict[str, int]:
        """A copy."""
        with self._lock:
            return dict(sorted(self._totals.items()))


class Background:
    """Tells the manager what no operation waits for: ended leases, given-up slots.

    Leases that ended cleanly ride along with the next call; what no call has taken within :data:`_LINGER_S` is told by
    this thread. Everything is bounded: what does not fit is dropped, because leases and tickets end by themselves.
    """

    def __init__(self, counters: Counters, release: Callable[[Channel, int, float], None]) -> None:
        self._counters = counters
        self._release = release
        self._queue: queue.Queue[Callable[[float], None] | None] = queue.Queue(_BACKGROUND_CALLS)
        self._lock = threading.Lock()
        self._ended: dict[Channel, list[int]] = {}
        self._lingering = False  # the thread looks at _ended by itself
        self._ends_at = float("inf")
        self._thread = threading.Thread(target=self._run, name="polarkv-background", daemon=True)
        self._thread.start()

    def put(self, call: Callable[[float], None]) -> None:
        """Have ``call`` run with a deadline. Never blocks."""
        try:
            self._queue.put_nowait(call)
        except queue.Full:
            self._counters.add("background_dropped")

    def ended(self, channel: Channel, *ended: int) -> None:
        """Leases were used and are done with."""
        with self._lock:
            leases = self._ended.setdefault(channel, [])
            room = _BACKGROUND_CALLS - len(leases)
            if len(ended) > room:
                self._counters.add("background_dropped", len(ended) - room)
            leases += ended[:room]
            if self._lingering:
                return
            self._lingering = True
        self.put(_nothing)

    def take_ended(self, channel: Channel) -> list[int]:
        """The leases that ended since, for a call that tells the manager."""
        if channel not in self._ended:
            return []
        with self._lock:
            return self._ended.pop(channel, [])

    def close(self, timeout_s: float) -> None:
        """Run what is queued, for so long at most, and end the thread."""
        self._ends_at = time.monotonic() + timeout_s
        with contextlib.suppress(queue.Full):  # then the thread does not wait, and looks at the time by itself
            self._queue.put_nowait(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while time.monotonic() < self._ends_at:
            closing = self._ends_at < float("inf")
            try:
                call = self._queue.get(timeout=_LINGER_S if self._lingering or closing else None)
            except queue.Empty:
                self._tell_ended()
                if closing:
                    return
                continue
            if call is None:
                self._tell_ended()
                return
            self._try(call)

    def _tell_ended(self) -> None:
        with self._lock:
            left, self._ended = self._ended, {}
            self._lingering = bool(left)
        for channel, leases in left.items():
            for lease in leases:
                self._try(partial(self._release, channel, lease))

    def _try(self, call: Callable[[float], None]) -> None:
        try:
            call(time.monotonic() + _BACKGROUND_S)
        except errors.PolarKVError as error:
            self._counters.add("background_failed")
            log.debug("not told to the manager: %s", error)


def _nothing(_: float) -> None:
    """Wakes the background thread."""


class Engine:
    """Everything that lives as long as a client."""

    def __init__(self, config: ClientConfig) -> None:
        self.config = config
        self._forks = _Forks.count
        self.counters = Counters()
        host = host_id()
        self.manager = ManagerClient(config, host)
        self.transports = Transports(config, host)
        self.upkeep = Upkeep(self.manager, self.transports)
        self.pool = ThreadPoolExecutor(config.threads, thread_name_prefix="polarkv-move")
        self.background = Background(
            self.counters, lambda channel, lease, deadline: self.manager.release_read(channel, lease, True, deadline)
        )

    @property
    def inherited(self) -> bool:
        """Whether this came from a parent process by fork. Parent and child would read each other's answers."""
        return self._forks != _Forks.count

    def count_transfer(self, transport: Transport, what: str, moved_bytes: int, error: BaseException | None) -> None:
        """Note one call of a transport: ``what`` is "read" or "write", ``moved_bytes`` the payloads that count."""
        name = f"{transport.name}_{what}"
        self.counters.add(f"{name}_operations")
        self.counters.add(f"{name}_bytes", moved_bytes)
        if error is not None:
            self.counters.add(f"{name}_errors")

    def close(self) -> None:
        """Give everything back. Running operations end with errors."""
        self.background.close(_BACKGROUND_S)
        self.upkeep.close(_BACKGROUND_S)
        self.manager.close()
        self.transports.close()
        self.pool.shutdown(wait=False, cancel_futures=True)


class Held:
    """A lease or ticket while its parts move. ``scope`` ends with it."""

    def __init__(self, channel: Channel, number: int, scope: Scope) -> None:
        self.channel = channel
        self.number = number
        self.scope = scope
        self.parts = 0  # how many it was split into; the end of the last one ends it
        self.open_parts = 0
        self.lock = threading.Lock()

    def part_ended(self) -> bool:
        """Whether this was the last part."""
        with self.lock:
            self.open_parts -= 1
            return self.open_parts == 0


class Part(Generic[Holder]):
    """What one thread moves: picks of one grant on one cache node, and whose places in the batch they fill."""

    __slots__ = ("grant", "held", "node", "picks", "places", "size_bytes", "transport")

    def __init__(
        self, held: Holder, node: NodeInfo, transport: Transport, grant: HeldGrant, picks: list[Pick], places: list[int]
    ) -> None:
        self.held = held
        self.node = node
        self.transport = transport
        self.grant = grant
        self.picks = picks
        self.places = places
        self.size_bytes = sum(pick.extent.length_bytes for pick in picks)


class Group(NamedTuple):
    """Keys that are asked for together: places in the batch, all of one channel."""

    channel: Channel
    places: list[int]


class Job(ABC, Generic[Holder]):
    """One batch. Groups are asked for while the parts of earlier ones move, within ``inflight_bytes``.

    When :meth:`run` has returned or raised, no thread touches the caller's buffers any more: parts that have not
    begun are withdrawn, and those that have are waited for. They look at the scope between pieces, so that takes no
    longer than :class:`Transport` promises.
    """

    def __init__(self, engine: Engine, keys: Sequence[bytes], views: Sequence[Views], scope: Scope) -> None:
        self.engine = engine
        self.keys = keys
        self.views = views
        self.scope = scope
        self.lengths = [length_of(chunk) for chunk in views]
        self.groups: deque[Group] = deque(self._make_groups())
        self._waiting: deque[Part[Holder]] = deque()  # parts that no thread has taken yet
        self._parts: set[Part[Holder]] = set()  # parts that have not been seen to end
        self._ended: queue.SimpleQueue[Part[Holder]] = queue.SimpleQueue()
        self._inflight_bytes = 0
        self._processor = -1  # where the operation's own thread was last seen: others better run elsewhere

    def run(self) -> None:
        """Drive the batch to its end, or to the scope's."""
        try:
            while True:
                self.scope.check()
                if self.groups and self._inflight_bytes < self.engine.config.inflight_bytes:
                    self._start(self.ask(self.groups.popleft()))
                elif (again := self.ask_again()) is not None:
                    self._start(again)
                elif not self._run_next() and self._parts:
                    self._reap(wait=True)
                self._processor = current_processor()
                self._reap(wait=False)
                if not self._parts and not self.more_to_ask():
                    return
        finally:
            self._settle()

    @abstractmethod
    def ask(self, group: Group) -> list[Part[Holder]]:
        """Ask the manager for a group; what can move now."""

    def ask_again(self) -> list[Part[Holder]] | None:
        """Ask for what was not ready; None when nothing is left of that kind."""
        return None

    @abstractmethod
    def more_to_ask(self) -> bool:
        """Whether the manager is to be asked for more."""

    @abstractmethod
    def move(self, part: Part[Holder]) -> None:
        """Move a part, on any thread, and note its outcomes. Must not raise."""

    @abstractmethod
    def withdraw(self, part: Part[Holder], error: errors.PolarKVError) -> None:
        """Note that a part will not move."""

    @abstractmethod
    def part_ended(self, part: Part[Holder]) -> None:
        """A part has moved or was withdrawn; end the lease or ticket after its last one."""

    def parts_of(self, held: Holder, signed_grants: list[bytes], group: list[int]) -> list[Part[Holder]]:
        """Split grants into parts. A node that cannot be reached costs its own chunks only: they are withdrawn."""
        parts: list[Part[Holder]] = []
        failed: list[tuple[Part[Holder], errors.PolarKVError]] = []
        for signed in signed_grants:
            grant = HeldGrant(signed, grants.read(signed))
            picks, places = self._picks(grant, group)
            if not picks:
                continue
            node = NodeInfo(f"#{grant.body.node}", grant.body.node, grant.body.incarnation, "")
            try:
                node = self.engine.manager.node(grant.body.node, grant.body.incarnation, held.scope.deadline)
                transport = self.engine.transports.choose(node, grant, held.scope)
            except errors.PolarKVError as error:
                # A transport is only needed to move; a withdrawn part never does.
                failed.append((Part(held, node, None, grant, picks, places), error))  # type: ignore[arg-type]
                continue
            share = max(1, transport.parallelism // len(signed_grants))
            parts += _split(held, node, transport, grant, picks, places, share * transport.parts_a_thread)
        held.parts = held.open_parts = len(parts) + len(failed)
        for lost, why in failed:
            self.withdraw(lost, why)
            self.part_ended(lost)
        return parts

    def pick_fits(self, place: int, length_bytes: int) -> bool:
        """Whether an extent of this length is to be moved for this place; notes it when not."""
        return length_bytes == self.lengths[place]

    def _picks(self, grant: HeldGrant, group: list[int]) -> tuple[list[Pick], list[int]]:
        picks: list[Pick] = []
        places: list[int] = []
        for number, extent in enumerate(grant.body.extents):
            if not 0 <= extent.index < len(group) or self.keys[group[extent.index]] != extent.key:
                raise errors.ProtocolError("the grant is for a key that was not asked for")
            place = group[extent.index]
            if self.pick_fits(place, extent.length_bytes):
                picks.append(Pick(number, extent, self.views[place]))
                places.append(place)
        return picks, places

    def _make_groups(self) -> list[Group]:
        """Groups of few enough keys and bytes that several are in flight at once."""
        most_bytes = max(self.engine.config.inflight_bytes // 4, 1)
        groups: list[Group] = []
        for channel, places in self.engine.manager.route(self.keys):
            group: list[int] = []
            size_bytes = 0
            for place in places:
                full = len(group) >= self.engine.config.batch_keys or size_bytes + self.lengths[place] > most_bytes
                if group and full:
                    groups.append(Group(channel, group))
                    group, size_bytes = [], 0
                group.append(place)
                size_bytes += self.lengths[place]
            if group:
                groups.append(Group(channel, group))
        return groups

    def _start(self, parts: list[Part[Holder]]) -> None:
        """Have parts moved: by this thread when it has nothing to ask, and by as many others as are worth it."""
        if not parts:
            return
        self._parts.update(parts)
        self._inflight_bytes += sum(part.size_bytes for part in parts)
        self._waiting.extend(parts)
        worth = sum({id(part.transport): part.transport.parallelism for part in parts}.values())
        for _ in range(min(worth, len(parts)) - (not self.more_to_ask())):
            try:
                self.engine.pool.submit(self._run_waiting)
            except RuntimeError:  # the client is being closed: this thread moves what it can
                return

    def _run_waiting(self) -> None:
        step_aside(self._processor)
        while self._run_next():
            step_aside(self._processor)

    def _run_next(self) -> bool:
        """Move one waiting part, if there is one. Whoever is free takes the next: no thread waits for a slow one."""
        try:
            part = self._waiting.popleft()
        except IndexError:
            return False
        try:
            self._move(part)
        finally:
            self._ended.put(part)
        return True

    def _move(self, part: Part[Holder]) -> None:
        try:
            self.move(part)
        except Exception as error:  # a defect here costs chunks, never the caller's thread
            log.exception("moving %d chunks failed", len(part.picks))
            self.withdraw(part, errors.PolarKVError(f"internal error: {error!r}"))
        self.part_ended(part)

    def _reap(self, *, wait: bool) -> None:
        """Take note of parts that have ended; with ``wait``, of at least one."""
        while self._parts:
            try:
                part = self._ended.get(timeout=self.scope.remaining()) if wait else self._ended.get_nowait()
            except queue.Empty:
                return
            wait = False
            self._parts.discard(part)
            self._inflight_bytes -= part.size_bytes

    def _settle(self) -> None:
        """No part is left when this returns."""
        if not self._parts:
            return
        self.scope.cancel()
        while self._waiting:
            try:
                part = self._waiting.popleft()
            except IndexError:  # another thread was faster
                break
            self._parts.discard(part)
            self.withdraw(part, errors.DeadlineExceeded("the operation ended before its turn"))
            self.part_ended(part)
        while self._parts:
            self._parts.discard(self._ended.get())


def _split(
    held: Holder,
    node: NodeInfo,
    transport: Transport,
    grant: HeldGrant,
    picks: list[Pick],
    places: list[int],
    share: int,
) -> list[Part[Holder]]:
    """At most ``share`` parts of about equal bytes, none of them small."""
    total = sum(pick.extent.length_bytes for pick in picks)
    count = max(1, min(share, len(picks), total // _PART_BYTES))
    parts: list[Part[Holder]] = []
    start = done = 0
    for number, pick in enumerate(picks, 1):
        done += pick.extent.length_bytes
        if number == len(picks) or done * count >= total * (len(parts) + 1):
            parts.append(Part(held, node, transport, grant, picks[start:number], places[start:number]))
            start = number
    return parts
