"""Other models, other processes, several ranks: the tokens are those of vLLM without a connector."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engines.support.engine_process import EngineProcess, Nursery
from tests.engines.support.vllm_runs import CHUNK, Right, engine, evict_to_disk, prompt, transfer
from tests.local.support.world import World
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(600)
PROMPTS = [prompt(700, 11), prompt(900, 12)]
LOADED = [len(each) // CHUNK * CHUNK for each in PROMPTS]
Start = Callable[..., Any]


@pytest.fixture(scope="module")
def right(vllm: EngineProcess, models: Path) -> Right:
    made = Right(vllm, models / "llama")
    made.learn(PROMPTS)
    return made


@pytest.fixture
def another(vllm_nursery: Nursery, tmp_path: Path) -> Start:
    """Return a function: a second process for engines."""
    return lambda **variables: vllm_nursery.engine({}, tmp_path / "another.log", **variables)


def cold(process: EngineProcess, prompts: list[list[int]] = PROMPTS) -> dict[str, Any]:
    process.call("reset")
    answer: dict[str, Any] = process.call("generate", prompts=prompts)
    return answer


@pytest.mark.parametrize(("model", "block"), [("qwen3", 32), ("mla", 16)])
def test_other_models(vllm: EngineProcess, models: Path, world: World, model: str, block: int) -> None:
    memory = {"block_size": block, "num_gpu_blocks_override": 3200 // block}
    right = Right(vllm, models / model, **memory)
    right.learn(PROMPTS)
    settings = transfer(world.cluster.connection)
    vllm.call("open", **engine(models / model, kv_transfer_config=settings, **memory))
    for one, tokens, length in zip(PROMPTS, right.of(PROMPTS), LOADED, strict=True):
        # One by one, as the right tokens were computed: of experts, a batch computes other last digits.
        stored, loaded = cold(vllm, [one]), cold(vllm, [one])
        assert stored["tokens"] == loaded["tokens"] == [tokens]
        assert (stored["cached"], loaded["cached"]) == ([0], [length])


def test_by_way_of_staging_memory_and_by_another_process_without(
    vllm: EngineProcess, right: Right, models: Path, world: World, another: Start
) -> None:
    """As a GPU's KV goes, with a device's twin. The process that stored is killed while it stores."""
    # Memory for eight chunks in all: loads and stores go in batches of two, and wait for each other.
    chunk_bytes = CHUNK * 4 * 4 * 2 * 32 * 4
    settings = transfer(world.cluster.connection, local_cache_bytes=8 * chunk_bytes)
    vllm.call("stage")
    vllm.call("open", **engine(models / "llama", kv_transfer_config=settings), keep_patches=True)
    stored, loaded = cold(vllm), cold(vllm)
    assert stored["tokens"] == loaded["tokens"] == right.of(PROMPTS)
    assert loaded["cached"] == LOADED
    # Copies begin behind what the engine has asked for, and have ended before anybody looks at the bytes.
    assert set(vllm.call("staged_orders")) == {"stream wait for mark finish"}
    more = [prompt(1500, 13), prompt(1500, 14)]
    vllm.call("generate", prompts=more, tokens=1)
    os.killpg(vllm.pid, signal.SIGKILL)

    with another() as second:
        second.call("open", **engine(models / "llama", kv_transfer_config=transfer(world.cluster.connection)))
        for _ in range(2):
            from_memory = cold(second)
            assert from_memory["tokens"] == right.of(PROMPTS)
            assert from_memory["cached"] == LOADED
        # What the first had not stored in time is stored now: the locks of a killed process end.
        second.call("reset")
        partly = second.call("generate", prompts=more)
        second.call("reset")

        def whole() -> bool:
            again = second.call("generate", prompts=more)
            second.call("reset")
            assert again["tokens"] == partly["tokens"]
            return bool(again["cached"] == [1500 // CHUNK * CHUNK] * 2)

        wait_until(whole, "all chunks to be stored", 30)
        assert evict_to_disk(world) > 0
        from_disk = cold(second)
        assert from_disk["tokens"] == right.of(PROMPTS)
        assert from_disk["cached"] == LOADED


def test_two_ranks_store_apart_and_load_together(
    right_tokens: list[list[int]], models: Path, world: World, another: Start
) -> None:
    settings = engine(
        models / "llama", kv_transfer_config=transfer(world.cluster.connection), tensor_parallel_size=2,
        distributed_executor_backend="mp",
    )  # fmt: skip
    with another(VLLM_CPU_OMP_THREADS_BIND="0|1") as ranks:
        before = {entry["key"] for entry in world.entries()}
        ranks.call("open", **settings)
        stored = cold(ranks)
        ranks.call("reset")
        made = {entry["key"] for entry in world.entries()} - before
        assert len(made) == 2 * sum(each // CHUNK for each in LOADED)
        loaded = cold(ranks)
        assert stored["tokens"] == loaded["tokens"] == right_tokens
        assert (stored["cached"], loaded["cached"]) == ([0, 0], LOADED)
        second_rank = ranks.call("keys", prompt=PROMPTS[1], rank=1)

        def up_to_the_hole() -> bool:
            """One rank's part of one chunk is lost: no rank uses the chunk, nor what follows it."""
            ranks.call("reset")
            world.forget([bytes.fromhex(second_rank[3])])
            partly = cold(ranks)
            assert partly["tokens"] == right_tokens
            return bool(partly["cached"] == [LOADED[0], 3 * CHUNK])

        wait_until(up_to_the_hole, "both prompts to be loaded up to the hole", 60)


@pytest.fixture(scope="module")
def right_tokens(right: Right) -> list[list[int]]:
    """Known before the first process is killed."""
    return right.of(PROMPTS)
