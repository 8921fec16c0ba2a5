"""The client skips loads that would take longer than computing, by request, and shows it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from polarkv_client.calibration import Calibration
from polarkv_client.connectors.guard import attach
from polarkv_client.connectors.keyed import Keyed, Match
from polarkv_client.connectors.settings import load_connector_config
from polarkv_client.gate import PROBE_EVERY
from polarkv_client.keys import Namespace
from polarkv_client.protocol import messages as m
from polarkv_client.results import Reason
from polarkv_client.states import Tier
from polarkv_client.sync import SyncClient
from tests.contract.peers import SIZE
from tests.support.slab_process import SlabProcess
from tests.support.small_manager import SmallManager

NAMESPACE = Namespace(model_id="m", chunk_tokens=4)
TOKENS = list(range(12))
KEYS = [bytes([number]) * 32 for number in (1, 2, 3)]


@pytest.fixture
def manager(slab: SlabProcess) -> Iterator[SmallManager]:
    made = SmallManager([slab.node()])
    yield made
    made.close()


def connect(manager: SmallManager, folder: Path, rates: Calibration, gate: bool = True) -> SyncClient:
    path = folder / "calibration.json"
    rates.write(path)
    return SyncClient.connect(endpoint=manager.endpoint, calibration=path, recompute_gate=gate)


def store_and_load(client: SyncClient) -> list[Tier | Reason]:
    client.store_kv(NAMESPACE, TOKENS, [bytes(SIZE)] * 3)
    return load(client)


def load(client: SyncClient) -> list[Tier | Reason]:
    found = client.load_kv(NAMESPACE, TOKENS, [bytearray(SIZE) for _ in range(3)])
    assert found.chunk_tokens == 4
    return [chunk.tier if chunk.hit else chunk.reason for chunk in found.chunks]


def test_slow_loads_are_skipped_but_some_are_made(manager: SmallManager, tmp_path: Path) -> None:
    with connect(manager, tmp_path, Calibration("", "", 1e9, 1.0, 1.0, 1.0)) as client:
        assert store_and_load(client) == [Reason.RECOMPUTE] * 3
        assert not manager.requests(m.AcquireRead)
        others = [load(client) for _ in range(PROBE_EVERY - 1)]
        assert others == [[Reason.RECOMPUTE] * 3] * (PROBE_EVERY - 2) + [[Tier.MEMORY] * 3]
        status = client.status()
        assert status.counters["loads_skipped"] == PROBE_EVERY - 1
        assert status.counters["misses_recompute"] == 3 * (PROBE_EVERY - 1)
        assert status.rates is not None
        assert status.rates.memory_bytes_per_s > 1.0  # it was measured


def test_fast_loads_are_made(manager: SmallManager, tmp_path: Path) -> None:
    with connect(manager, tmp_path, Calibration("", "", 1.0, 1e9, 1e9, 1e9)) as client:
        assert store_and_load(client) == [Tier.MEMORY] * 3


def test_it_can_be_turned_off(manager: SmallManager, tmp_path: Path) -> None:
    with connect(manager, tmp_path, Calibration("", "", 1e9, 1.0, 1.0, 1.0), gate=False) as client:
        assert store_and_load(client) == [Tier.MEMORY] * 3
        assert client.status().rates is None


def test_tiers_decide_where_only_one_is_fast(manager: SmallManager, tmp_path: Path) -> None:
    """Disks are too slow, memory is not: what lies in memory is loaded."""
    with connect(manager, tmp_path, Calibration("", "", 1000.0, 1e9, 1e12, 1.0)) as client:
        assert store_and_load(client) == [Tier.MEMORY] * 3
        for chunk in manager.chunks.values():
            chunk.tier = Tier.DISK
        assert load(client) == [Reason.RECOMPUTE] * 3


@contextmanager
def by_keys(manager: SmallManager, folder: Path, rates: Calibration) -> Iterator[Keyed]:
    """What SGLang's and LMCache's connectors use, with three chunks stored."""
    path = folder / "calibration.json"
    rates.write(path)
    config = load_connector_config({"endpoint": manager.endpoint, "calibration": str(path), "patience": 0}, {})
    assert config is not None
    operations = attach(config)
    try:
        made = Keyed(config, operations, 4, SIZE)
        assert made.store(KEYS, [bytes(SIZE)] * 3).stored == 3
        yield made
    finally:
        operations.close()


def test_an_engine_with_keys_of_its_own_is_told_of_no_prefix_that_is_sooner_computed(
    manager: SmallManager, tmp_path: Path
) -> None:
    with by_keys(manager, tmp_path, Calibration("", "", 1e9, 1.0, 1.0, 1.0)) as chunks:
        found = [chunks.match(KEYS) for _ in range(PROBE_EVERY)]
        assert found == [Match(0, 3)] * (PROBE_EVERY - 1) + [Match(3, 0)]
        assert chunks.load(KEYS, [bytearray(SIZE) for _ in KEYS], prefix=True).complete
        # That load was measured. Even so it is slower than a thousand million tokens a second.
        assert chunks.match(KEYS) == Match(0, 3)
        assert chunks.match([bytes(32)]) == Match(0, 0)


def test_what_a_load_was_measured_to_take_opens_the_gate_to_an_engine_with_keys_of_its_own(
    manager: SmallManager, tmp_path: Path
) -> None:
    # By the calibration a load takes for ever; a real one far less than the 40 minutes in which 12 tokens are computed.
    with by_keys(manager, tmp_path, Calibration("", "", 0.005, 1e-6, 1e-6, 1e-6)) as chunks:
        while not chunks.match(KEYS).chunks:
            pass
        for _ in range(200):
            assert chunks.load(KEYS, [bytearray(SIZE) for _ in KEYS], prefix=True).complete
        assert [chunks.match(KEYS) for _ in range(3)] == [Match(3, 0)] * 3
