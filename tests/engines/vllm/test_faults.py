"""Cache processes die during a stream of requests to a real vLLM: right tokens, no request waits, hits come back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.engines.support.engine_process import EngineProcess
from tests.engines.support.vllm_runs import CHUNK, engine, prompt, transfer
from tests.local.support.world import World, running
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(600)
STREAM = 50
AT_ONCE = 5  # requests under way together: long prompts, as people cache them, on an engine that has work
PROMPTS = [prompt(1900, seed) for seed in range(20, 30)]
LOADED = 1900 // CHUNK * CHUNK
FAULT_AT = 2  # a group of requests, from 0
TOKENS = 8
EVERYTHING = ("manager", "slab-0", "disk-0", "slab-1", "disk-1")
ROOM = {"num_gpu_blocks_override": 400}  # for a group of requests


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with running(2, "128MiB", "256MiB") as world:
        yield world


class Baseline:
    """Without a cache: tokens by prompt, and the 99th percentile of fifty requests: how long the longest group took.

    The cluster's processes are killed here too: what starts them again takes this machine's time from the engine.
    """

    def __init__(self, vllm: EngineProcess, models: Path, world: World) -> None:
        vllm.call("open", **{**engine(models / "llama", enable_prefix_caching=False), **ROOM})
        vllm.call("generate", prompts=[PROMPTS[0]], tokens=TOKENS)
        answers = []
        for number in range(STREAM // AT_ONCE):
            if number == FAULT_AT:
                kill(world, *EVERYTHING)
            prompts = [PROMPTS[place] for place in group(number)]
            answers.append(vllm.call("generate", prompts=prompts, tokens=TOKENS))
        self.tokens = [tokens for answer in answers for tokens in answer["tokens"]][: len(PROMPTS)]
        self.p99_s = max(answer["seconds"] for answer in answers)


@pytest.fixture(scope="module")
def baseline(vllm: EngineProcess, models: Path, world: World) -> Baseline:
    return Baseline(vllm, models, world)


@pytest.fixture(scope="module")
def cached(vllm: EngineProcess, models: Path, world: World, baseline: Baseline) -> EngineProcess:
    """One engine for all tests here: it is never restarted."""
    defaults = {
        "lookup_deadline_ms": 200, "connect_timeout_ms": 1000, "manager_timeout_ms": 1000, "load_deadline_ms": 5000,
    }  # fmt: skip
    settings = transfer(world.cluster.connection, breaker_longest_ms=500, **defaults)
    vllm.call("open", **{**engine(models / "llama", kv_transfer_config=settings), **ROOM})
    return vllm


def group(number: int) -> list[int]:
    """Which prompts the requests of a group have."""
    return [(number * AT_ONCE + place) % len(PROMPTS) for place in range(AT_ONCE)]


def kill(world: World, *names: str) -> None:
    for name in names:
        world.kill(name)


def hang(world: World, stack: ExitStack, *names: str) -> None:
    for name in names:
        stack.enter_context(world.stopped(name))


FAULTS: dict[str, Callable[[World, ExitStack], None]] = {
    "manager killed": lambda world, _: kill(world, "manager"),
    "cache node killed": lambda world, _: kill(world, "slab-0", "disk-0"),
    "everything killed": lambda world, _: kill(world, *EVERYTHING),
    "manager hangs": lambda world, stack: hang(world, stack, "manager"),
    "everything hangs": lambda world, stack: hang(world, stack, *EVERYTHING),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_stream_of_requests(fault: str, cached: EngineProcess, world: World, baseline: Baseline) -> None:
    world.ready()
    hits_again(cached, baseline)
    seconds = []
    with ExitStack() as stack:
        for number in range(STREAM // AT_ONCE):
            cached.call("reset")
            timer = threading.Timer(0.02, FAULTS[fault], (world, stack)) if number == FAULT_AT else None
            if timer:
                timer.start()  # while the requests run
            answer = cached.call("generate", prompts=[PROMPTS[place] for place in group(number)], tokens=TOKENS)
            if timer:
                timer.join()
            assert answer["ended"] == ["length"] * AT_ONCE
            assert answer["tokens"] == [baseline.tokens[place] for place in group(number)]
            seconds.append(answer["seconds"])
    p99_s = max(seconds)
    print(f"{fault}: p99 {p99_s:.3f} s, without a cache {baseline.p99_s:.3f} s")
    assert p99_s <= 2 * baseline.p99_s, seconds
    world.ready()
    hits_again(cached, baseline)


def hits_again(cached: EngineProcess, baseline: Baseline) -> None:
    """Wait until every prompt has been loaded, by the engine that was there before."""
    left = set(range(len(PROMPTS)))

    def whole() -> bool:
        cached.call("reset")
        for number in sorted(left):
            answer = cached.call("generate", prompts=[PROMPTS[number]], tokens=TOKENS)
            assert answer["tokens"][0] == baseline.tokens[number]
            if answer["cached"] == [LOADED]:
                left.discard(number)
        return not left

    wait_until(whole, "hits to come back", 100)


def test_an_answer_after_the_deadline_is_a_miss(cached: EngineProcess, baseline: Baseline, world: World) -> None:
    world.ready()
    hits_again(cached, baseline)
    cached.call("reset")
    with world.stopped("manager"):
        answer = cached.call("generate", prompts=[PROMPTS[0]], tokens=TOKENS)
    assert answer["tokens"][0] == baseline.tokens[0]
    assert answer["cached"] == [0]
    hits_again(cached, baseline)


def test_nobody_is_there_when_the_engine_starts(
    vllm: EngineProcess, models: Path, world: World, baseline: Baseline, cached: EngineProcess
) -> None:
    """Last: it replaces the engine. The manager hangs while the engine is made, and serves afterwards."""
    world.ready()
    with world.stopped("manager"):
        vllm.call(
            "open", **engine(models / "llama", kv_transfer_config=transfer(world.cluster.connection, deadline_ms=300))
        )
        answer = vllm.call("generate", prompts=[PROMPTS[0]], tokens=TOKENS)
        assert answer["tokens"][0] == baseline.tokens[0]
        assert answer["cached"] == [0]
    world.ready()
    hits_again(vllm, baseline)
