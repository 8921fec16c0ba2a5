"""What several unit tests run against: a scripted manager, and a slab server that has registered with it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from polarkv_dataplane.slab.server import SlabServer
from tests.support.cache_node import SECRET, registered_slab
from tests.support.fake_manager import FakeManager


@pytest.fixture
def manager() -> Iterator[FakeManager]:
    fake = FakeManager(SECRET)
    yield fake
    fake.close()


@pytest.fixture
def slab(manager: FakeManager, tmp_path: Path) -> Iterator[SlabServer]:
    with registered_slab(manager, tmp_path) as server:
        yield server
