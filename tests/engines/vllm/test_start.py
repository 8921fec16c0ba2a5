"""How a real vLLM starts with the connector: wrong settings stop it with the fix, a cache that is away does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engines.support.engine_process import EngineError, EngineProcess
from tests.engines.support.vllm_runs import CHUNK, engine, prompt, transfer
from tests.local.support.world import World

pytestmark = pytest.mark.timeout(600)
PROMPT = prompt(600, 31)
COSTED = 900  # tokens; what an engine computes for them is small beside any real request
NOTHING = {"kv_connector": "Nothing", "kv_connector_module_path": "tests.engines.support.vllm_nothing"}
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


def test_what_it_costs(vllm: EngineProcess, models: Path, world: World) -> None:
    """The connector's own CPU time a request, in the engine's calls and on all of its threads.

    Small amounts are compared with each other, those of the same run: the engine's threads wait by spinning, so that
    its whole depends on what else the machine does. A connector that does nothing shows what calling one costs.
    """
    ways: dict[str, dict[str, Any]] = {
        "no connector": {},
        "nothing": {"kv_transfer_config": transfer(None) | NOTHING},
        "switched off": {"kv_transfer_config": transfer(None, enabled=False)},
        "nobody there": {"kv_transfer_config": transfer(None, endpoint=NOWHERE)},
        "stored": {"kv_transfer_config": transfer(world.cluster.connection)},
    }
    prompts = [prompt(COSTED, seed) for seed in range(41, 51)]
    own: dict[str, dict[str, Any]] = {}
    for name, settings in ways.items():
        vllm.call("open", **engine(models / "llama", **settings))
        vllm.call("generate", prompts=[prompt(COSTED, 40)])
        own[name] = vllm.call("profile", prompts=prompts)
    own["loaded"] = vllm.call("profile", prompts=prompts)
    tokens = [each.pop("tokens") for each in own.values()]
    for name, spent_of in own.items():
        print(f"{name}: CPU seconds {spent_of}")
    assert tokens.count(tokens[0]) == len(tokens)
    assert own["loaded"]["cached_tokens"] == COSTED // CHUNK * CHUNK
    assert own["stored"]["cached_tokens"] == own["nobody there"]["cached_tokens"] == 0
    spent = {name: each["calls"] + each["threads"] for name, each in own.items()}
    assert spent["no connector"] == 0
    assert 0 < spent["switched off"] <= 2 * spent["nothing"]
    assert spent["nobody there"] <= max(spent["stored"], spent["loaded"]) <= 0.1 * own["no connector"]["engine"]
