"""The installed SGLang's interface is the one that the connector was written for; a difference is said in words."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.engines.support.environments import Environment
from tests.engines.support.interfaces import differences_in
from tests.engines.support.sglang_runs import CPU

pytestmark = pytest.mark.timeout(180)
MODULE = "tests.engines.support.sglang_interface"


def test_the_connector_fits_the_installed_interface(engine_environment: Callable[[str], Environment]) -> None:
    assert differences_in(engine_environment("sglang"), MODULE, (CPU,)).now == []


def test_a_change_of_the_engine_is_said_in_words(engine_environment: Callable[[str], Environment]) -> None:
    assert differences_in(engine_environment("sglang"), MODULE, (CPU,)).changed == [
        "batch_exists: the engine has (self, keys), the connector (self, keys, extra_info=None)",
        "get_stats: the engine does not call it any more",
    ]
