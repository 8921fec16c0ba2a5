"""One import of vLLM for all engines of these tests, and a cluster for each module."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.engines.support.engine_process import EngineProcess, Nursery
from tests.engines.support.environments import Environment
from tests.engines.support.patient import MANAGER
from tests.engines.support.vllm_runs import nursery
from tests.local.support.world import World, running


@pytest.fixture(scope="session")
def vllm_nursery(
    engine_environment: Callable[[str], Environment], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Nursery]:
    made = nursery(engine_environment("vllm"), tmp_path_factory.mktemp("vllm") / "nursery.log")
    yield made
    made.close()


@pytest.fixture(scope="module")
def vllm(vllm_nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """A process for engines, which are made by its ``open``."""
    with vllm_nursery.engine({}, tmp_path_factory.mktemp("vllm") / "engine.log") as started:
        yield started


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with running(1, "256MiB", "512MiB", patient=True, manager=MANAGER) as world:
        yield world
