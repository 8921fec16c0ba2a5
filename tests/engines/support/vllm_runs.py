"""What tests of the vLLM connector share: engines' settings, prompts, and the tokens that are right."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from polarkv_client.layout import HEADER_BYTES
from polarkv_dataplane.disk.attachment import Attachment
from tests.engines.support.engine_process import CORES, EngineProcess, Nursery
from tests.engines.support.environments import Environment
from tests.engines.support.patient import CLIENT
from tests.local.support.raw import RawClient
from tests.local.support.world import World
from tests.support.waiting import wait_until

BLOCK = 32
CHUNK = 128
_VARIABLES = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "-".join(CORES),
    "VLLM_LOGGING_LEVEL": "INFO", "OMP_NUM_THREADS": str(len(CORES)),
}  # fmt: skip
_OTHER = bytes((byte * 7 + 1) % 128 for byte in range(256))  # small numbers in any type: no NaN, no infinity
MODULE = "tests.engines.support.vllm_engine"
ROOT = Path(__file__).parents[3]


def prompt(length: int, seed: int = 0) -> list[int]:
    """Token ids of a prompt; another seed gives another one from its first token on."""
    return [(7 * place * place + 3 * place + 11 + 37 * seed) % 4000 + 4 for place in range(length)]


def transfer(connection: Path | None, **settings: Any) -> dict[str, Any]:
    """vLLM's ``kv_transfer_config`` for a cluster; None: what the environment says.

    Lookups and the manager may take long (:data:`patient.CLIENT`); tests of slow answers say otherwise.
    """
    where = {"connection": str(connection)} if connection else {}
    extra = {"chunk_tokens": CHUNK, **CLIENT, **where, **settings}
    return {
        "kv_connector": "PolarKVConnector", "kv_connector_module_path": "polarkv_client.connectors.vllm",
        "kv_role": "kv_both", "kv_load_failure_policy": "recompute", "kv_connector_extra_config": extra,
    }  # fmt: skip


def engine(model: Path, **more: Any) -> dict[str, Any]:
    """An engine's settings: memory for few requests, so that they have to share it."""
    return {
        "model": str(model), "block_size": BLOCK, "max_model_len": 2048, "num_gpu_blocks_override": 100, **more,
    }  # fmt: skip


def nursery(environment: Environment, log: Path) -> Nursery:
    """Where processes for engines come from; the engines are made by their ``open``."""
    # Its sockets too: engines that are killed leave them behind.
    return Nursery(environment, MODULE, log, (ROOT,), **_VARIABLES, VLLM_RPC_BASE_PATH=str(log.parent))


class Right:
    """The tokens that a model gives without any connector: computed once for each prompt."""

    def __init__(self, process: EngineProcess, model: Path, **settings: Any) -> None:
        self._process = process
        self._settings = engine(model, enable_prefix_caching=False, **settings)
        self._known: dict[tuple[tuple[int, ...], int], list[int]] = {}

    def learn(self, prompts: Sequence[list[int]], tokens: int = 8) -> None:
        """Compute them, in an engine of its own."""
        self._process.call("open", **self._settings)
        for one in prompts:
            answer = self._process.call("generate", prompts=[one], tokens=tokens)
            self._known[tuple(one), tokens] = answer["tokens"][0]

    def of(self, prompts: Sequence[list[int]], tokens: int = 8) -> list[list[int]]:
        """What :meth:`learn` found."""
        return [self._known[tuple(one), tokens] for one in prompts]


def evict_to_disk(world: World) -> int:
    """Have every chunk on disk alone; how many there are."""

    def evicted() -> bool:
        left = [entry["key"] for entry in world.entries() if entry["state"] != "Disk"]
        if left:
            world.evict([bytes.fromhex(key) for key in left])
        return not left

    wait_until(evicted, "all chunks to be on disk alone", 30)
    return sum(1 for _ in world.entries())


def damage(world: World) -> int:
    """Turn every payload in memory into other bytes, headers left as they are; how many."""
    # An offload that comes upon the damage takes the memory copy away before the engine is given it.
    world.wait_on_disk_too([bytes.fromhex(entry["key"]) for entry in world.entries()])
    memory = Attachment.open(str(world.places.socket("slab-0")), world.node_token())
    damaged = 0
    try:
        with RawClient(world.cluster.connection) as raw:
            for entry in world.entries():
                with contextlib.suppress(LookupError):
                    _, extent = raw.extent(bytes.fromhex(entry["key"]))
                    start = extent.offset_bytes + HEADER_BYTES
                    end = start + extent.length_bytes
                    memory.view[start:end] = bytes(memory.view[start:end]).translate(_OTHER)
                    damaged += 1
    finally:
        memory.close()
    return damaged
