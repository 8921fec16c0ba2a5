"""The conformance suite of the transports, over RDMA by each binding: the same tests as for TCP and shared memory."""

from __future__ import annotations

import inspect
from types import ModuleType

import pytest

from tests.contract import test_transport_faults, test_transports
from tests.contract.conftest import bench, own_bench, own_slab, slab

__all__ = ["bench", "own_bench", "own_slab", "slab"]


@pytest.fixture(params=["rdma-ibverbs", "rdma-pyverbs"])
def kind(request: pytest.FixtureRequest) -> str:
    """The transport under test."""
    return str(request.param)


_FIXTURES = {"bench", "kind", "own_bench"}


def over_all_kinds(module: ModuleType) -> dict[str, object]:
    """Its tests that ask for a transport of every kind."""
    found = {}
    for name, value in vars(module).items():
        if not name.startswith("test_") or not _FIXTURES & set(inspect.signature(value).parameters):
            continue
        marks = getattr(value, "pytestmark", [])
        if not any(mark.name == "parametrize" and "kind" in str(mark.args[0]) for mark in marks):
            found[name] = value
    return found


globals().update(over_all_kinds(test_transports))
globals().update(over_all_kinds(test_transport_faults))
