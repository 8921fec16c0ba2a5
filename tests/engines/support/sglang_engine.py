"""Runs in SGLang's environment: one engine, driven by :mod:`engine_process`."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import sglang
import sglang.srt.entrypoints.engine
import sglang.srt.managers.detokenizer_manager
import sglang.srt.managers.scheduler
from prometheus_client import CollectorRegistry, generate_latest, multiprocess

from tests.engines.support.engine_process import serve_nursery
from tests.support.waiting import wait_until

FLUSH_S = 30.0


class Engine:
    """What tests ask for."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._engine = sglang.Engine(**settings)

    def generate(self, prompts: list[list[int]], tokens: int, adapter: str | None = None) -> list[dict[str, Any]]:
        """Greedy tokens of each prompt, and how many of it came from where."""
        parameters = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        adapters = [adapter] * len(prompts) if adapter else None
        answers = self._engine.generate(input_ids=prompts, sampling_params=parameters, lora_path=adapters)
        return [
            {
                "tokens": answer["output_ids"],
                "cached": answer["meta_info"].get("cached_tokens", 0),
                "details": answer["meta_info"].get("cached_tokens_details") or {},
            }
            for answer in answers
        ]

    def flush(self) -> float:
        """Forget what is in device and host memory; seconds until nothing was in flight any more."""
        began = time.monotonic()
        wait_until(lambda: self._engine.flush_cache().success, "nothing to be in flight", FLUSH_S, 0.05)
        return time.monotonic() - began

    def attach(self, configuration: str) -> None:
        """Take a storage backend (its extra config, JSON) in the place of the present one, while nothing is running."""
        manager = self._engine.tokenizer_manager
        for change in (manager.detach_hicache_storage, partial(manager.attach_hicache_storage, "dynamic")):
            named = {"hicache_storage_backend_extra_config_json": configuration} if isinstance(change, partial) else {}
            answer = self._engine.loop.run_until_complete(change(**named))
            if not answer.success:
                raise RuntimeError(answer.message)

    def replace_weights(self, model: str) -> None:
        """Take another model's weights, as a server does that goes on running."""
        success, message, _ = self._engine.update_weights_from_disk(model)
        if not success:
            raise RuntimeError(message)

    def metrics(self) -> str:
        """What the server's ``/metrics`` shows: the metrics of all of the engine's processes."""
        registry = CollectorRegistry()
        multiprocess.MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        return generate_latest(registry).decode()

    def close(self) -> None:
        """End the engine and its processes."""
        self._engine.shutdown()


if __name__ == "__main__":
    serve_nursery(Engine)
