"""Calls that wait: stores for space, reads for loads. Each ends by its own time, and when its connection does."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from polarkv_client.protocol.messages import Op, ReadGrants, StoreGrants
from polarkv_client.protocol.wire import encode_frame
from polarkv_client.states import EntryState, ReadOutcome, StoreOutcome
from polarkv_dataplane.manager.core.directory import Granted

if TYPE_CHECKING:
    from polarkv_dataplane.manager.shell.clients import Session
    from polarkv_dataplane.manager.shell.manager import Manager

POLL_S = 0.02
STORE_GAP_S = 0.005  # space comes in bursts of completions: one look for all of them
_ASKED_AGAIN = 64  # keys of one call whose loads have not begun, tried again at a time


def must_wait_for_space(outcomes: bytes) -> bool:
    """Nothing was granted, and something would be if there were space."""
    return StoreOutcome.NO_SPACE in outcomes and StoreOutcome.GRANTED not in outcomes


class Parked:
    """One waiting call."""

    __slots__ = ("keys", "lengths", "outcomes", "places", "received_ms", "request_id", "session", "unbegun", "until_ms")

    def __init__(
        self, session: Session, request_id: int, keys: Sequence[bytes], received_ms: int, until_ms: int
    ) -> None:
        self.session = session
        self.request_id = request_id
        self.keys = keys
        self.received_ms = received_ms
        self.until_ms = until_ms
        self.lengths: Sequence[int] = ()
        self.outcomes = b""
        self.places: dict[bytes, list[int]] = {}  # of the keys that are waited for
        self.unbegun: list[bytes] = []


class Waiting:
    """All waiting calls of a manager."""

    def __init__(self, manager: Manager) -> None:
        self._manager = manager
        self._stores: dict[Parked, None] = {}
        self._reads: dict[Parked, None] = {}
        self._by_key: dict[bytes, dict[Parked, None]] = {}
        self._woken: dict[Parked, set[bytes]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._looking: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._stores) + len(self._reads)

    def for_space(
        self, session: Session, request_id: int, keys: Sequence[bytes], lengths: Sequence[int], now: int, wait_ms: int,
        answer: StoreGrants,
    ) -> StoreGrants | None:  # fmt: skip
        """Park a store, of which nothing was granted; the answer at once when too many calls wait."""
        if len(self) >= self._manager.settings.max_waiting_calls:
            self._manager.counts.add("not_parked")
            return session.count_store(answer)
        parked = self._park(session, request_id, keys, now, wait_ms)
        parked.lengths = lengths
        self._stores[parked] = None
        return None

    def for_loads(
        self, session: Session, request_id: int, keys: Sequence[bytes], outcomes: bytes, now: int, wait_ms: int
    ) -> ReadGrants | None:
        """Park a read, of which nothing was granted and something loads; the answer at once when too many wait."""
        if len(self) >= self._manager.settings.max_waiting_calls:
            self._manager.counts.add("not_parked")
            nothing = Granted(0, 0, [], outcomes)
            return session.read_answer(outcomes, nothing, (), now, now)
        parked = self._park(session, request_id, keys, now, wait_ms)
        parked.outcomes = outcomes
        entries = self._manager.ledger.entries
        for place, key in enumerate(keys):
            if outcomes[place] == ReadOutcome.LOADING:
                parked.places.setdefault(key, []).append(place)
                self._by_key.setdefault(key, {})[parked] = None
                entry = entries.get(key)
                if entry is None or entry.state is not EntryState.LOADING:
                    parked.unbegun.append(key)
        self._reads[parked] = None
        return None

    def wake(self, key: bytes) -> None:
        """A load ended. The calls are answered at the end of the loop's turn, so that one answer has all that came."""
        for parked in self._by_key.get(key, ()):
            if not self._woken:
                self._manager.loop.call_soon(self._answer_woken)
            self._woken.setdefault(parked, set()).add(key)

    def room(self) -> None:
        """There may be space now."""
        if self._stores and self._looking is None:
            self._looking = self._manager.loop.call_later(STORE_GAP_S, self._try_stores)

    def forget(self, session: Session) -> None:
        """Its connection is gone."""
        for parked in list(session.parked):
            self._unpark(parked)

    def _park(self, session: Session, request_id: int, keys: Sequence[bytes], now: int, wait_ms: int) -> Parked:
        parked = Parked(session, request_id, keys, now, now + min(wait_ms, self._manager.settings.max_wait_ms))
        session.parked.add(parked)
        if self._timer is None:
            self._timer = self._manager.loop.call_later(POLL_S, self._poll)
        return parked

    def _unpark(self, parked: Parked) -> None:
        parked.session.parked.discard(parked)
        self._stores.pop(parked, None)
        self._reads.pop(parked, None)
        self._woken.pop(parked, None)
        for key in parked.places:
            calls = self._by_key.get(key)
            if calls is not None:
                calls.pop(parked, None)
                if not calls:
                    del self._by_key[key]

    def _poll(self) -> None:
        self._timer = None
        now = self._manager.now()
        for parked in list(self._stores):
            if now >= parked.until_ms:
                self._try_store(parked, now, last=True)
        for parked in list(self._reads):
            again, parked.unbegun = parked.unbegun[:_ASKED_AGAIN], parked.unbegun[_ASKED_AGAIN:]
            if again or now >= parked.until_ms:
                self._ask_again(parked, again, now)
        self._manager.settle(now)
        if self._stores or self._reads:
            self._timer = self._manager.loop.call_later(POLL_S, self._poll)

    def _try_stores(self) -> None:
        self._looking = None
        now = self._manager.now()
        for parked in list(self._stores):
            self._try_store(parked, now, last=now >= parked.until_ms)
        self._manager.settle(now)

    def _try_store(self, parked: Parked, now: int, *, last: bool) -> None:
        answer = parked.session.try_store(parked.keys, parked.lengths, parked.received_ms, now)
        if last or not must_wait_for_space(answer.outcomes):
            self._unpark(parked)
            session = parked.session
            session.peer.send(encode_frame(Op.BEGIN_STORE, parked.request_id, session.count_store(answer)))

    def _answer_woken(self) -> None:
        now = self._manager.now()
        woken, self._woken = self._woken, {}
        for parked, keys in woken.items():
            if parked in self._reads:
                self._ask_again(parked, list(keys), now)
        self._manager.settle(now)

    def _ask_again(self, parked: Parked, keys: list[bytes], now: int) -> None:
        """Ask for some of the keys that are waited for; answer when one of them has come, or time is up."""
        granted = self._manager.directory.acquire_read(keys, now)
        changed = False
        outcomes = bytearray(parked.outcomes)
        entries = self._manager.ledger.entries
        for key, outcome in zip(keys, granted.outcomes, strict=True):
            if outcome != ReadOutcome.LOADING:
                changed = True
                for place in parked.places[key]:
                    outcomes[place] = outcome
            elif entries[key].state is not EntryState.LOADING:
                parked.unbegun.append(key)
        if not changed and now < parked.until_ms:
            return
        places = [parked.places[key][0] for key in keys]
        for key in keys:  # a key that was named twice has one lease
            for place in parked.places[key][1:]:
                outcomes[place] = ReadOutcome.LOADING if outcomes[place] == ReadOutcome.GRANTED else outcomes[place]
        self._unpark(parked)
        answer = parked.session.read_answer(bytes(outcomes), granted, places, parked.received_ms, now)
        parked.session.peer.send(encode_frame(Op.ACQUIRE_READ, parked.request_id, answer))
