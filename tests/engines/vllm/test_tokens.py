"""Greedy tokens of a real vLLM with KV from the cache are those of vLLM without a connector.

Every engine here has memory for a few requests only and computes at most 256 tokens a step: prompts are computed in
pieces and requests are preempted in all of these tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines.support.engine_process import EngineProcess
from tests.engines.support.vllm_runs import (
    CHUNK,
    Right,
    damage,
    engine,
    evict_to_disk,
    prompt,
    transfer,
)
from tests.local.support.world import World

pytestmark = pytest.mark.timeout(600)
LONG = prompt(1000)
LONG_LOADED = 1000 // CHUNK * CHUNK
EXACT = prompt(1024, 1)
THREE = [prompt(700, 2), prompt(900, 3), prompt(500, 4)]
FOUR = [prompt(760, seed) for seed in (5, 6, 7, 8)]
MANY = 24  # tokens to generate, so that four requests outgrow the engine's memory
PIECES = {"max_num_batched_tokens": 256}


@pytest.fixture(scope="module")
def right(vllm: EngineProcess, models: Path) -> Right:
    made = Right(vllm, models / "llama")
    made.learn([LONG, EXACT, *THREE])
    made.learn(FOUR, MANY)
    return made


@pytest.fixture(scope="module", params=["async", "sync"])
def loading(
    request: pytest.FixtureRequest, right: Right, vllm: EngineProcess, models: Path, world: World
) -> Iterator[str]:
    """An engine that loads in one of the two ways; nothing of the other's is in its namespace."""
    settings = transfer(world.cluster.connection, load=request.param, namespace_tenant_salt=request.param)
    # As on a GPU. Not for loads inside a step: one that fails is then told too late.
    ahead = request.param == "async"
    vllm.call("open", **engine(models / "llama", **PIECES, kv_transfer_config=settings), ahead=ahead)
    yield request.param
    world.forget()


