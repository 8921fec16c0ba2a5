"""A store: slots, writes to all cache nodes at once, then the commit that makes them visible."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

from polarkv_client import errors
from polarkv_client.buffers import Views
from polarkv_client.channel import Channel
from polarkv_client.engine import Engine, Group, Held, Job, Part
from polarkv_client.keys import join_keys
from polarkv_client.states import CommitOutcome, StoreOutcome
from polarkv_client.transport.base import Scope

_MARGIN_MS = 20
PutOutcome = StoreOutcome | errors.PolarKVError | None


class Ticket(Held):
    """The slots of one answer of the manager."""

    def __init__(self, channel: Channel, number: int, scope: Scope) -> None:
        super().__init__(channel, number, scope)
        self.written: list[tuple[int, int]] = []  # place, checksum
        self.failed: list[int] = []


class Store(Job[Ticket]):
    """``outcomes`` has for each key: GRANTED (stored), another StoreOutcome, an error, or None (not reached)."""

    def __init__(self, engine: Engine, keys: Sequence[bytes], views: Sequence[Views], scope: Scope) -> None:
        super().__init__(engine, keys, views, scope)
        self.outcomes: list[PutOutcome] = [None] * len(keys)
        self._short: deque[Group] = deque()  # had no room when others of their group had
        self._wait_ends = time.monotonic() + engine.config.wait_for_space_ms / 1000

    def more_to_ask(self) -> bool:
        return bool(self.groups or self._short)

    def ask_again(self) -> list[Part[Ticket]] | None:
        return self.ask(self._short.popleft()) if self._short else None

    def ask(self, group: Group) -> list[Part[Ticket]]:
        places = group.places
        lengths = [self.lengths[place] for place in places]
        if lengths.count(lengths[0]) == len(lengths):
            del lengths[1:]
        wait_ms = self._wait_ms()
        joined = join_keys([self.keys[place] for place in places])
        try:
            answer, ticket_ends = self.engine.manager.begin_store(group.channel, joined, lengths, wait_ms, self.scope)
        except errors.PolarKVError as error:
            for place in places:
                self.outcomes[place] = error
            self.groups.clear()
            self._short.clear()
            return []
        granted: list[int] = []
        short: list[int] = []
        for place, outcome in zip(places, answer.outcomes, strict=True):
            if outcome == StoreOutcome.GRANTED:
                granted.append(place)
                continue
            self.outcomes[place] = _outcome(outcome)
            if outcome == StoreOutcome.NO_SPACE:
                short.append(place)
        if not granted:
            return []  # the manager has waited as long as it may
        if short and self._wait_ms():
            self._short.append(Group(group.channel, short))
        ticket = Ticket(group.channel, answer.ticket, self.scope.until(ticket_ends))
        try:
            return self.parts_of(ticket, answer.grants, places)
        except errors.ProtocolError as error:
            for place in granted:
                self.outcomes[place] = error
            self._abort(ticket, granted)
            return []

    def _wait_ms(self) -> int:
        """How long the manager may still wait for space."""
        left_s = min(self._wait_ends, self.scope.deadline - _MARGIN_MS / 1000) - time.monotonic()
        return max(int(left_s * 1000), 0)

    def move(self, part: Part[Ticket]) -> None:
        try:
            checksums = part.transport.write(part.grant, part.picks, part.held.scope)
        except errors.PolarKVError as error:
            self.engine.transports.done(part.node, error)
            self.engine.count_transfer(part.transport, "write", 0, error)
            self.withdraw(part, error)
            return
        self.engine.transports.done(part.node, None)
        self.engine.count_transfer(part.transport, "write", part.size_bytes, None)
        part.held.written += zip(part.places, checksums, strict=True)

    def withdraw(self, part: Part[Ticket], error: errors.PolarKVError) -> None:
        for place in part.places:
            self.outcomes[place] = error
        part.held.failed += part.places

    def part_ended(self, part: Part[Ticket]) -> None:
        ticket = part.held
        if not ticket.part_ended():
            return
        if ticket.written:
            self._commit(ticket)
        if ticket.failed:
            self._abort(ticket, ticket.failed)

    def _commit(self, ticket: Ticket) -> None:
        places = [place for place, _ in ticket.written]
        joined = join_keys([self.keys[place] for place in places])
        checksums = [checksum for _, checksum in ticket.written]
        try:
            ticket.scope.check()
            results = self.engine.manager.commit_store(
                ticket.channel, ticket.number, joined, checksums, ticket.scope.deadline
            )
        except errors.PolarKVError as error:
            for place in places:
                self.outcomes[place] = error
            if isinstance(error, (errors.DeadlineExceeded, errors.BreakerOpen)):
                ticket.failed += places
            return
        for place, result in zip(places, results, strict=True):
            committed = result == CommitOutcome.COMMITTED
            self.outcomes[place] = (
                StoreOutcome.GRANTED if committed else errors.LeaseEnded("the ticket had ended before the commit")
            )

    def _abort(self, ticket: Ticket, places: list[int]) -> None:
        """In the background: the slots come back by themselves at the ticket's deadline, this is only sooner."""
        joined = join_keys([self.keys[place] for place in places])
        self.engine.background.put(
            lambda deadline: self.engine.manager.abort_store(ticket.channel, ticket.number, joined, deadline)
        )


def _outcome(value: int) -> PutOutcome:
    try:
        return StoreOutcome(value)
    except ValueError:
        return errors.ProtocolError(f"the manager answered {value}, which is no outcome of a store")
