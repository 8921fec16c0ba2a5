"""What changes under an engine, or from one to the next: what it loads is what it would compute, or it computes it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines.support.adapters import write_adapter
from tests.engines.support.engine_process import EngineProcess
from tests.engines.support.patient import MANAGER
from tests.engines.support.vllm_runs import CHUNK, engine, prompt, transfer
from tests.local.support.world import World, running

pytestmark = pytest.mark.timeout(600)
ONE, TWO = prompt(700, 71), prompt(700, 72)
LOADED = 700 // CHUNK * CHUNK
KEYS = 4  # the manager takes fewer in a message than a prompt has


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with running(1, "256MiB", "512MiB", patient=True, manager={**MANAGER, "max_keys_per_call": KEYS}) as world:
        yield world


def ours(world: World, **settings: Any) -> dict[str, Any]:
    return transfer(world.cluster.connection, batch_keys=KEYS, **settings)


def cold(process: EngineProcess, asked: list[int] = ONE, **more: Any) -> tuple[list[int], int]:
    """Tokens, and how many of the prompt's came from the cache."""
    process.call("reset")
    answer = process.call("generate", prompts=[asked], **more)
    return answer["tokens"][0], answer["cached"][0]


def known(process: EngineProcess, **more: Any) -> list[int]:
    """Tokens of a prompt that is not in the cache, and is afterwards."""
    tokens, cached = cold(process, **more)
    assert cached == 0
    assert cold(process, **more) == (tokens, LOADED)
    return tokens


def test_replaced_weights_and_adapters(vllm: EngineProcess, models: Path, world: World, tmp_path: Path) -> None:
    lora = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 1, "max_cpu_loras": 4}
    vllm.call("open", **engine(models / "llama", kv_transfer_config=ours(world), **lora))
    path = str(tmp_path / "adapter")
    write_adapter(Path(path), 1)
    first = known(vllm, adapter=(1, path))
    write_adapter(Path(path), 2)
    second = known(vllm, adapter=(2, path))
    in_place, cached = cold(vllm, adapter=(1, path), in_place=True)
    assert (in_place, cached) == (second, 0)
    write_adapter(Path(path), 3)
    # The engine still has the former files' weights. Under the new ones' name that would be another's wrong tokens.
    assert cold(vllm, adapter=(2, path)) == (second, 0)
    third = known(vllm, adapter=(3, path))

    base = known(vllm)
    keys = vllm.call("keys", prompt=TWO)
    vllm.call("replace_weights")
    replaced = known(vllm)
    cold(vllm, TWO)
    assert not {entry["key"] for entry in world.entries()} & set(keys)
    assert len({tuple(each) for each in (first, second, third, base, replaced)}) == 5


def test_the_longest_prompt_decides_how_positions_are_computed(vllm: EngineProcess, models: Path, world: World) -> None:
    rope = {
        "rope_type": "longrope", "short_factor": [1.0] * 16, "long_factor": [4.0] * 16, "rope_theta": 10000.0,
        "original_max_position_embeddings": 1024,
    }  # fmt: skip
    found = []
    for longest in (1024, 2048):
        settings = engine(models / "llama", kv_transfer_config=ours(world), hf_overrides={"rope_parameters": rope})
        vllm.call("open", **{**settings, "max_model_len": longest})
        found.append(known(vllm))
    assert found[0] != found[1]


def test_a_request_ends_while_another_connector_loads_it(vllm: EngineProcess, models: Path, world: World) -> None:
    other = {
        "kv_connector": "Endless", "kv_connector_module_path": "tests.engines.support.vllm_endless",
        "kv_role": "kv_both",
    }  # fmt: skip
    both = {
        "kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [ours(world, namespace_tenant_salt="both"), other]},
    }  # fmt: skip
    vllm.call("open", **engine(models / "llama", kv_transfer_config=both))
    vllm.call("abort_while_loading", prompt=ONE)
    known(vllm)
