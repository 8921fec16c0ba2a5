"""One simulation: a trace on a cluster. Requests look up, load, wait for an engine, compute the rest, store it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from polarkv_client.calibration import Rates
from polarkv_client.cli.trace import BLOCK_TOKENS, Request
from polarkv_client.errors import ConfigurationError
from polarkv_client.gate import LoadGate
from polarkv_client.states import Tier
from polarkv_dataplane.planner.sim.clock import Clock
from polarkv_dataplane.planner.sim.cluster import TICK_S, Cluster
from polarkv_dataplane.planner.sim.scenario import Organisation, Scenario
from polarkv_dataplane.planner.sim.transfers import Link, Load, Store

MOST_SECONDS = 14 * 86_400  # of virtual time


@dataclass
class Result:
    """What a run showed. Blocks are counted once for each request that named them; seconds are virtual."""

    organisation: str
    requests: int = 0
    references: int = 0
    memory_hits: int = 0
    disk_hits: int = 0
    skipped: int = 0  # loads that the gate left out
    cut_short: int = 0  # loads that ended with less than was there: too late, or gone meanwhile
    stored: int = 0
    ttft_s: list[float] = field(default_factory=list)
    load_s: float = 0.0  # of all loads together
    computed_s: float = 0.0  # of all engines together
    uncached_s: float = 0.0  # the same without any cache
    gpus: int = 0
    seconds: float = 0.0
    serving_bytes: float = 0.0
    tiering_bytes: float = 0.0
    disk_bytes: float = 0.0
    cost_month: float = 0.0
    currency: str = ""
    core: dict[str, int] = field(default_factory=dict)
    assumptions: dict[str, Any] = field(default_factory=dict)
    wall_s: float = 0.0

    @property
    def hits(self) -> int:
        """Blocks loaded."""
        return self.memory_hits + self.disk_hits

    def percent(self, blocks: int) -> float:
        """Of all references."""
        return 100 * blocks / self.references if self.references else 0.0

    def ttft_at(self, percent: float) -> float:
        """The TTFT that ``percent`` of the requests do not exceed; 0 without requests."""
        if not self.ttft_s:
            return 0.0
        ordered = sorted(self.ttft_s)
        return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]

    @property
    def ttft_mean(self) -> float:
        """Mean TTFT."""
        return sum(self.ttft_s) / len(self.ttft_s) if self.ttft_s else 0.0

    @property
    def gpu_seconds_saved(self) -> float:
        """GPU time that the cache made unnecessary."""
        return (self.uncached_s - self.computed_s) * self.gpus

    def as_json(self) -> dict[str, Any]:
        """Every figure and what follows from it, without the single TTFTs."""
        found = asdict(self)
        del found["ttft_s"]
        return {
            **found,
            "hit_percent": round(self.percent(self.hits), 3),
            "memory_hit_percent": round(self.percent(self.memory_hits), 3),
            "disk_hit_percent": round(self.percent(self.disk_hits), 3),
            "ttft_mean_s": round(self.ttft_mean, 4),
            **{f"ttft_p{percent}_s": round(self.ttft_at(percent), 4) for percent in (50, 90, 99)},
            "gpu_seconds_saved": round(self.gpu_seconds_saved, 1),
        }


class _Engine:
    """One engine: prompts whose load has ended wait here for their turn."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.owed_tokens = 0
        self.ready: deque[_Prompt] = deque()
        self.busy = False


@dataclass
class _Prompt:
    request: Request
    engine: _Engine
    keys: list[bytes]
    came: float
    found: int = 0


