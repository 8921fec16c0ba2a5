"""The engines' environments and the models, for every test here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engines.support import environments
from tests.engines.support.environments import Environment

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)  # before xdist looks at the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Under xdist, what shares an engine's process runs in one worker, one engine a core."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.xdist_group(item.path.relative_to(HERE).parts[0]))


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
