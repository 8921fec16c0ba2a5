"""What several unit tests run against: a scripted manager, and a slab server that has registered with it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from polarkv_dataplane.slab.server import SlabServer
from tests.support.cache_node import SECRET, slab_server
from tests.support.fake_manager import FakeManager
from tests.support.waiting import wait_until


@pytest.fixture
def manager() -> Iterator[FakeManager]:
    fake = FakeManager(SECRET)
    yield fake
    fake.close()


@pytest.fixture
def slab(manager: FakeManager, tmp_path: Path) -> Iterator[SlabServer]:
    with slab_server(manager, tmp_path) as server:
        wait_until(lambda: server.counters.snapshot().get("polarkv_slab_registrations_total"), "the registration")
        yield server
