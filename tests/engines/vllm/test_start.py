"""How a real vLLM starts with the connector: wrong settings stop it with the fix, a cache that is away does not."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest

from tests.engines.support.engine_process import EngineError, EngineProcess
from tests.engines.support.vllm_runs import CHUNK, engine, prompt, transfer
from tests.local.support.world import World

pytestmark = pytest.mark.timeout(240)
PROMPT = prompt(600, 31)
NOWHERE = "tcp://127.0.0.1:9"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"chunk_tokens": 100}, r"chunk_tokens=100: use a multiple of the block size 32, such as 128"),
        ({"chunk_token": 128}, r"chunk_token=.*did you mean chunk_tokens\?"),
        ({"load": "later"}, r"load='later': Input should be 'async', 'sync' or 'off'"),
        ({"endpoint": "http://x"}, r"endpoint='http://x': use unix:///PATH or tcp://HOST:PORT"),
        ({"endpoint": None}, r"endpoint='': .*POLARKV_ENDPOINT"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_wrong_setting_stops_the_start(
    vllm: EngineProcess, models: Path, settings: dict[str, Any], said: str
) -> None:
    config = transfer(None, **{"endpoint": NOWHERE, **settings})
    with pytest.raises(EngineError, match=said):
        vllm.call("open", **engine(models / "llama", kv_transfer_config=config))


def test_a_wrong_token_stops_the_start(vllm: EngineProcess, models: Path, world: World) -> None:
    config = transfer(world.cluster.connection, token="wrong")
    with pytest.raises(EngineError, match=r"token='…': set POLARKV_TOKEN to a token that unix://.* knows"):
        vllm.call("open", **engine(models / "llama", kv_transfer_config=config))


def test_without_a_cache_it_costs_nothing_measurable(vllm: EngineProcess, models: Path, world: World) -> None:
    """Prompts without a connector, with it switched off, with nobody there, and with a cache that has nothing yet."""
    ways: dict[str, dict[str, Any]] = {
        "no connector": {},
        "switched off": {"kv_transfer_config": transfer(None, enabled=False)},
        "nobody there": {"kv_transfer_config": transfer(None, endpoint=NOWHERE)},
        "stores": {"kv_transfer_config": transfer(world.cluster.connection)},
    }
    tokens, cpu = [], {}
    for name, settings in ways.items():
        vllm.call("open", **engine(models / "llama", **settings))
        vllm.call("generate", prompts=[prompt(600, 40)])
        answers = [vllm.call("generate", prompts=[prompt(600, seed)]) for seed in range(41, 53)]
        tokens.append([answer["tokens"] for answer in answers])
        cpu[name] = statistics.median(answer["cpu_seconds"] for answer in answers)
    spent = vllm.call("profile", prompts=[prompt(600, seed) for seed in range(53, 65)])
    print("CPU seconds a request:", {name: round(seconds, 4) for name, seconds in cpu.items()})
    print("of these the connector's own:", spent)
    assert tokens.count(tokens[0]) == len(tokens)
    for name in ("switched off", "nobody there"):
        assert cpu[name] <= 1.25 * cpu["no connector"], cpu
    assert spent["calls"] < 0.05 * cpu["no connector"]
    assert spent["cached_tokens"] == 0


def test_the_connectors_time_for_a_hit(vllm: EngineProcess, models: Path, world: World) -> None:
    vllm.call("open", **engine(models / "llama", kv_transfer_config=transfer(world.cluster.connection)))
    prompts = [prompt(600, seed) for seed in range(70, 76)]
    for one in prompts:
        vllm.call("generate", prompts=[one])
    vllm.call("reset")
    spent = vllm.call("profile", prompts=prompts)
    print("the connector's own CPU seconds for a hit of", 600 // CHUNK * CHUNK, "tokens:", spent)
    assert spent["cached_tokens"] == 600 // CHUNK * CHUNK
    assert spent["calls"] + spent["transfers"] < 0.05
