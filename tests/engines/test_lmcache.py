"""The plug-in in LMCache, by LMCache's own conformance check."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.engines.support.environments import Environment
from tests.engines.support.interfaces import differences_in
from tests.local.support.world import World, running

pytestmark = pytest.mark.timeout(180)
MODULE = "tests.engines.support.lmcache_interface"
CONFIGURATION = """
chunk_size: 256
local_cpu: false
max_local_cpu_size: 0.1
remote_url: "plugin://polarkv"
remote_storage_plugins: ["polarkv"]
remote_serde: "naive"
extra_config:
  remote_storage_plugin.polarkv.module_path: polarkv_client.connectors.lmcache
  remote_storage_plugin.polarkv.class_name: PolarKVAdapter
  remote_storage_plugin.polarkv.patience: 0
  remote_storage_plugin.polarkv.{setting}
"""


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with running(1, "32MiB", "64MiB") as world:
        yield world


@pytest.fixture
def check(engine_environment: Callable[[str], Environment], tmp_path: Path) -> Callable[[str], str]:
    """Return a function: what LMCache's check prints, with one setting of the plug-in."""
    environment = engine_environment("lmcache")

    def run(setting: str) -> str:
        path = tmp_path / "lmcache.yaml"
        path.write_text(CONFIGURATION.format(setting=setting))
        command = [str(environment.python), "-m", "lmcache.v1.basic_check", "--mode", "test_remote", "--model", "model"]
        variables = environment.variables(LMCACHE_CONFIG_FILE=str(path), PYTHONHASHSEED="0")
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=150, check=False)
        return done.stdout + done.stderr

    return run


def test_its_own_check_passes(check: Callable[[str], str], world: World) -> None:
    printed = check(f"connection: {world.cluster.connection}")

    # What is not there is not found; what was put is found, and its bytes are right.
    assert re.findall(r"(\d+)/5\D* passed", printed) == ["5"] * 5, printed[-6000:]
    assert "content correct): 5/5" in printed
    assert len(list(world.entries())) == 5


def test_a_wrong_setting_is_named_in_the_log(check: Callable[[str], str]) -> None:
    printed = check("load_deadline: 3")
    assert "load_deadline='…': there is no such setting; did you mean load_deadline_ms?" in printed


def test_the_plugin_fits_the_installed_interface(engine_environment: Callable[[str], Environment]) -> None:
    assert differences_in(engine_environment("lmcache"), MODULE).now == []


def test_a_change_of_lmcache_is_said_in_words(engine_environment: Callable[[str], Environment]) -> None:
    assert differences_in(engine_environment("lmcache"), MODULE).changed == [
        "get: the engine has (self, key, location), the connector (self, key)"
    ]
