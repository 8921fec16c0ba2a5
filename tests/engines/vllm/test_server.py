"""vLLM's OpenAI server, told of the cache as an injected pod is, and as the docs say: a new process answers sooner."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from polarkv_client.config import load_config
from polarkv_operator.resources.engine_arguments import Engine, arguments
from tests.engines.support.environments import Environment
from tests.engines.support.guides import command
from tests.engines.support.patient import MANAGER
from tests.engines.support.vllm_runs import ROOT
from tests.local.support.world import World, running
from tests.support.ports import reserved_ports
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(600)
START_S = 240.0
PROMPTS = [" ".join(f"w{(7 * place * place + 3 * place + seed) % 4000}" for place in range(3000)) for seed in (0, 1)]
WARM_UP = " ".join(f"w{place}" for place in range(40))
CHUNK = 128  # the engine's block: as little as possible is left to compute


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with running(1, "512MiB", "512MiB", patient=True, manager=MANAGER) as world:
        yield world


def as_injected(world: World) -> tuple[dict[str, str], list[str]]:
    """Variables and arguments as the webhook adds them."""
    known = load_config(world.cluster.connection)
    variables = {"POLARKV_ENDPOINT": known.endpoint, "POLARKV_TOKEN": known.token.get_secret_value()}
    return variables, list(arguments(Engine.VLLM, CHUNK))


def as_documented(world: World) -> tuple[dict[str, str], list[str]]:
    """Variables and arguments of the line in docs/engines/vllm.md, with this cluster's folder."""
    line = command("vllm", "vllm")
    assert line.words[:3] == ["vllm", "serve", "MODEL"]
    assert line.variables == {"POLARKV_CONNECTION": ".polarkv"}
    folder = str(world.cluster.connection.parent)
    return {"POLARKV_CONNECTION": folder, "POLARKV_CHUNK_TOKENS": str(CHUNK)}, line.words[3:]


class Server(NamedTuple):
    """One that is starting, or has started."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path

    def wait(self) -> None:
        """Wait until it serves, and have it do its first work."""
        wait_until(self._serves, "the server", START_S, 0.2)
        ask(self.url, WARM_UP)

    def _serves(self) -> bool:
        assert self.process.poll() is None, self.log.read_text(errors="replace")[-6000:]
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{self.url}/health", timeout=5).is_success
        return False


@contextlib.contextmanager
def server(
    environment: Environment, model: Path, told: tuple[dict[str, str], list[str]], log: Path, port: int
) -> Iterator[Server]:
    """A server in a process of its own, that has begun to start."""
    variables = environment.variables(
        ROOT, **told[0], VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="0-1",
        VLLM_RPC_BASE_PATH=str(log.parent),
        POLARKV_LOOKUP_DEADLINE_MS="5000", POLARKV_MANAGER_TIMEOUT_MS="5000", POLARKV_CONNECT_TIMEOUT_MS="5000",
    )  # fmt: skip
    command = [
        str(environment.python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(port),
        "--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager", "--max-model-len", "4096",
        "--block-size", "128", "--served-model-name", "m", *told[1],
    ]  # fmt: skip
    with log.open("wb") as output:
        started = subprocess.Popen(command, env=variables, stdout=output, stderr=output, start_new_session=True)
    try:
        yield Server(started, f"http://127.0.0.1:{port}", log)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)
        started.wait(30)


def ask(url: str, prompt: str) -> tuple[float, str]:
    """Seconds to the first token, and the text."""
    body = {"model": "m", "prompt": prompt, "max_tokens": 8, "temperature": 0, "stream": True, "ignore_eos": True}
    began, first, text = time.monotonic(), 0.0, ""
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                first = first or time.monotonic() - began
                text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
    assert text
    return first, text


def metrics(url: str) -> dict[str, float]:
    """Sums by name and what tells them apart."""
    found: dict[str, float] = {}
    for line in httpx.get(f"{url}/metrics").text.splitlines():
        if line.startswith("vllm:"):
            name, _, value = line.rpartition(" ")
            found[name] = float(value)
    return found


def of(found: dict[str, float], name: str, *labels: str) -> float:
    return sum(value for key, value in found.items() if key.startswith(name) and all(label in key for label in labels))


def test_a_new_server_answers_sooner_with_the_same_text(
    engine_environment: Callable[[str], Environment], models: Path, world: World,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:  # fmt: skip
    environment, model = engine_environment("vllm"), models / "llama-100m"
    folder = tmp_path_factory.mktemp("server")  # a short name: it has sockets in it
    with (
        reserved_ports(2) as (one_port, other_port),
        # They start side by side: neither has anything of the other's but by the cache.
        server(environment, model, as_injected(world), folder / "cold.log", one_port) as before,
        server(environment, model, as_documented(world), folder / "warm.log", other_port) as fresh,
    ):
        before.wait()
        fresh.wait()
        cold = [ask(before.url, one) for one in PROMPTS]
        chunks = len(PROMPTS) * (3000 // CHUNK)
        wait_until(lambda: of(metrics(before.url), "vllm:polarkv_store_chunks_total", "stored") >= chunks, "the stores")
        warm = [ask(fresh.url, one) for one in PROMPTS]
        found: dict[str, Any] = metrics(fresh.url)
    cold_s, warm_s = (statistics.median(seconds for seconds, _ in each) for each in (cold, warm))
    print(f"first token: cold {cold_s:.2f} s, with the cache {warm_s:.2f} s, {warm_s / cold_s:.3f} of it")
    parts = {name: of(found, f"vllm:polarkv_{name}_seconds_sum") for name in ("lookup", "load")}
    print("of which:", parts, "computing:", of(found, "vllm:request_prefill_time_seconds_sum"))
    assert [text for _, text in warm] == [text for _, text in cold]
    assert warm_s <= 0.15 * cold_s
    loaded = chunks * CHUNK
    assert of(found, "vllm:external_prefix_cache_hits_total") == loaded
    assert of(found, "vllm:prompt_tokens_by_source_total", "external_kv_transfer") == loaded
    assert of(found, "vllm:polarkv_hit_tokens_total", 'tier="memory"') == loaded
    assert of(found, "vllm:polarkv_load_chunks_total", 'outcome="memory"') == chunks
    assert of(found, "vllm:polarkv_load_seconds_count") == len(PROMPTS)
    assert of(found, "vllm:polarkv_defects_total") == 0
