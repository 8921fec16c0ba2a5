"""Runs in vLLM's environment: engines in this process, one after the other, driven by :mod:`engine_process`.

One import of vLLM, which takes most of the time, serves many engines. Everything of an engine is in this process, so
that tests can break what they want to see fail.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

from tests.engines.support import costs
from tests.engines.support.engine_process import serve_nursery
from tests.support.waiting import wait_until

RESET_S = 30.0


class Engine:
    """What tests ask for."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._llm: Any = None
        self._counts: dict[str, float] = {}
        self._orders: Counter[str] = Counter()
        self._undo: list[tuple[Any, str, Any]] = []
        self._count()
        if settings:
            self.open(**settings)

    def _count(self) -> None:
        """Keep everything that the connector counts, also what it has handed to the engine."""
        from polarkv_client.connectors.vllm.meter import Meter

        note = Meter.note

        def noted(meter: Meter, name: str, amount: float) -> None:
            self._counts[name] = self._counts.get(name, 0) + amount
            note(meter, name, amount)

        setattr(Meter, "note", noted)  # noqa: B010  (the other form is an error to mypy)

    def open(self, *, keep_patches: bool = False, ahead: bool = False, **settings: Any) -> float:
        """Make an engine in place of the former one; seconds.

        ``ahead``: it schedules a step while the one before is computed, as on a GPU. vLLM turns that off on a CPU.
        """
        from vllm import LLM

        undo, self._undo = (self._undo, []) if keep_patches else ([], self._undo)
        self.close()
        self._undo = undo
        began = time.monotonic()
        if ahead:
            self._schedule_ahead()
        base = {"enforce_eager": True, "dtype": "float32", "seed": 0, "disable_log_stats": False}
        self._llm = LLM(**{**base, **settings})
        return time.monotonic() - began

    def _schedule_ahead(self) -> None:
        from vllm.platforms.cpu import CpuPlatform

        adapt = CpuPlatform.check_and_update_config

        def adapted(config: Any) -> None:
            adapt(config)
            config.scheduler_config.async_scheduling = True

        self._patch(CpuPlatform, "check_and_update_config", staticmethod(adapted))

    def close(self) -> None:
        """Close the engine, if there is one."""
        self.mend()
        if self._llm is None:
            return
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        self._llm.llm_engine.engine_core.shutdown()
        self._llm = None
        gc.collect()
        cleanup_dist_env_and_memory()

    def generate(
        self, prompts: list[list[int]], tokens: int = 8, adapter: tuple[int, str] | None = None,
        in_place: bool = False, **more: Any,
    ) -> dict[str, Any]:  # fmt: skip
        """Greedy tokens of each prompt, how many of its tokens were cached, how it ended; times of all together."""
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        lora = LoRARequest(f"a{adapter[0]}", *adapter, load_inplace=in_place) if adapter else None
        parameters = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        inputs = [{"prompt_token_ids": prompt, **more} for prompt in prompts]
        began, cpu = time.monotonic(), time.process_time()
        outputs = self._llm.generate(inputs, parameters, use_tqdm=False, lora_request=lora)
        seconds, cpu_seconds = time.monotonic() - began, time.process_time() - cpu
        return {
            "tokens": [list(each.outputs[0].token_ids) for each in outputs],
            "cached": [each.num_cached_tokens for each in outputs],
            "ended": [each.outputs[0].finish_reason for each in outputs],
            "seconds": seconds, "cpu_seconds": cpu_seconds,
        }  # fmt: skip

    def replace_weights(self) -> None:
        """Other weights in place of those that were read, in the way that vLLM has for it."""

        def scale(model: Any) -> None:
            for name, each in model.named_parameters():
                if "layers" in name:
                    each.data.mul_(1.5)

        self.reset()
        core = self._core()
        core.pause_scheduler("abort", clear_cache=True)
        self._llm.apply_model(scale)
        core.resume_scheduler()

    def abort_while_loading(self, prompt: list[int]) -> None:
        """End a request that waits for another connector's load."""
        from vllm import SamplingParams

        from tests.engines.support import vllm_endless

        engine = self._llm.llm_engine
        engine.add_request(vllm_endless.PREFIX, {"prompt_token_ids": prompt}, SamplingParams(max_tokens=8))
        wait_until(lambda: engine.step() is not None and vllm_endless.waiting, "the load to begin", RESET_S)
        engine.abort_request([vllm_endless.PREFIX])
        assert not vllm_endless.waiting

    def reset(self) -> None:
        """Forget the engine's own prefix cache, once its blocks are not held for stores any more."""
        wait_until(self._reset, "the connector's stores to end", RESET_S)

    def _reset(self) -> bool:
        core = self._core()
        if core is not None and core.scheduler.has_requests():
            core.step_fn()  # an engine in this process only steps while it is used
            return False
        return bool(self._llm.reset_prefix_cache())

    def _core(self) -> Any:
        return getattr(self._llm.llm_engine.engine_core, "engine_core", None)

    def keys(self, prompt: list[int], rank: int = 0) -> list[str]:
        """Keys of a prompt's chunks, of one rank, in hex."""
        from polarkv_client.keys import chunk_keys

        half = self._core().scheduler.get_kv_connector()._scheduler
        return [key.hex() for key in chunk_keys(half._identities[rank].namespace, prompt)]

    def interface(self, changed: bool) -> list[str]:
        """How the connector differs from the engine's interface; ``changed``: after a change has been planted."""
        from tests.engines.support.vllm_interface import change_the_engine, interface

        if changed:
            change_the_engine()
        return interface()

    def counts(self) -> dict[str, float]:
        """What the connector has counted since the last call."""
        counts, self._counts = self._counts, {}
        return counts

    def profile(self, prompts: list[list[int]]) -> dict[str, Any]:
        """The connector's own CPU seconds for each of these prompts: in the engine's calls, and on its own threads.

        Beside them the engine's (the median prompt's), and the tokens.
        """
        from polarkv_client.connectors.vllm.connector import PolarKVConnector

        spent = {"calls": 0.0, "made": 0}
        half = self._core().scheduler.get_kv_connector()
        connector = PolarKVConnector if half is None else type(half)
        for name, method in list(vars(PolarKVConnector).items()):
            if callable(method) and not name.startswith("_"):
                self._patch(connector, name, costs.timed(getattr(connector, name), spent))
        before = costs.own_threads()
        answers = [self.generate([one]) for one in prompts]
        self.mend()
        self.reset()  # what is still being stored belongs to these prompts
        threads = sum(seconds - before.get(thread, 0.0) for thread, seconds in costs.own_threads().items())
        found = {name: each / len(prompts) for name, each in {**spent, "threads": threads}.items()}
        return {
            **found, "cached_tokens": sum(answer["cached"][0] for answer in answers) / len(prompts),
            "engine": statistics.median(answer["cpu_seconds"] for answer in answers),
            "tokens": [answer["tokens"][0] for answer in answers],
        }  # fmt: skip

    def preemptions(self) -> int:
        """Requests that the engine has preempted since it was made."""
        return sum(int(each.value) for each in self._llm.get_metrics() if each.name == "vllm:num_preemptions")

    def metrics(self) -> dict[str, float]:
        """The engine's own metrics, those of the connector among them; of histograms their number of samples."""
        found: dict[str, float] = {}
        for each in self._llm.get_metrics():
            labels = ",".join(f"{key}={value}" for key, value in sorted(each.labels.items()) if key in _LABELS)
            name = f"{each.name}{{{labels}}}" if labels else each.name
            found[name] = found.get(name, 0) + (getattr(each, "value", 0) or getattr(each, "count", 0))
        return found

    def _patch(self, where: Any, name: str, value: Any) -> None:
        self._undo.append((where, name, getattr(where, name)))
        setattr(where, name, value)

    def mend(self) -> None:
        """Undo what the methods below have done."""
        while self._undo:
            setattr(*self._undo.pop())

    def fail_loads(self, every: int) -> None:
        """Of all loads, let every n-th chunk fail, as if a cache node had died."""
        from dataclasses import replace

        from polarkv_client.client import Operations
        from polarkv_client.results import ChunkLoad, Reason

        load, seen = Operations.load, Counter[str]()

        def failing(*args: Any, **kwargs: Any) -> Any:
            result = load(*args, **kwargs)
            chunks = list(result.chunks)
            for place in range(len(chunks)):
                seen["chunks"] += 1
                if seen["chunks"] % every == 0:
                    chunks[place] = ChunkLoad(False, reason=Reason.UNAVAILABLE)
            return replace(result, chunks=chunks)

        self._patch(Operations, "load", failing)

    def skip_verification(self) -> None:
        """Take whatever bytes come for the right ones."""
        from polarkv_client.transport import shm, tcp

        for transport in (shm, tcp):
            self._patch(transport, "verify", lambda *_: None)

    def break_planning(self, name: str) -> None:
        """Let a method of the scheduler's half raise."""
        from polarkv_client.connectors.vllm.scheduler import SchedulerSide

        def broken(*_: Any, **__: Any) -> Any:
            raise RuntimeError("planted")

        self._patch(SchedulerSide, name, broken)

    def stage(self) -> None:
        """From the next engine on, move chunks as for a GPU: through staging memory, with the twin of a device."""
        from polarkv_client.connectors.vllm import connector
        from polarkv_client.connectors.vllm.copies import CpuDevice, Staged

        seen, orders = threading.local(), self._orders

        class Watched(CpuDevice):
            """Says in which order it is used, for each run of copies."""

            def after_engine(self) -> Any:
                return "mark"

            @contextlib.contextmanager
            def stream(self) -> Iterator[None]:
                seen.order = ["stream"]
                yield
                orders[" ".join(seen.order)] += 1

            def wait_for(self, mark: Any) -> None:
                seen.order.append(f"wait for {mark}")

            def finish(self) -> None:
                seen.order.append("finish")

        def staged(pages: Any, blocks_per_chunk: int, local_cache_bytes: int) -> Staged:
            return Staged(pages, blocks_per_chunk, local_cache_bytes, Watched())

        self._patch(connector, "choose", staged)

    def staged_orders(self) -> dict[str, int]:
        """How often the twin was used in which order."""
        return dict(self._orders)


_LABELS = ("tier", "outcome", "direction", "source")

if __name__ == "__main__":
    # Once, for all engines that are forked from here: what an engine uses takes most of its start.
    import vllm.entrypoints.llm
    import vllm.v1.engine.core
    import vllm.v1.executor.multiproc_executor
    import vllm.v1.worker.cpu_worker  # noqa: F401

    serve_nursery(Engine)