class _Run:
    def __init__(self, trace: Sequence[Request], scenario: Scenario, on_request: Callable[[int], None]) -> None:
        self.trace, self.scenario, self.on_request = trace, scenario, on_request
        self.clock = Clock()
        self.cluster = Cluster(scenario, self.clock)
        self.engines = [_Engine(Link(scenario.engines.network_bytes_per_s)) for _ in range(scenario.engines.count)]
        computed = scenario.engines.prefill_s(BLOCK_TOKENS, 0)
        self.gate = LoadGate(Rates(BLOCK_TOKENS / computed)) if scenario.gate and computed else None
        self.on_disk = scenario.organisation is Organisation.DISK
        self.result = self._fresh()
        self.open = 0
        self.next = 0

    def _fresh(self) -> Result:
        hardware, engines = self.scenario.hardware, self.scenario.engines
        return Result(
            str(self.scenario.organisation), gpus=engines.gpus, cost_month=hardware.cost_month,
            currency=hardware.currency, assumptions=self.scenario.assumptions(),
        )  # fmt: skip

    def run(self) -> Result:
        began = time.perf_counter()
        for _ in range(self.scenario.passes):
            self.result = self._fresh()
            moved = self._moved()
            starts = self.clock.now
            self._offer()
            while self.open:
                if not self.clock.step():
                    raise AssertionError(f"{self.open} requests never ended")
            result = self.result
            result.seconds = self.clock.now - starts
            result.serving_bytes, result.tiering_bytes, result.disk_bytes = (
                after - before for before, after in zip(moved, self._moved(), strict=True)
            )
        self.result.core = dict(sorted(self.cluster.directory.ledger.stats.counts.items()))
        self.result.wall_s = round(time.perf_counter() - began, 3)
        return self.result

    def _moved(self) -> tuple[float, float, float]:
        cluster = self.cluster
        both = cluster.send.moved_bytes + cluster.receive.moved_bytes
        # A byte that tiering moves is sent by one machine and received by another; clients' ends are not counted.
        return both - 2 * cluster.tiering_bytes, cluster.tiering_bytes, cluster.disks.moved_bytes

    def _offer(self) -> None:
        """Have every request of one pass come."""
        scenario, starts = self.scenario, self.clock.now
        self.open, self.next = len(self.trace), 0
        if self.open:
            self.clock.at(starts + TICK_S, self._tick)
        if scenario.concurrency:
            for _ in range(min(scenario.concurrency, len(self.trace))):
                self._come_next()
            return
        for request, after in zip(self.trace, arrivals(self.trace, scenario.spread_s), strict=True):
            self.clock.at(starts + after / scenario.speed, partial(self._come, request))

    def _tick(self) -> None:
        self.cluster.tick()
        if self.open:
            self.clock.at(self.clock.now + TICK_S, self._tick)

    def _come_next(self) -> None:
        if self.next < len(self.trace):
            self.next += 1
            self._come(self.trace[self.next - 1])

    def _come(self, request: Request) -> None:
        engine = min(self.engines, key=lambda each: each.owed_tokens)
        engine.owed_tokens += request.input_length
        prompt = _Prompt(request, engine, [self.cluster.key(block) for block in request.hash_ids], self.clock.now)
        self.result.references += len(prompt.keys)
        self.clock.at(self.clock.now + self.scenario.call_s, partial(self._look_up, prompt))

    def _look_up(self, prompt: _Prompt) -> None:
        tiers = self.cluster.directory.match_prefix(prompt.keys)
        size, matched = self.cluster.size_bytes, len(tiers)
        if matched and self.gate is not None:
            found = [Tier.DISK if self.on_disk else Tier(tier) for tier in tiers]
            if not self.gate.admit([size] * matched, BLOCK_TOKENS, lambda: found):
                self.result.skipped += 1
                matched = 0
        if matched:
            Load(self.cluster, prompt.engine.link, prompt.keys[:matched], partial(self._loaded, prompt))
        else:
            self._ready(prompt)

    def _loaded(self, prompt: _Prompt, load: Load) -> None:
        result, size = self.result, self.cluster.size_bytes
        took = self.clock.now - load.began
        result.memory_hits += load.from_memory
        result.disk_hits += load.from_disk
        result.load_s += took
        result.cut_short += load.found < len(load.keys)
        if self.gate is not None:
            tiers = [Tier.MEMORY] * load.from_memory + [Tier.DISK] * load.from_disk
            self.gate.loaded(tiers, [size] * len(tiers), took)
        prompt.found = load.found
        self._ready(prompt)

    def _ready(self, prompt: _Prompt) -> None:
        prompt.engine.ready.append(prompt)
        self._serve(prompt.engine)

    def _serve(self, engine: _Engine) -> None:
        if engine.busy or not engine.ready:
            return
        engine.busy = True
        prompt = engine.ready.popleft()
        engines, tokens = self.scenario.engines, prompt.request.input_length
        cached = self._cached_tokens(prompt, prompt.found)
        seconds = engines.prefill_s(tokens - cached, cached)
        self.result.computed_s += seconds
        self.result.uncached_s += engines.prefill_s(tokens, 0)
        self.clock.at(self.clock.now + seconds, partial(self._first_token, prompt))

    def _first_token(self, prompt: _Prompt) -> None:
        engine = prompt.engine
        engine.busy = False
        engine.owed_tokens -= prompt.request.input_length
        self.result.ttft_s.append(self.clock.now - prompt.came)
        self._serve(engine)
        Store(self.cluster, engine.link, prompt.keys[prompt.found :], self._stored)

    def _stored(self, blocks: int) -> None:
        self.result.stored += blocks
        self.result.requests += 1
        self.open -= 1
        self.on_request(self.result.requests)
        if self.scenario.concurrency:
            self._come_next()

    @staticmethod
    def _cached_tokens(prompt: _Prompt, blocks: int) -> int:
        """The last token is always computed: it brings the first one out."""
        return min(blocks * BLOCK_TOKENS, max(0, prompt.request.input_length - 1))


