"""Loads and stores as clients make them: in groups, so much in flight at a time, until a deadline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import inf

from polarkv_client.states import ReadOutcome, StoreOutcome
from polarkv_dataplane.planner.sim.cluster import Cluster
from polarkv_dataplane.planner.sim.pipes import Pipes

_GROUPS_IN_FLIGHT = 4  # as in polarkv_client.engine


class Link:
    """An engine's own network: every byte of its loads and stores passes it."""

    def __init__(self, bytes_per_s: float) -> None:
        self._receive = Pipes(1, bytes_per_s)
        self._send = Pipes(1, bytes_per_s)

    def receive(self, now: float, size_bytes: float) -> float:
        """When so much has come in."""
        return self._receive.take(now, (0,), size_bytes)

    def send(self, now: float, size_bytes: float) -> float:
        """When so much has gone out."""
        return self._send.take(now, (0,), size_bytes)


class Transfer:
    """What both have in common."""

    def __init__(self, cluster: Cluster, link: Link, keys: Sequence[bytes]) -> None:
        self.cluster, self.clock, self.link, self.keys = cluster, cluster.clock, link, keys
        scenario = cluster.scenario
        self.began = self.clock.now
        self.deadline = self.began + scenario.load_deadline_s
        self.window = scenario.window_blocks
        self.group = max(1, self.window // _GROUPS_IN_FLIGHT)
        self.end = len(keys)
        self.next = 0
        self.moving = 0
        self.asking = 0

    def ask_more(self) -> None:
        """Ask the manager for the next groups, as far as they may be in flight."""
        while self.next < self.end and self.moving + self.asking < self.window:
            places = list(range(self.next, min(self.next + self.group, self.end)))
            self.next = places[-1] + 1
            self.asking += len(places)
            self.clock.at(self.clock.now + self.cluster.scenario.call_s, partial(self._asked, places))

    def _asked(self, places: list[int]) -> None:
        self.asking -= len(places)
        self.answered(places)
        self.ask_more()

    def answered(self, places: list[int]) -> None:
        """The manager's answer for these places."""
        raise NotImplementedError


class Load(Transfer):
    """A prefix. ``done`` is called once; ``from_disk`` and ``from_memory`` then say what came, in blocks."""

    def __init__(self, cluster: Cluster, link: Link, keys: Sequence[bytes], done: Callable[[Load], None]) -> None:
        super().__init__(cluster, link, keys)
        self._done: Callable[[Load], None] | None = done
        self._arrived = bytearray(len(keys))
        self._left = len(keys)
        self._loading: set[int] = set()
        self.from_memory = self.from_disk = 0
        self.clock.at(self.deadline, self._finish)
        self.ask_more()
        self._look()

    @property
    def found(self) -> int:
        """Blocks of the prefix that came."""
        return self.from_memory + self.from_disk

    def answered(self, places: list[int]) -> None:
        directory = self.cluster.directory
        places = [place for place in places if place < self.end]
        if self._done is None or not places:
            return
        granted = directory.acquire_read([self.keys[place] for place in places], self.clock.now_ms)
        self.cluster.settle()
        moving: list[int] = []
        ends = self.clock.now
        for place, entry, outcome in zip(places, granted.entries, granted.outcomes, strict=True):
            if entry is not None:
                there = self.cluster.read(entry, self.deadline)
                if there == inf:
                    self._missed(place)
                    continue
                moving.append(place)
                ends = max(ends, there, self.link.receive(self.clock.now, self.cluster.size_bytes))
            elif outcome == ReadOutcome.LOADING:
                self._loading.add(place)
                self.cluster.wait(self.keys[place], partial(self.answered, [place]))
            else:
                self._missed(place)
        self.moving += len(moving)
        if granted.number:
            self.clock.at(ends, partial(self._came, granted.number, moving))
        self._look()

    def _came(self, lease: int, places: list[int]) -> None:
        self.cluster.directory.release_read(lease, True, self.clock.now_ms)
        self.cluster.settle()
        self.moving -= len(places)
        for place in places:
            self._arrived[place] = 1
        self._look()
        self.ask_more()

    def _missed(self, place: int) -> None:
        self.end = min(self.end, place)

    def _look(self) -> None:
        if self._done is not None and all(self._arrived[: self.end]):
            self._finish()

    def _finish(self) -> None:
        """All has come that is of use, or time is up."""
        if self._done is None:
            return
        done, self._done = self._done, None
        self.end = min(self.end, self._arrived.find(0) if 0 in self._arrived else self.end)
        disk = self.cluster.organisation == "disk"
        self.from_disk = self.end if disk else sum(place < self.end for place in self._loading)
        self.from_memory = self.end - self.from_disk
        done(self)


class Store(Transfer):
    """Blocks that were computed. ``done`` is called once, with how many were stored."""

    def __init__(self, cluster: Cluster, link: Link, keys: Sequence[bytes], done: Callable[[int], None]) -> None:
        super().__init__(cluster, link, keys)
        self._done: Callable[[int], None] | None = done
        self._stored = 0
        self.ask_more()
        self._look()

    def answered(self, places: list[int]) -> None:
        directory, now_ms = self.cluster.directory, self.clock.now_ms
        keys = [self.keys[place] for place in places]
        granted = directory.begin_store(keys, [self.cluster.size_bytes] * len(keys), self.cluster.tenant, now_ms)
        written: list[bytes] = []
        late: list[bytes] = []
        ends = self.clock.now
        for entry, outcome in zip(granted.entries, granted.outcomes, strict=True):
            if outcome != StoreOutcome.GRANTED or entry is None:
                continue
            there = self.cluster.write(entry, self.deadline)
            if there == inf:
                late.append(entry.key)
                continue
            written.append(entry.key)
            ends = max(ends, there, self.link.send(self.clock.now, self.cluster.size_bytes))
        if late:
            directory.abort_store(granted.number, late, now_ms)
        self.cluster.settle()
        self.moving += len(written)
        if written:
            self.clock.at(ends, partial(self._went, granted.number, written))
        self._look()

    def _went(self, ticket: int, keys: list[bytes]) -> None:
        self.moving -= len(keys)
        outcomes = self.cluster.directory.commit_store(ticket, keys, [0] * len(keys), self.clock.now_ms)
        self._stored += outcomes.count(0)
        self.cluster.settle()
        self._look()
        self.ask_more()

    def _look(self) -> None:
        if self._done is not None and not self.moving and not self.asking and self.next >= self.end:
            done, self._done = self._done, None
            done(self._stored)
