"""The engines' environments and the models, for every test here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

from tests.engines.support import environments
from tests.engines.support.environments import Environment


class OneEngineACore(LoadScopeScheduling):  # type: ignore[misc]  # xdist's class has no types
    """Under xdist, what shares an engine runs in one worker: a file of vLLM's tests, all of SGLang's."""

    def _split_scope(self, nodeid: str) -> str:
        file = Path(nodeid.partition("::")[0])
        return str(file.parent if file.parent.name == "sglang" else file)


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> OneEngineACore:
    return OneEngineACore(config, log)


@pytest.fixture(scope="session")
def engine_environment() -> Callable[[str], Environment]:
    """Return a function: an engine's environment by its name; the test is skipped where that is not built."""

    def find(name: str) -> Environment:
        environment = Environment(name)
        if not environment.is_built:
            pytest.skip(f"the environment of {name} is not in the cache: `make test-engines` builds it")
        return environment

    return find


@pytest.fixture(scope="session")
def models(engine_environment: Callable[[str], Environment]) -> Path:
    """Return the folder that holds the models."""
    return environments.models(engine_environment("vllm"))
