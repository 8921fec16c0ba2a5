"""The installed vLLM's interface is the one that the connector was written for; a difference is said in words."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.engines.support.environments import Environment
from tests.engines.support.interfaces import differences_in

pytestmark = pytest.mark.timeout(180)
MODULE = "tests.engines.support.vllm_interface"


def test_the_connector_fits_the_installed_interface(engine_environment: Callable[[str], Environment]) -> None:
    assert differences_in(engine_environment("vllm"), MODULE) == []


def test_a_change_of_the_engine_is_said_in_words(engine_environment: Callable[[str], Environment]) -> None:
    assert differences_in(engine_environment("vllm"), MODULE, "change it") == [
        "request_finished: the engine has (self, request, block_ids, reason), the connector (self, request, block_ids)",
        "shutdown: the engine does not call it any more",
    ]
