"""A load: leases, reads on all cache nodes at once, chunks that are still coming from disk as they come."""

from __future__ import annotations

from collections.abc import Sequence

from polarkv_client import errors
from polarkv_client.buffers import Views
from polarkv_client.channel import Channel
from polarkv_client.engine import Engine, Group, Held, Job, Part
from polarkv_client.keys import join_keys
from polarkv_client.states import ReadOutcome, Tier
from polarkv_client.transport.base import Scope

LoadOutcome = Tier | errors.PolarKVError | int | None
LENGTH_DIFFERS = -1
_WAIT_MS = 1000  # a disk load takes less; more would only make a lost answer last longer
_MARGIN_MS = 20  # the answer must be back before the operation's deadline


class Lease(Held):
    """Leases of one answer of the manager."""

    def __init__(self, channel: Channel, number: int, scope: Scope) -> None:
        super().__init__(channel, number, scope)
        self.clean = True
        self.damaged: list[bytes] = []


class Load(Job[Lease]):
    """``outcomes`` has for each key: its Tier (NONE: a miss), an error, LENGTH_DIFFERS, or None (not reached).

    Args:
        prefix: stop at the first chunk that cannot be had; what lies behind it is of no use.
    """

    def __init__(
        self, engine: Engine, keys: Sequence[bytes], views: Sequence[Views], scope: Scope, *, prefix: bool
    ) -> None:
        super().__init__(engine, keys, views, scope)
        self.outcomes: list[LoadOutcome] = [None] * len(keys)
        self._tiers: list[Tier] = [Tier.NONE] * len(keys)
        self._loading: dict[Channel, list[int]] = {}
        self._prefix = prefix
        self._end = len(keys)  # places from here on are of no use any more

    def more_to_ask(self) -> bool:
        return bool(self.groups or self._loading)

    def ask(self, group: Group) -> list[Part[Lease]]:
        return self._acquire(group.channel, [place for place in group.places if place < self._end], 0)

    def ask_again(self) -> list[Part[Lease]] | None:
        if not self._loading:
            return None
        channel, places = next(iter(self._loading.items()))
        del self._loading[channel]
        most = self.engine.config.batch_keys
        if places[most:]:
            self._loading[channel] = places[most:]
        wait_ms = min(_WAIT_MS, int(self.scope.remaining() * 1000) - _MARGIN_MS)
        return self._acquire(channel, [place for place in places[:most] if place < self._end], max(wait_ms, 1))

    def _acquire(self, channel: Channel, places: list[int], wait_ms: int) -> list[Part[Lease]]:
        if not places:
            return []
        joined = join_keys([self.keys[place] for place in places])
        ended = self.engine.background.take_ended(channel)
        try:
            answer, lease_ends = self.engine.manager.acquire_read(channel, joined, wait_ms, ended, self.scope)
        except errors.PolarKVError as error:
            # It may not have been sent at all. A lease that is ended twice is no harm.
            self.engine.background.ended(channel, *ended)
            # The same manager would be asked for the rest: one failure is enough for this operation.
            for place in places:
                self._missed(place, error)
            self.groups.clear()
            self._loading.clear()
            return []
        still: list[int] = []
        granted = 0
        for place, outcome, tier in zip(places, answer.outcomes, answer.tiers, strict=True):
            if outcome == ReadOutcome.GRANTED:
                granted += 1
                self._tiers[place] = Tier(tier) if tier in {1, 2} else Tier.MEMORY
            elif outcome == ReadOutcome.LOADING:
                still.append(place)
            else:
                self._missed(place, Tier.NONE)
        if still:
            self._loading.setdefault(channel, []).extend(still)
        if not granted:
            return []
        lease = Lease(channel, answer.lease, self.scope.until(lease_ends))
        try:
            parts = self.parts_of(lease, answer.grants, places)
        except errors.ProtocolError as error:
            for place in places:
                if self.outcomes[place] is None and place not in still:
                    self._missed(place, error)
            parts = []
        if not lease.parts:
            self._end_lease(lease)
        return parts

    def pick_fits(self, place: int, length_bytes: int) -> bool:
        if place >= self._end:
            return False
        if length_bytes != self.lengths[place]:
            self._missed(place, LENGTH_DIFFERS)
            return False
        return True

    def move(self, part: Part[Lease]) -> None:
        lease = part.held
        try:
            results = part.transport.read(part.grant, part.picks, lease.scope)
        except errors.PolarKVError as error:
            results = [error] * len(part.picks)
        try:
            lease.scope.check()  # the wall: what was read after the lease's end may be another chunk's by now
        except errors.PolarKVError as ended:
            results = [result or ended for result in results]
        worst: errors.PolarKVError | None = None
        moved_bytes = 0
        for place, pick, result in zip(part.places, part.picks, results, strict=True):
            if result is None:
                self.outcomes[place] = self._tiers[place]
                moved_bytes += pick.extent.length_bytes
                continue
            self._missed(place, result)
            if isinstance(result, errors.Damaged):
                lease.damaged.append(pick.extent.key)
            else:
                worst = result
                lease.clean = lease.clean and part.transport.ended_cleanly(result)
        self.engine.transports.done(part.node, worst)
        failure = worst or next((result for result in results if result is not None), None)
        self.engine.count_transfer(part.transport, "read", moved_bytes, failure)

    def withdraw(self, part: Part[Lease], error: errors.PolarKVError) -> None:
        for place in part.places:
            self._missed(place, error)

    def part_ended(self, part: Part[Lease]) -> None:
        if part.held.part_ended():
            self._end_lease(part.held)

    def _end_lease(self, lease: Lease) -> None:
        manager = self.engine.manager
        if lease.damaged:
            damaged = join_keys(lease.damaged)
            self.engine.background.put(
                lambda deadline: manager.report_damaged(lease.channel, lease.number, damaged, lease.clean, deadline)
            )
        elif lease.clean:
            self.engine.background.ended(lease.channel, lease.number)
        else:
            self.engine.background.put(
                lambda deadline: manager.release_read(lease.channel, lease.number, False, deadline)
            )

    def _missed(self, place: int, outcome: LoadOutcome) -> None:
        self.outcomes[place] = outcome
        if self._prefix and place < self._end:
            self._end = place
