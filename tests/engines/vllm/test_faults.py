"""Cache processes die during a stream of requests to a real vLLM: right tokens, no request waits, hits come back."""

from __future__ import annotations

import statistics
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from tests.engines.support.engine_process import EngineProcess
from tests.engines.support.patient import DEFAULTS
from tests.engines.support.vllm_runs import CHUNK, engine, prompt, transfer
from tests.local.support.world import World, running
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(600)
REQUESTS = 50
TOKENS = 8
EVERYTHING = ("manager", "slab-0", "disk-0", "slab-1", "disk-1")
ROOM = {"num_gpu_blocks_override": 400}  # for a group of requests


@dataclass(frozen=True)
class Stream:
    """Fifty requests, some of them under way together."""

    name: str
    prompts: tuple[list[int], ...]
    at_once: int
    fault_at: int  # a group of requests, from 0

    def run(self, vllm: EngineProcess, break_something: Callable[[], None]) -> tuple[list[list[int]], list[float]]:
        """Tokens of each request, and how long it took, in seconds."""
        tokens: list[list[int]] = []
        seconds: list[float] = []
        for number in range(REQUESTS // self.at_once):
            vllm.call("reset")
            timer = threading.Timer(0.02, break_something) if number == self.fault_at else None
            if timer is not None:
                timer.start()  # while the requests run
            answer = vllm.call("generate", prompts=[self.prompts[place] for place in self.group(number)], tokens=TOKENS)
            if timer is not None:
                timer.join()
            assert answer["ended"] == ["length"] * self.at_once
            tokens += answer["tokens"]
            seconds += [answer["seconds"]] * self.at_once
        return tokens, seconds

    def group(self, number: int) -> list[int]:
        """Which prompts the requests of a group have."""
        return [(number * self.at_once + place) % len(self.prompts) for place in range(self.at_once)]


def p99(seconds: Sequence[float]) -> float:
    return statistics.quantiles(seconds, n=100, method="inclusive")[98]


# Long prompts, on an engine that has work; and short ones that take a tenth of a second each, of which a wait of a
# second would make ten. Twenty requests come after the fault: long enough for a breaker to open and to be probed.
STREAMS = [
    Stream("long", tuple(prompt(1300, seed) for seed in range(20, 25)), 5, 6),
    Stream("short", tuple(prompt(600, seed) for seed in range(30, 35)), 1, 30),
]


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with running(2, "128MiB", "256MiB") as world:
        yield world


class Baseline:
    """Without a cache, and with no work for this machine but the engine's: tokens by stream and prompt, and the 99th
    percentile of fifty requests.
    """

    def __init__(self, vllm: EngineProcess, models: Path) -> None:
        self.tokens: dict[str, list[list[int]]] = {}
        self.p99_s: dict[str, float] = {}
        vllm.call("open", **{**engine(models / "llama", enable_prefix_caching=False), **ROOM})
        for stream in STREAMS:
            vllm.call("generate", prompts=[stream.prompts[0]], tokens=TOKENS)
            tokens, seconds = stream.run(vllm, lambda: None)
            self.p99_s[stream.name] = p99(seconds)
            self.tokens[stream.name] = tokens[: len(stream.prompts)]


@pytest.fixture(scope="module")
def baseline(vllm: EngineProcess, models: Path) -> Baseline:
    return Baseline(vllm, models)


@dataclass(frozen=True)
class Cached:
    """An engine with the cache, for all faults of a stream: it is never restarted."""

    vllm: EngineProcess
    stream: Stream
    tokens: list[list[int]]

    def hits_again(self) -> None:
        """Wait until every prompt has been loaded, by the engine that was there before."""
        left = set(range(len(self.stream.prompts)))

        def whole() -> bool:
            self.vllm.call("reset")
            for number in sorted(left):
                one = self.stream.prompts[number]
                answer = self.vllm.call("generate", prompts=[one], tokens=TOKENS)
                assert answer["tokens"][0] == self.tokens[number]
                if answer["cached"] == [len(one) // CHUNK * CHUNK]:
                    left.discard(number)
            return not left

        wait_until(whole, "hits to come back", 100)


@pytest.fixture(scope="module", params=STREAMS, ids=lambda stream: stream.name)
def cached(
    request: pytest.FixtureRequest, vllm: EngineProcess, models: Path, world: World, baseline: Baseline
) -> Cached:
    stream: Stream = request.param
    settings = transfer(world.cluster.connection, **DEFAULTS, breaker_longest_ms=500)
    vllm.call("open", **{**engine(models / "llama", kv_transfer_config=settings), **ROOM})
    return Cached(vllm, stream, baseline.tokens[stream.name])


def kill(world: World, stack: ExitStack, *names: str) -> None:
    """Until ``stack`` ends nobody starts them again.

    On this machine that would take the processors from an engine whose threads wait for each other by spinning, for a
    second and more: with a cache or without one.
    """
    stack.enter_context(world.stopped("supervisor"))
    for name in names:
        world.kill(name)


def hang(world: World, stack: ExitStack, *names: str) -> None:
    for name in names:
        stack.enter_context(world.stopped(name))


FAULTS: dict[str, Callable[[World, ExitStack], None]] = {
    f"{what} {verb}": partial(lambda names, fault, world, stack: fault(world, stack, *names), names, fault)
    for verb, fault in (("killed", kill), ("hangs", hang))
    for what, names in (("manager", ("manager",)), ("cache node", ("slab-0", "disk-0")), ("everything", EVERYTHING))
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_stream_of_requests(fault: str, cached: Cached, world: World, baseline: Baseline) -> None:
    world.ready()
    cached.hits_again()
    stream = cached.stream
    with ExitStack() as stack:
        tokens, seconds = stream.run(cached.vllm, partial(FAULTS[fault], world, stack))
    assert tokens == [cached.tokens[place % len(stream.prompts)] for place in range(REQUESTS)]
    without_s = baseline.p99_s[stream.name]
    print(f"{stream.name}, {fault}: p99 {p99(seconds):.3f} s, without a cache {without_s:.3f} s")
    assert p99(seconds) <= 2 * without_s, seconds
    world.ready()
    cached.hits_again()


def test_an_answer_after_the_deadline_is_a_miss(cached: Cached, world: World) -> None:
    world.ready()
    cached.hits_again()
    cached.vllm.call("reset")
    with world.stopped("manager"):
        answer = cached.vllm.call("generate", prompts=[cached.stream.prompts[0]], tokens=TOKENS)
    assert answer["tokens"][0] == cached.tokens[0]
    assert answer["cached"] == [0]
    cached.hits_again()


def test_nobody_is_there_when_the_engine_starts(
    vllm: EngineProcess, models: Path, world: World, baseline: Baseline
) -> None:
    """The manager hangs while the engine is made, and serves afterwards."""
    world.ready()
    settings = transfer(world.cluster.connection, deadline_ms=300)
    stream = STREAMS[-1]
    fresh = Cached(vllm, stream, baseline.tokens[stream.name])
    with world.stopped("manager"):
        vllm.call("open", **engine(models / "llama", kv_transfer_config=settings))
        answer = vllm.call("generate", prompts=[stream.prompts[0]], tokens=TOKENS)
        assert answer["tokens"][0] == fresh.tokens[0]
        assert answer["cached"] == [0]
    world.ready()
    fresh.hits_again()
