"""Runs in SGLang's environment: one engine, driven by :mod:`engine_process`."""

from __future__ import annotations

import time
from typing import Any

from tests.engines.support.engine_process import serve
from tests.support.waiting import wait_until

FLUSH_S = 30.0


class Engine:
    """What tests ask for."""

    def __init__(self, settings: dict[str, Any]) -> None:
        import sglang

        self._engine = sglang.Engine(**settings)

    def generate(self, prompts: list[list[int]], tokens: int) -> list[dict[str, Any]]:
        """Greedy tokens of each prompt, and how many of it came from where."""
        parameters = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        answers = self._engine.generate(input_ids=prompts, sampling_params=parameters)
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

    def server_info(self) -> dict[str, Any]:
        """What the engine says of itself, as far as it is JSON."""
        info = self._engine.get_server_info()
        return {name: value for name, value in info.items() if isinstance(value, str | int | float | bool | None)}

    def close(self) -> None:
        """End the engine and its processes."""
        self._engine.shutdown()


if __name__ == "__main__":
    serve(Engine)
