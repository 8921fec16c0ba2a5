"""A real slab server for each module and a transport of each kind to it; a metadata store of each kind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.peers import KINDS, Bench, make
from tests.support.slab_process import SlabProcess, start_slab


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine makes no answer late; tests of late ones say how long they wait."""
    monkeypatch.setenv("POLARKV_CONNECT_TIMEOUT_MS", "10000")
    monkeypatch.setenv("POLARKV_MANAGER_TIMEOUT_MS", "10000")


@pytest.fixture(scope="module")
def slab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlabProcess]:
    """A slab server that the tests of a module share; none of them may harm it."""
    server = start_slab(tmp_path_factory.mktemp("slab"), memory_bytes=128 << 20)
    yield server
    server.close()


@pytest.fixture
def own_slab(tmp_path: Path) -> Iterator[SlabProcess]:
    """A slab server that a test may kill."""
    server = start_slab(tmp_path, memory_bytes=64 << 20)
    yield server
    server.close()


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """The transport under test."""
    return str(request.param)


@pytest.fixture
def bench(slab: SlabProcess, kind: str) -> Iterator[Bench]:
    """The shared slab server and a transport of this kind."""
    made = Bench(slab, make(kind, slab.info))
    yield made
    made.transport.close()


@pytest.fixture
def own_bench(own_slab: SlabProcess, kind: str) -> Iterator[Bench]:
    """A slab server of one's own and a transport of this kind."""
    made = Bench(own_slab, make(kind, own_slab.info))
    yield made
    made.transport.close()


@pytest.fixture(
    params=[
        "sqlite",
        pytest.param("postgres", marks=pytest.mark.postgres),
        pytest.param("mariadb", marks=pytest.mark.mariadb),
    ]
)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A metadata store of each kind, empty."""
    if request.param == "sqlite":
        return f"sqlite://{tmp_path}/metadata.db"
    return str(request.getfixturevalue(f"{request.param}_url"))