def arrivals(trace: Sequence[Request], spread_s: float) -> list[float]:
    """Seconds after the first request at which each comes; those of one time stamp evenly over ``spread_s``.

    Raises:
        ConfigurationError: time stamps go back.
    """
    found: list[float] = []
    first = trace[0].timestamp_ms if trace else 0
    start = 0
    for place, request in enumerate(trace):
        if place and request.timestamp_ms < trace[place - 1].timestamp_ms:
            raise ConfigurationError(f"request {place + 1}", request.timestamp_ms, "time stamps must not go back")
        if place + 1 == len(trace) or trace[place + 1].timestamp_ms != request.timestamp_ms:
            count = place + 1 - start
            at = (request.timestamp_ms - first) / 1000
            found += [at + spread_s * number / count for number in range(count)]
            start = place + 1
    return found


def simulate(
    trace: Sequence[Request], scenario: Scenario, on_request: Callable[[int], None] = lambda _: None
) -> Result:
    """Run ``scenario`` over ``trace``; ``on_request`` is told how many have ended.

    Raises:
        ConfigurationError: the scenario or the trace makes no sense.
    """
    _check_span(trace, scenario)
    return _Run(trace, scenario, on_request).run()


def _check_span(trace: Sequence[Request], scenario: Scenario) -> None:
    """A run takes time for each virtual second, so wrong units would have it take for ever."""
    span_s = (trace[-1].timestamp_ms - trace[0].timestamp_ms) / 1000 / scenario.speed if trace else 0
    work_s = sum(scenario.engines.prefill_s(request.input_length, 0) for request in trace) / scenario.engines.count
    for what, seconds, fix in (
        ("the trace", 0 if scenario.concurrency else span_s, "are its time stamps in ms, and --speeds not too small?"),
        ("computing it without a cache", work_s, "are its lengths tokens, and are there engines enough for it?"),
    ):
        if seconds > MOST_SECONDS:
            raise ConfigurationError(
                what, f"{seconds / 86_400:,.1f} days", f"at most {MOST_SECONDS / 86_400:.0f} can be simulated: {fix}"
            )