@pytest.fixture(autouse=True)
def mended(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "vllm" in request.fixturenames:
        request.getfixturevalue("vllm").call("mend")


def ask(vllm: EngineProcess, prompts: list[list[int]], **more: Any) -> dict[str, Any]:
    """What the engine answers when it has nothing in its own prefix cache; it counts from here."""
    vllm.call("reset")
    vllm.call("counts")
    answer: dict[str, Any] = vllm.call("generate", prompts=prompts, **more)
    assert answer["ended"] == ["length"] * len(prompts)
    return answer


def test_from_memory(loading: str, vllm: EngineProcess, right: Right) -> None:
    first = ask(vllm, [LONG])
    second = ask(vllm, [LONG])
    assert first["tokens"] == second["tokens"] == right.of([LONG])
    assert (first["cached"], second["cached"]) == ([0], [LONG_LOADED])
    assert vllm.call("counts")["chunks_loaded_memory"] == LONG_LOADED // CHUNK


def test_from_disk(loading: str, vllm: EngineProcess, right: Right, world: World) -> None:
    ask(vllm, [LONG])
    vllm.call("reset")
    assert evict_to_disk(world) >= LONG_LOADED // CHUNK
    answer = ask(vllm, [LONG])
    assert answer["tokens"] == right.of([LONG])
    assert answer["cached"] == [LONG_LOADED]
    counts = vllm.call("counts")
    assert counts["hit_tokens_disk"] == LONG_LOADED
    assert counts["chunks_loaded_disk"] + counts.get("chunks_loaded_memory", 0) == LONG_LOADED // CHUNK


def test_a_hit_of_the_whole_prompt(loading: str, vllm: EngineProcess, right: Right) -> None:
    first, second = ask(vllm, [EXACT]), ask(vllm, [EXACT])
    assert first["tokens"] == second["tokens"] == right.of([EXACT])
    # Inside a step one token must be left to compute, so the last chunk is; between steps all are loaded.
    assert second["cached"] == [len(EXACT) if loading == "async" else len(EXACT) - CHUNK]


def test_three_prompts_at_once(loading: str, vllm: EngineProcess, right: Right) -> None:
    first, second = ask(vllm, THREE), ask(vllm, THREE)
    assert first["tokens"] == second["tokens"] == right.of(THREE)
    assert second["cached"] == [len(each) // CHUNK * CHUNK for each in THREE]


def test_a_part_that_the_engine_has_itself_is_not_loaded_again(loading: str, vllm: EngineProcess, right: Right) -> None:
    """The engine keeps blocks that are no whole chunk: the load begins in the middle of one."""
    ask(vllm, [LONG])
    vllm.call("reset")
    vllm.call("generate", prompts=[LONG[: CHUNK + 70]])
    vllm.call("counts")
    answer = vllm.call("generate", prompts=[LONG])
    assert answer["tokens"] == right.of([LONG])
    assert answer["cached"] == [LONG_LOADED]
    assert vllm.call("counts")["hit_tokens_memory"] < LONG_LOADED


def test_preemption(loading: str, vllm: EngineProcess, right: Right) -> None:
    before = vllm.call("preemptions")
    for _ in range(2):
        answer = ask(vllm, FOUR, tokens=MANY)
        assert answer["tokens"] == right.of(FOUR, MANY)
    assert vllm.call("preemptions") > before
    assert vllm.call("counts")["chunks_loaded_memory"] > 0


def test_every_eighth_chunk_missing(loading: str, vllm: EngineProcess, right: Right, world: World) -> None:
    ask(vllm, [EXACT])
    vllm.call("reset")
    keys = vllm.call("keys", prompt=EXACT)
    world.forget([bytes.fromhex(key) for key in keys[7::8]])
    answer = ask(vllm, [EXACT])
    assert answer["tokens"] == right.of([EXACT])
    assert answer["cached"] == [7 * CHUNK]
    # What was missing is there again.
    vllm.call("reset")
    assert set(keys) <= {entry["key"] for entry in world.entries()}
    world.forget([bytes.fromhex(keys[0])])
    assert ask(vllm, [EXACT])["cached"] == [0]


def test_half_of_all_loads_fail(loading: str, vllm: EngineProcess, right: Right) -> None:
    ask(vllm, [LONG, *THREE])
    vllm.call("fail_loads", every=2)
    for _ in range(2):
        answer = ask(vllm, [LONG, *THREE])
        assert answer["tokens"] == right.of([LONG, *THREE])
        assert vllm.call("counts")["chunks_load_failed"] >= 4
    vllm.call("mend")
    answer = ask(vllm, [LONG, *THREE])
    assert answer["tokens"] == right.of([LONG, *THREE]), "what was computed after a failed load was stored"
    assert answer["cached"] == [len(each) // CHUNK * CHUNK for each in (LONG, *THREE)]


def test_damaged_bytes_are_misses_and_would_change_the_tokens(
    loading: str, vllm: EngineProcess, right: Right, world: World
) -> None:
    world.forget()
    ask(vllm, [LONG])
    vllm.call("reset")
    assert damage(world) == LONG_LOADED // CHUNK
    vllm.call("skip_verification")
    unverified = ask(vllm, [LONG])
    assert unverified["tokens"] != right.of([LONG]), "the tokens do not depend on what was loaded"
    assert unverified["cached"] == [LONG_LOADED]
    vllm.call("mend")
    answer = ask(vllm, [LONG])
    assert answer["tokens"] == right.of([LONG])
    assert vllm.call("counts")["chunks_load_failed"] == LONG_LOADED // CHUNK
    # The damaged copies go, and whole ones come in their place.
    for _ in range(3):
        again = ask(vllm, [LONG])
        assert again["tokens"] == right.of([LONG])
    assert vllm.call("counts")["chunks_loaded_memory"] == LONG_LOADED // CHUNK


def test_salts_do_not_meet(loading: str, vllm: EngineProcess, right: Right) -> None:
    ask(vllm, [LONG], cache_salt="one")
    vllm.call("reset")
    assert ask(vllm, [LONG], cache_salt="two")["cached"] == [0]
    assert ask(vllm, [LONG], cache_salt="one")["cached"] == [LONG_LOADED]


@pytest.mark.parametrize("method", ["matched", "allocated", "_store", "hit_tiers", "new_request", "arrived"])
def test_a_defect_of_the_connector_costs_hits_alone(
    method: str, loading: str, vllm: EngineProcess, right: Right
) -> None:
    ask(vllm, [LONG])
    vllm.call("break_planning", name=method)
    answer = ask(vllm, [LONG])
    assert answer["tokens"] == right.of([LONG])
    vllm.call("mend")
    assert ask(vllm, [LONG])["cached"] == [LONG_LOADED]
