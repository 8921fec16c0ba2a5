"""SGLang engines for tests: small, greedy, on the CPU, with the connector as users configure it."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from tests.engines.support.engine_process import CORES, EngineProcess, Nursery
from tests.engines.support.environments import Environment
from tests.engines.support.guides import command
from tests.engines.support.patient import CLIENT
from tests.local.support.world import World

PROMPT_TOKENS = 520
PROMPTS = 16  # as many have known answers
TOKENS = 12  # of an answer
Start = Callable[..., AbstractContextManager[EngineProcess]]
_MODULE = "tests.engines.support.sglang_engine"
CPU = Path(__file__).parent / "sglang_cpu"
# By layout of the host pool: the way of copying that SGLang has for it.
IO_BACKENDS = {"page_first": "kernel", "page_first_direct": "direct", "layer_first": "direct"}
# As the guide says: its flags, with what is the test's own in the place of MODEL and .polarkv.
DOCUMENTED = command("sglang", "sglang.launch_server").flags()
PAGE_TOKENS = int(DOCUMENTED["page_size"])
EXTRA = {
    **json.loads(DOCUMENTED["hicache_storage_backend_extra_config"]),
    **CLIENT,
    # The engine's own: prompts shorter than this are not looked up.
    "prefetch_threshold": PAGE_TOKENS,
}


CACHED = PROMPT_TOKENS // PAGE_TOKENS * PAGE_TOKENS


def settings(model: Path, extra: dict[str, Any] | None, layout: str = "page_first", **more: Any) -> dict[str, Any]:
    """Arguments of an engine; without ``extra`` (the storage backend's configuration) it has no cache but its own."""
    chosen: dict[str, Any] = {
        "model_path": str(model), "device": "cpu", "attention_backend": "torch_native", "sampling_backend": "pytorch",
        "grammar_backend": "none", "dtype": "float32", "random_seed": 0, "page_size": PAGE_TOKENS,
        "context_length": 4096, "max_total_tokens": 8192, "mem_fraction_static": 0.05, "disable_cuda_graph": True,
        "disable_overlap_schedule": True, "log_level": "info", "skip_server_warmup": True,
    }  # fmt: skip
    if extra is not None:
        chosen |= {
            "enable_hierarchical_cache": DOCUMENTED["enable_hierarchical_cache"] == "true",
            "hicache_ratio": 2.0, "hicache_mem_layout": layout,
            "hicache_io_backend": IO_BACKENDS[layout], "hicache_storage_backend": DOCUMENTED["hicache_storage_backend"],
            # Deterministic: what storage has is waited for.
            "hicache_storage_prefetch_policy": "wait_complete",
            "hicache_storage_backend_extra_config": json.dumps({**EXTRA, **extra}),
        }  # fmt: skip
    return {**chosen, **more}


def nursery(environment: Environment, log: Path) -> Nursery:
    """What engines are started from."""
    # Said before prometheus_client is imported, or its metrics would be of one process alone.
    shared = log.with_name("metrics")
    shared.mkdir()
    threads = str(len(CORES))
    variables = {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": threads, "PROMETHEUS_MULTIPROC_DIR": str(shared)}
    return Nursery(environment, _MODULE, log, [CPU], **variables)


def prompt(tokens: int, seed: int = 0) -> list[int]:
    """Token ids that look like nothing else."""
    return [(7 * place * place + 3 * place + 11 + seed) % 4000 + 4 for place in range(tokens)]


def connection(world: World) -> dict[str, Any]:
    """The part of the extra config that says where the cache is."""
    return {"connection": str(world.cluster.connection)}


def generate(engine: EngineProcess, number: int, tokens: int = PROMPT_TOKENS) -> dict[str, Any]:
    """The answer to a prompt's first ``tokens``; ``cached`` counts those whose KV was not computed."""
    answer: dict[str, Any] = engine.call("generate", prompts=[prompt(tokens, 97 * number)], tokens=TOKENS)[0]
    return answer


def from_storage(answer: dict[str, Any]) -> int:
    """Tokens whose KV came by the connector."""
    return int(answer["details"].get("storage", 0))


def stored(engine: EngineProcess, world: World, number: int, tokens: int = PROMPT_TOKENS) -> set[bytes]:
    """Generate, forget; the keys of the pages that came to be stored by that."""
    before = keys_in(world)
    generate(engine, number, tokens)
    engine.call("flush")
    return keys_in(world) - before


def keys_in(world: World) -> set[bytes]:
    """All keys of the cluster."""
    return {bytes.fromhex(entry["key"]) for entry in world.entries()}


def attach(engine: EngineProcess, **extra: Any) -> None:
    """Begin anew: nothing in the engine's own memory, a new client of the cache."""
    engine.call("flush")
    engine.call("attach", configuration=json.dumps({**EXTRA, **extra}))
