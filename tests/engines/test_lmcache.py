"""The plug-in in LMCache, by LMCache's own conformance check."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from tests.engines.support.environments import Environment
from tests.engines.support.guides import block, command
from tests.engines.support.interfaces import differences_in
from tests.engines.support.patient import CLIENT, MANAGER
from tests.local.support.world import World, running

pytestmark = pytest.mark.timeout(180)
MODULE = "tests.engines.support.lmcache_interface"
# As the guide says, and what is the tests' own: less memory than by default, none of it a cache; a busy machine.
OWN = {"local_cpu": False, "max_local_cpu_size": 0.1}
PREFIX = "remote_storage_plugin.polarkv."


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with running(1, "32MiB", "64MiB", patient=True, manager=MANAGER) as world:
        yield world


@pytest.fixture
def check(engine_environment: Callable[[str], Environment], tmp_path: Path) -> Callable[..., str]:
    """Return a function: what LMCache's check prints, with settings of the plug-in beside the guide's."""
    environment = engine_environment("lmcache")
    line = command("lmcache", "lmcache.v1.basic_check")
    assert line.words[:2] == ["python", "-m"]

    def run(**settings: object) -> str:
        path = tmp_path / line.variables["LMCACHE_CONFIG_FILE"]
        configuration = {**yaml.safe_load(block("lmcache", "yaml")), **OWN}
        configuration["extra_config"] |= {f"{PREFIX}{name}": value for name, value in settings.items()}
        path.write_text(yaml.safe_dump(configuration))
        variables = environment.variables(LMCACHE_CONFIG_FILE=str(path), PYTHONHASHSEED="0")
        words = [str(environment.python), *line.words[1:]]
        done = subprocess.run(words, env=variables, capture_output=True, text=True, timeout=150, check=False)
        return done.stdout + done.stderr

    return run


def test_its_own_check_passes(check: Callable[..., str], world: World) -> None:
    other = {"two.module_path": MODULE, "two.namespace_tenant_salt": "other"}  # of a plug-in beside it
    printed = check(connection=str(world.cluster.connection), **CLIENT, **other)

    # What is not there is not found; what was put is found, and its bytes are right.
    assert re.findall(r"(\d+)/5\D* passed", printed) == ["5"] * 5, printed[-6000:]
    assert "content correct): 5/5" in printed
    assert len(list(world.entries())) == 5


def test_a_wrong_setting_is_named_in_the_log(check: Callable[..., str], world: World) -> None:
    printed = check(connection=str(world.cluster.connection), load_deadline=3)
    assert "load_deadline='…': there is no such setting; did you mean load_deadline_ms?" in printed


def test_the_plugin_fits_the_installed_interface(engine_environment: Callable[[str], Environment]) -> None:
    assert differences_in(engine_environment("lmcache"), MODULE).now == []


def test_a_change_of_lmcache_is_said_in_words(engine_environment: Callable[[str], Environment]) -> None:
    assert differences_in(engine_environment("lmcache"), MODULE).changed == [
        "get: the engine has (self, key, location), the connector (self, key)"
    ]
