"""The connector in a real SGLang: the same tokens as without, wherever the KV comes from."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from polarkv_client.sync import SyncClient
from tests.engines.support import costs, sglang_runs
from tests.engines.support.adapters import other_weights
from tests.engines.support.engine_process import EngineError, EngineProcess
from tests.engines.support.sglang_runs import (
    CACHED,
    PAGE_TOKENS,
    TOKENS,
    attach,
    connection,
    from_storage,
    generate,
    keys_in,
    prompt,
    stored,
)
from tests.local.support.world import World
from tests.support.waiting import wait_until

# Engines start in most of these, on a busy machine.
pytestmark = pytest.mark.timeout(300)
PAGE_FIRST = pytest.mark.parametrize("engine", ["page_first"], indirect=True)
LAYOUTS = pytest.mark.parametrize("engine", list(sglang_runs.IO_BACKENDS), indirect=True)


@LAYOUTS
@pytest.mark.parametrize("interface", ["v1", "generic"])
def test_what_was_flushed_is_loaded_and_gives_the_same_tokens(
    engine: EngineProcess, world: World, right: list[list[int]], interface: str
) -> None:
    attach(engine, **connection(world), interface_v1=int(interface == "v1"))
    before = keys_in(world)

    cold = generate(engine, 0)
    engine.call("flush")
    assert len(keys_in(world) - before) == CACHED // PAGE_TOKENS, "every whole page is stored, once"
    warm = [generate(engine, 0)]
    engine.call("flush")
    # Flushing again has made the engine's threads anew once more.
    warm.append(generate(engine, 0))

    assert cold["cached"] == 0
    assert [from_storage(answer) for answer in warm] == [CACHED] * 2
    assert [answer["tokens"] for answer in (cold, *warm)] == [right[0]] * 3


@PAGE_FIRST
def test_prompts_at_once_that_share_a_beginning(engine: EngineProcess, world: World) -> None:
    attach(engine, **connection(world))
    prompts = [prompt(256, 5) + prompt(200, seed) for seed in (1000, 2000, 3000)]
    cold = engine.call("generate", prompts=prompts, tokens=TOKENS)
    engine.call("flush")
    warm = engine.call("generate", prompts=prompts, tokens=TOKENS)

    assert [answer["tokens"] for answer in warm] == [answer["tokens"] for answer in cold]
    assert [answer["cached"] for answer in warm] == [448] * 3


@PAGE_FIRST
def test_a_page_that_is_gone_is_computed_and_stored_again(
    engine: EngineProcess, world: World, right: list[list[int]]
) -> None:
    attach(engine, **connection(world))
    assert len(stored(engine, world, 1, 260)) == 4
    (fifth,) = stored(engine, world, 1, 324)
    assert len(stored(engine, world, 1)) == 3
    world.forget([fifth])

    holed = generate(engine, 1)
    engine.call("flush")
    again = generate(engine, 1)

    assert (from_storage(holed), from_storage(again)) == (256, CACHED)
    assert [holed["tokens"], again["tokens"]] == [right[1]] * 2


@PAGE_FIRST
def test_pages_on_disk_are_brought_to_memory_and_loaded(
    engine: EngineProcess, world: World, client: SyncClient, right: list[list[int]]
) -> None:
    attach(engine, **connection(world))
    world.leave_only_on_disk(client, list(stored(engine, world, 2)))

    answer = generate(engine, 2)

    assert from_storage(answer) == CACHED
    assert answer["tokens"] == right[2]


@PAGE_FIRST
def test_damaged_bytes_are_a_miss(
    engine: EngineProcess, world: World, client: SyncClient, right: list[list[int]]
) -> None:
    attach(engine, **connection(world))
    stored(engine, world, 3, 260)
    (fifth,) = stored(engine, world, 3, 324)
    stored(engine, world, 3)
    world.leave_only_on_disk(client, [fifth])
    with world.file_of(fifth).open("r+b") as file:
        file.seek(100_000)
        file.write(b"not what was there")

    damaged = generate(engine, 3)
    engine.call("flush")
    again = generate(engine, 3)

    assert (from_storage(damaged), from_storage(again)) == (256, CACHED)
    assert [damaged["tokens"], again["tokens"]] == [right[3]] * 2


@PAGE_FIRST
def test_other_bytes_give_other_tokens(
    engine: EngineProcess, world: World, client: SyncClient, right: list[list[int]]
) -> None:
    """The control: were the loads not real, the tests above would pass all the same."""
    attach(engine, **connection(world))
    keys = list(stored(engine, world, 4))
    (length,) = {entry["length_bytes"] for entry in world.entries() if bytes.fromhex(entry["key"]) in keys}
    world.forget(keys)
    wait_until(lambda: client.store(keys, [bytes(length)] * len(keys)).present == len(keys), "zeros to be stored")

    answer = generate(engine, 4)

    assert from_storage(answer) == CACHED
    assert answer["tokens"] != right[4]


@PAGE_FIRST
def test_weights_that_are_replaced(
    engine: EngineProcess, world: World, models: Path, right: list[list[int]], tmp_path: Path
) -> None:
    """Nothing is shared from then on, until the backend is attached anew: it then says whose weights these are."""
    attach(engine, **connection(world))
    stored(engine, world, 8)
    before = keys_in(world)
    engine.call("replace_weights", model=str(other_weights(models / "llama", tmp_path / "llama")))
    replaced = generate(engine, 8)
    engine.call("flush")
    assert from_storage(replaced) == 0
    assert keys_in(world) == before

    attach(engine, **connection(world))
    for cached in (0, CACHED):
        answer = generate(engine, 8)
        assert (answer["tokens"], from_storage(answer)) == (replaced["tokens"], cached)
        engine.call("flush")

    engine.call("replace_weights", model=str(models / "llama"))
    attach(engine, **connection(world))
    answer = generate(engine, 8)
    assert (answer["tokens"], from_storage(answer)) == (right[8], CACHED)
    assert answer["tokens"] != replaced["tokens"]


@PAGE_FIRST
def test_wrong_configurations_say_what_is_wrong_and_an_unreachable_cache_is_none(
    engine: EngineProcess, world: World, right: list[list[int]]
) -> None:
    attach(engine, **connection(world))
    wrong: list[tuple[dict[str, Any], str]] = [
        ({**connection(world), "load_deadline": 3}, "load_deadline=.*did you mean load_deadline_ms"),
        ({**connection(world), "load_deadline_ms": 0}, "load_deadline_ms"),
        ({"connection": "/nowhere"}, "connection"),
        ({**connection(world), "token": "another"}, "token"),
    ]
    for extra, expected in wrong:
        with pytest.raises(EngineError, match=expected):
            attach(engine, **extra)
    attach(engine, endpoint="unix:///nowhere/manager.sock")
    answer = generate(engine, 5)
    engine.call("flush")
    again = generate(engine, 5)

    assert [answer["cached"], again["cached"]] == [0, 0]
    assert [answer["tokens"], again["tokens"]] == [right[5]] * 2


@PAGE_FIRST
def test_what_it_costs(engine: EngineProcess, world: World) -> None:
    """The connector's own CPU seconds a request, in the engine's calls and on its own threads, of the scheduler's."""
    attach(engine, **connection(world), module_path="tests.engines.support.sglang_costs", class_name="Costed")
    file = world.cluster.connection.with_name(costs.FILE)
    generate(engine, 60)
    engine.call("flush")
    seen = [json.loads(file.read_text())]
    for _ in ("stored", "loaded"):
        for number in range(61, 71):
            generate(engine, number)
            engine.call("flush")
        seen.append(json.loads(file.read_text()))
    for name, (before, after) in zip(("stored", "loaded"), itertools.pairwise(seen), strict=True):
        spent = {kind: (after[kind] - before[kind]) / 10 for kind in after}
        print(f"{name}: CPU seconds a request {spent}")
        assert 0 < spent["calls"] + spent["threads"] <= 0.1 * spent["engine"]
    attach(engine, **connection(world))
