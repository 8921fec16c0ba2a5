"""One inference process of the demo: load the model, warm up, serve one prompt through the cache, report as JSON.

Each run is a process of its own, so that nothing but the cache can carry KV from one to the next.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

from demo.engine import Engine, ModelChoice
from demo.run import GENERATED_TOKENS, Run
from polarkv_client.states import Tier
from polarkv_client.sync import SyncClient

_T = TypeVar("_T")


def main() -> None:
    """Serve one prompt as the command line says and print the :class:`Run`."""
    options = _parse()
    began = time.perf_counter()
    choice = ModelChoice(options.model, options.layers, options.hidden)
    engine = Engine(choice, options.tokens + GENERATED_TOKENS, options.chunk_tokens)
    prompt = engine.prompt(options.tokens)
    cacheable = (options.tokens - 1) // options.chunk_tokens * options.chunk_tokens
    run = Run(engine.name, engine.parameters, engine.bytes_per_token, options.tokens, cacheable)
    with SyncClient.connect(options.connection) as client:
        run.ready_s = time.perf_counter() - began
        _serve(engine, client, options.salt, prompt, run)
    run.text = engine.text(run.generated)
    if run.loaded_tokens:
        engine.zero(run.loaded_tokens)
        engine.adopt(run.loaded_tokens)
        run.zeroed = engine.decode(engine.prefill(prompt), GENERATED_TOKENS)
    json.dump(asdict(run), sys.stdout)


def _serve(engine: Engine, client: SyncClient, salt: str, prompt: list[int], run: Run) -> None:
    """Load what the cache has, compute the rest, store what it had not."""
    namespace = engine.namespace(salt)
    arrived = time.perf_counter()
    buffers = engine.chunk_buffers(run.cacheable_tokens)
    loaded, run.lookup_s = _timed(lambda: client.load_kv(namespace, prompt[: run.cacheable_tokens], buffers))
    engine.adopt(loaded.tokens_loaded)
    first, run.compute_s = _timed(lambda: engine.prefill(prompt))
    run.ttft_s = time.perf_counter() - arrived

    run.loaded_tokens = loaded.tokens_loaded
    run.loaded_bytes = loaded.tokens_loaded * engine.bytes_per_token
    chunks = loaded.chunks[: loaded.tokens_loaded // engine.chunk_tokens]
    run.chunks_by_tier = dict(Counter(Tier(chunk.tier).name.lower() for chunk in chunks))
    if run.loaded_tokens < run.cacheable_tokens:
        stored, run.store_s = _timed(lambda: client.store_kv(namespace, prompt[: run.cacheable_tokens], buffers))
        run.stored_chunks = stored.stored
        run.stored_bytes = run.stored_chunks * engine.chunk_tokens * engine.bytes_per_token
    run.generated = engine.decode(first, GENERATED_TOKENS)


def _timed(call: Callable[[], _T]) -> tuple[_T, float]:
    began = time.perf_counter()
    result = call()
    return result, time.perf_counter() - began


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--connection", type=Path, required=True)
    parser.add_argument("--salt", required=True)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--hidden", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--chunk-tokens", type=int, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    main()
