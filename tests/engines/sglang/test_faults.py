"""Whatever breaks around a real SGLang, its tokens are right, and hits come back without a restart of the engine."""

from __future__ import annotations

import os
import signal
from functools import partial

import pytest

from tests.engines.support.engine_process import EngineProcess
from tests.engines.support.patient import DEFAULTS
from tests.engines.support.sglang_runs import (
    CACHED,
    PAGE_TOKENS,
    Start,
    attach,
    connection,
    from_storage,
    generate,
    stored,
)
from tests.local.support.world import World
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(300)


def hits_again(engine: EngineProcess, number: int, tokens: list[int]) -> None:
    """Wait until a prompt's KV is stored and loaded again; its tokens are right all along."""

    def hit() -> bool:
        engine.call("flush")
        answer = generate(engine, number)
        assert answer["tokens"] == tokens
        return from_storage(answer) == CACHED

    wait_until(hit, "hits", 60, 0.2)


def numbers(metrics: str, name: str) -> list[float]:
    """The values of a metric, one for each set of labels."""
    return [float(line.rpartition(" ")[2]) for line in metrics.splitlines() if line.startswith(name)]


def not_shown(engine: EngineProcess) -> list[str]:
    """What one prompt that was stored and loaded has not brought into the engine's metrics, which follow its answer."""
    shown, pages = engine.call("metrics"), CACHED // PAGE_TOKENS
    exact = {"polarkv_hit_tokens_total": CACHED, "polarkv_pages_total": pages} | dict.fromkeys(
        ("backup_pgs_sum", "prefetch_pgs_sum"), pages
    )
    missing = [name for name, value in exact.items() if value not in numbers(shown, f"sglang:{name}")]
    seconds = numbers(shown, "sglang:polarkv_load_seconds_sum")
    return missing if seconds and min(seconds) > 0 else [*missing, "polarkv_load_seconds_sum"]


def lives(world: World, name: str) -> bool:
    return name in world.cluster.pids()


def test_another_process_loads_what_one_stored(
    start: Start, engine: EngineProcess, world: World, right: list[list[int]]
) -> None:
    with start(enable_metrics=True) as first:
        assert len(stored(first, world, 6)) == CACHED // PAGE_TOKENS
        generate(first, 6)
        wait_until(lambda: not not_shown(first), "all metrics to be shown")

    answer = generate(engine, 6)

    assert from_storage(answer) == CACHED
    assert answer["tokens"] == right[6]


def test_servers_die_during_a_stream_of_requests(engine: EngineProcess, world: World, right: list[list[int]]) -> None:
    stored(engine, world, 7)
    deaths = {2: ["manager"], 5: ["slab-0"], 8: ["manager", "slab-0", "disk-0"]}
    former: dict[str, int] = {}
    for turn in range(12):
        for name in deaths.get(turn, []):
            wait_until(partial(lives, world, name), f"{name} to live", 30)
            former[name] = world.kill(name)
        number = 7 + turn % 3
        assert generate(engine, number)["tokens"] == right[number], f"request {turn}"
        engine.call("flush")
    for name, pid in former.items():
        world.started_again(name, pid)

    hits_again(engine, 7, right[7])


def test_a_manager_that_does_not_answer_costs_a_deadline(
    engine: EngineProcess, world: World, right: list[list[int]]
) -> None:
    attach(engine, **connection(world), **{**DEFAULTS, "patience": 0})
    stored(engine, world, 10)
    with world.stopped("manager"):
        answer = generate(engine, 10)
    assert (answer["tokens"], answer["cached"]) == (right[10], 0)
    hits_again(engine, 10, right[10])
    attach(engine, **connection(world))  # the tests after this one are not of what is late


def test_an_engine_dies_while_it_stores(start: Start, engine: EngineProcess, right: list[list[int]]) -> None:
    with start() as doomed:
        generate(doomed, 11)
        os.killpg(doomed.pid, signal.SIGKILL)

    assert generate(engine, 11)["tokens"] == right[11]
    hits_again(engine, 11, right[11])


def test_half_of_the_calls_fail(start: Start, right: list[list[int]]) -> None:
    """By the engine's own injector, which stands between it and the connector."""
    hits: list[int] = []
    with start(variables={"SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE": "0.5"}) as engine:
        while len(hits) < 50 and not {0, CACHED} <= set(hits[1:]):
            answer = generate(engine, 12)
            assert answer["tokens"] == right[12]
            hits.append(from_storage(answer))
            engine.call("flush")
    assert {0, CACHED} <= set(hits[1:]), f"some fail, some do not: {hits}"
