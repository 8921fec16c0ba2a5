"""What `polarkv calibrate` makes of an engine and of a cluster."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from polarkv_client.cli.main import run
from polarkv_client.errors import ConfigurationError, PolarKVError, Unavailable
from polarkv_dataplane.planner.measuring import Prefill, measure_prefill
from tests.support.slab_process import start_slab
from tests.support.small_manager import SmallManager

URL = "http://engine"


class Engine:
    """Answers as an engine does; computing takes virtual time: 0.5 s for any prompt, and 1 ms a token."""

    def __init__(self, per_token_s: float = 0.001) -> None:
        self.now = 0.0
        self.per_token_s = per_token_s
        self.prompts: list[list[int]] = []
        self.status = 200

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "the-model"}]})
        body = json.loads(request.content)
        assert (body["model"], body["max_tokens"]) == ("the-model", 1)
        self.prompts.append(body["prompt"])
        self.now += 0.5 + self.per_token_s * len(body["prompt"])
        return httpx.Response(self.status, json={}, text=None)


def measured(engine: Engine, lengths: tuple[int, int] = (100, 900)) -> Prefill:
    with httpx.Client(transport=httpx.MockTransport(engine)) as http:
        return measure_prefill(URL, "", lengths, 3, http=http, clock=lambda: engine.now, seed=1)


def test_the_rate_is_free_of_overhead() -> None:
    engine = Engine()
    found = measured(engine)
    assert found.tokens_per_s == pytest.approx(1000)
    assert found.overhead_s == pytest.approx(0.5)
    assert [len(prompt) for prompt in engine.prompts] == [100, 100, 900, 100, 900, 100, 900]
    assert len({tuple(prompt) for prompt in engine.prompts}) == 7  # no prompt is in anybody's cache


def test_an_engine_that_shows_no_difference_is_not_believed() -> None:
    with pytest.raises(PolarKVError, match="took no longer"):
        measured(Engine(per_token_s=0))


@pytest.mark.parametrize("lengths", [(5, 5), (0, 5)])
def test_two_lengths_are_needed(lengths: tuple[int, int]) -> None:
    with pytest.raises(ConfigurationError, match="two different lengths"):
        measured(Engine(), lengths)


def test_an_engine_that_refuses_is_quoted() -> None:
    engine = Engine()
    engine.status = 400
    with pytest.raises(PolarKVError, match=r"refused \(400\)"):
        measured(engine)


def test_no_engine_is_unavailable() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    with httpx.Client(transport=httpx.MockTransport(refuse)) as http, pytest.raises(Unavailable, match="engine"):
        measure_prefill(URL, "m", (1, 2), 1, http=http)


@pytest.fixture(scope="module")
def connection(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("calibrate")
    slab = start_slab(folder)
    manager = SmallManager([slab.node()])
    path = folder / "connection.json"
    path.write_text(json.dumps({"endpoint": manager.endpoint, "token": ""}))
    yield path
    manager.close()
    slab.close()


def calibrate(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = run(["calibrate", "--json", *arguments])
    return code, json.loads(capsys.readouterr().out)


def test_a_cluster_is_measured_and_written(
    connection: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "c.json"
    small = ["--chunk", "4KiB", "--batch", "4", "--rounds", "2", "--connection", str(connection)]
    code, found = calibrate(capsys, *small, "--prefill", "1234.5", "--output", str(path))
    assert code == 0
    assert found["prefill_tokens_per_s"] == 1234.5
    assert found["store_bytes_per_s"] > 0
    assert found["memory_bytes_per_s"] > 0
    assert "no admin token" in found["disk_not_measured_because"]
    written = json.loads(path.read_text())
    assert written["memory_bytes_per_s"] == found["memory_bytes_per_s"]


def test_a_known_prefill_alone_needs_no_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = calibrate(capsys, "--no-transfers", "--prefill", "10")
    assert (code, found["prefill_tokens_per_s"], found["store_bytes_per_s"]) == (0, 10, 0)


def test_an_engine_that_answers_no_json_is_told_so() -> None:
    def page(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, text="<html>")

    with httpx.Client(transport=httpx.MockTransport(page)) as http, pytest.raises(PolarKVError, match="--engine-model"):
        measure_prefill(URL, "", (1, 2), 1, http=http)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--prefill", "1", "--engine", URL], "--prefill"),
        (["--engine", URL, "--prompt-tokens", "many"], "--prompt-tokens"),
        (["--engine", URL, "--prompt-tokens", "5,5"], "--prompt-tokens"),
        (["--engine", URL, "--prompt-tokens", "5"], "--prompt-tokens"),
        (["--engine", "engine:8000"], "--engine"),
        (["--engine", "ftp://engine"], "--engine"),
        (["--engine", "http://[::1"], "--engine"),
        (["--prompt-tokens", "5,6"], "--prompt-tokens"),
        ([], "--no-transfers"),
        (["--prefill", "1", "--batch", "4"], "--batch"),
        (["--prefill", "1", "--output", "/proc/none/c.json"], "--output"),
        (["--prefill", "1", "--output", "/"], "--output"),
    ],
)
def test_wrong_usage_is_refused(capsys: pytest.CaptureFixture[str], arguments: list[str], named: str) -> None:
    code, found = calibrate(capsys, "--no-transfers", *arguments)
    assert (code, found["error"]["kind"], found["error"]["field"]) == (2, "ConfigurationError", named)
