"""The simulation runs the manager's own core: with time that costs nothing it is an LRU, to the block."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from math import inf

import pytest

from polarkv_client.cli.trace import Request
from polarkv_dataplane.planner.sim.run import Result, simulate
from polarkv_dataplane.planner.sim.scenario import Engines, Hardware, Organisation, Scenario
from tests.support.traces import PUBLIC_TRACE, small_trace, whole_trace

SLOT, PAYLOAD = 4096, 4032
AT_ONCE = Engines(1, prefill_tokens_per_s=inf, network_bytes_per_s=inf)
PUBLISHED = {None: 36.6, 50_000: 35.5, 20_000: 28.7, 10_000: 21.1, 5_000: 11.0}


def timeless(organisation: Organisation, memory_blocks: int, disk_blocks: int = 0, nodes: int = 1) -> Scenario:
    hardware = Hardware(nodes, memory_blocks * SLOT, disk_blocks * SLOT, inf, inf)
    return Scenario(organisation, hardware, AT_ONCE, PAYLOAD, call_s=0, disk_latency_s=0, concurrency=1)


def hits_of_an_lru(trace: Sequence[Request], blocks: int) -> int:
    """Written for this test alone: not the one that the project has."""
    held: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for request in trace:
        for block in request.hash_ids:
            if block in held:
                hits += 1
                del held[block]
            elif len(held) >= blocks:
                held.popitem(last=False)
            held[block] = None
    return hits


def run(trace: Sequence[Request], scenario: Scenario) -> Result:
    result = simulate(trace, scenario)
    assert result.requests == len(trace)
    assert result.references == sum(len(request.hash_ids) for request in trace)
    return result


@pytest.mark.parametrize("blocks", [300, 1000, 3000, 100_000])
def test_a_memory_pool_is_an_lru_to_the_block(blocks: int) -> None:
    trace = small_trace()
    result = run(trace, timeless(Organisation.MEMORY, blocks))
    assert (result.memory_hits, result.disk_hits) == (hits_of_an_lru(trace, blocks), 0)


def test_a_disk_pool_is_the_same_lru_on_disks() -> None:
    trace = small_trace()
    result = run(trace, timeless(Organisation.DISK, 0, 3000))
    assert (result.memory_hits, result.disk_hits) == (0, hits_of_an_lru(trace, 3000 * 98 // 100))


@pytest.mark.deep
@pytest.mark.timeout(300)
@pytest.mark.parametrize("blocks", [None, 50_000, 20_000, 10_000, 5_000])
def test_the_whole_trace_is_an_lru_to_the_block(blocks: int | None) -> None:
    trace = whole_trace()
    capacity = blocks or 300_000
    result = run(trace, timeless(Organisation.MEMORY, capacity))
    assert result.hits == hits_of_an_lru(trace, capacity)
    if PUBLIC_TRACE.exists():
        assert round(result.percent(result.hits), 1) == PUBLISHED[blocks]


@pytest.mark.parametrize(("memory", "disk"), [(200, 1800), (500, 1500)])
def test_paired_tiers_hit_as_an_lru_between_disk_alone_and_both(memory: int, disk: int) -> None:
    """What both tiers hold counts once; a second copy of what memory has costs at most memory's size (ADR 0006)."""
    trace = small_trace()
    result = run(trace, timeless(Organisation.PAIRED, memory, disk))
    most = hits_of_an_lru(trace, memory + disk)
    least = hits_of_an_lru(trace, max(memory, disk * 98 // 100 - memory))
    assert least * 0.97 <= result.hits <= most * 1.03
    assert result.memory_hits <= hits_of_an_lru(trace, memory) * 1.05
    assert result.disk_hits > 0


def test_more_nodes_hit_about_as_much_as_one() -> None:
    trace = small_trace()
    one = run(trace, timeless(Organisation.MEMORY, 2000)).hits
    ten = run(trace, timeless(Organisation.MEMORY, 200, nodes=10)).hits
    assert ten == pytest.approx(one, rel=0.1)
