"""The installed vLLM's interface is the one that the connector was written for; a difference is said in words."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable

import pytest

from tests.engines.support.environments import Environment
from tests.engines.support.vllm_runs import ROOT

pytestmark = pytest.mark.timeout(180)


def found(environment: Environment, *arguments: str) -> list[str]:
    ran = subprocess.run(
        [environment.python, "-m", "tests.engines.support.vllm_interface", *arguments],
        env=environment.variables(ROOT), capture_output=True, text=True, timeout=150, check=False,
    )  # fmt: skip
    lines = [line for line in ran.stdout.splitlines() if line.startswith("INTERFACE ")]
    assert lines, ran.stderr[-4000:]
    differences: list[str] = json.loads(lines[-1].removeprefix("INTERFACE "))
    return differences


def test_the_connector_fits_the_installed_interface(engine_environment: Callable[[str], Environment]) -> None:
    assert found(engine_environment("vllm")) == []


def test_a_change_of_the_engine_is_said_in_words(engine_environment: Callable[[str], Environment]) -> None:
    assert found(engine_environment("vllm"), "change it") == [
        "request_finished: the engine has (self, request, block_ids, reason), the connector (self, request, block_ids)",
        "shutdown: the engine does not call it any more",
    ]
