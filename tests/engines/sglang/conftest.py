"""Engines and a cluster for the tests in SGLang."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from polarkv_client.sync import SyncClient
from tests.engines.support import sglang_runs
from tests.engines.support.engine_process import EngineProcess, Nursery
from tests.engines.support.environments import Environment
from tests.engines.support.patient import MANAGER
from tests.engines.support.sglang_runs import PROMPTS, Start
from tests.local.support.world import World, running


@pytest.fixture(scope="session")
def nursery(
    engine_environment: Callable[[str], Environment], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Nursery]:
    found = sglang_runs.nursery(engine_environment("sglang"), tmp_path_factory.mktemp("sglang") / "nursery.log")
    yield found
    found.close()


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    with running(1, "128MiB", "256MiB", patient=True, manager=MANAGER) as world:
        yield world


@pytest.fixture(scope="session")
def client(world: World) -> Iterator[SyncClient]:
    with world.client() as client:
        yield client


@pytest.fixture(scope="session")
def right(nursery: Nursery, models: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """Return the tokens that follow each prompt, by an engine without a connector."""
    log = tmp_path_factory.mktemp("sglang") / "alone.log"
    with nursery.engine(sglang_runs.settings(models / "llama", None), log) as engine:
        return [sglang_runs.generate(engine, number)["tokens"] for number in range(PROMPTS)]


@pytest.fixture(scope="session")
def start(nursery: Nursery, models: Path, world: World, tmp_path_factory: pytest.TempPathFactory) -> Start:
    """Return a function that starts an engine with the connector, as a context. It fails where one had a defect."""

    @contextmanager
    def starting(
        layout: str = "page_first", variables: dict[str, str] | None = None, model: str = "llama", **more: Any
    ) -> Iterator[EngineProcess]:
        arguments = sglang_runs.settings(models / model, sglang_runs.connection(world), layout, **more)
        log = tmp_path_factory.mktemp("sglang") / f"{layout}.log"
        with nursery.engine(arguments, log, **(variables or {})) as engine:
            yield engine
        defects = [line for line in log.read_text(errors="replace").splitlines() if "became misses" in line]
        assert not defects, f"defects of the connector's own, which tokens do not show: {defects}; see {log}"

    return starting


@pytest.fixture(scope="module")
def engine(request: pytest.FixtureRequest, start: Start) -> Iterator[EngineProcess]:
    """Run an engine for the tests of a module; by parameter, with another layout of its host pool."""
    with start(getattr(request, "param", "page_first")) as process:
        yield process
