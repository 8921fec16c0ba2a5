"""The installed vLLM's interface is the one that the connector was written for; a difference is said in words."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.support.engine_process import Nursery

pytestmark = pytest.mark.timeout(180)


def found(nursery: Nursery, log: Path, *, changed: bool = False) -> list[str]:
    with nursery.engine({}, log) as engine:
        differences: list[str] = engine.call("interface", changed=changed)
    return differences


def test_the_connector_fits_the_installed_interface(vllm_nursery: Nursery, tmp_path: Path) -> None:
    assert found(vllm_nursery, tmp_path / "engine.log") == []


def test_a_change_of_the_engine_is_said_in_words(vllm_nursery: Nursery, tmp_path: Path) -> None:
    assert found(vllm_nursery, tmp_path / "engine.log", changed=True) == [
        "request_finished: the engine has (self, request, block_ids, reason), the connector (self, request, block_ids)",
        "shutdown: the engine does not call it any more",
    ]
