"""Virtual time: bandwidth is shared, the tiers cost what they cost, the same seed gives the same run."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from polarkv_client.cli.trace import BLOCK_TOKENS, Request
from polarkv_client.errors import ConfigurationError
from polarkv_client.gate import PROBE_EVERY
from polarkv_dataplane.planner.shapes import shape
from polarkv_dataplane.planner.sim.pipes import Pipes
from polarkv_dataplane.planner.sim.run import Result, arrivals, simulate
from polarkv_dataplane.planner.sim.scenario import Engines, Hardware, Organisation, Scenario
from polarkv_dataplane.planner.sim.sweep import Job, run_all
from polarkv_dataplane.planner.sim.workload import conversations, distinct_blocks, share_for
from tests.support.traces import small_trace

BLOCK = 10_000_000
HARDWARE = Hardware(8, 60 * BLOCK, 400 * BLOCK, 400e6, 200e6)
ENGINES = Engines(4, prefill_tokens_per_s=10_000.0)


def scenario(organisation: Organisation = Organisation.PAIRED, **changed: Any) -> Scenario:
    return replace(Scenario(organisation, HARDWARE, ENGINES, BLOCK, stripes=4), **changed)


def request(*blocks: int, at_ms: int = 0) -> Request:
    return Request(at_ms, len(blocks) * BLOCK_TOKENS, 1, list(blocks))


def one(trace: list[Request], **changed: Any) -> Result:
    """A run on one engine and one node, with round figures: a block takes 0.1 s by network, 0.2 s by disk."""
    hardware = Hardware(1, 10 * BLOCK, 100 * BLOCK, 100e6, 50e6)
    engines = Engines(1, prefill_tokens_per_s=512.0, network_bytes_per_s=1e12)
    made = Scenario(Organisation.PAIRED, hardware, engines, BLOCK, call_s=0, disk_latency_s=0, spread_s=0)
    return simulate(trace, replace(made, **changed))


def test_a_first_prompt_takes_its_prefill() -> None:
    assert one([request(1, 2, 3)]).ttft_s == pytest.approx([3])


def test_a_prompt_that_is_there_takes_its_load_and_one_token() -> None:
    """All three blocks are loaded, but the last token is computed: it brings the first one out."""
    result = one([request(1, 2, 3), request(1, 2, 3, at_ms=10_000)])
    assert result.ttft_s[1] == pytest.approx(0.3 + 1 / 512, abs=1e-3)
    assert (result.memory_hits, result.disk_hits) == (3, 0)
    assert result.gpu_seconds_saved == pytest.approx((3 - 1 / 512) * 8)


def test_a_prompt_that_is_on_disk_takes_the_disk_too() -> None:
    """Ten slots: 1 to 4 have left for the disk when they are wanted again."""
    trace = [request(1, 2, 3, 4), request(*range(10, 20), at_ms=20_000), request(1, 2, 3, 4, 5, at_ms=60_000)]
    result = one(trace)
    assert (result.memory_hits, result.disk_hits) == (0, 4)
    assert result.ttft_s[2] == pytest.approx(4 * 0.2 + 0.1 + 1, abs=0.02)


def test_two_prompts_at_once_share_an_engine() -> None:
    assert one([request(1), request(2)]).ttft_s == pytest.approx([1, 2])


def test_a_load_that_is_too_slow_ends_with_what_came() -> None:
    """Ten blocks a second come, a second is allowed for the first store and, later, half of one for the load."""
    trace = [request(*range(8)), request(*range(8), 99, at_ms=20_000)]
    in_time, late = one(trace, load_deadline_s=1.0), one(trace, load_deadline_s=0.45)
    assert (in_time.hits, in_time.cut_short) == (8, 0)
    assert late.stored == 4 + 4  # four of each prompt: a store has no more time than a load
    assert late.hits == 4
    assert late.ttft_s[1] == pytest.approx(0.4 + 5, abs=0.06)


def test_a_gate_skips_what_is_slower_than_computing_and_looks_again() -> None:
    """A block takes 1.5 s to load and 1 s to compute: after the first load, which measures it, most are skipped."""
    slow = Hardware(1, 10 * BLOCK, 100 * BLOCK, BLOCK / 1.5, 50e6)
    trace = [request(1, 2, at_ms=30_000 * n) for n in range(3 * PROBE_EVERY)]
    options: dict[str, Any] = {"hardware": slow, "load_deadline_s": 20.0}
    without, with_gate = one(trace, **options), one(trace, gate=True, **options)
    assert (without.skipped, without.hits) == (0, 2 * (len(trace) - 1))
    assert with_gate.skipped >= 2 * PROBE_EVERY
    assert with_gate.hits >= 2 * 3  # the first, and probes
    assert with_gate.ttft_mean < without.ttft_mean / 1.2


@pytest.mark.parametrize("organisation", list(Organisation))
def test_books_balance(organisation: Organisation) -> None:
    trace = small_trace(200)
    result = simulate(trace, scenario(organisation))
    assert result.requests == len(trace) == len(result.ttft_s)
    assert result.hits + result.stored <= result.references
    assert min(result.ttft_s) > 0
    assert result.computed_s < result.uncached_s
    # What was loaded and stored crossed the network once; loads that were cut short and tickets that ended did too.
    moved = (result.hits + result.stored) * BLOCK
    assert moved <= result.serving_bytes <= moved * 1.5
    if organisation is Organisation.MEMORY:
        assert result.disk_bytes == 0
    else:
        assert result.disk_bytes > 0


def test_the_same_seed_gives_the_same_run_and_another_differs() -> None:
    trace = small_trace(150)

    def figures(seed: int) -> dict[str, Any]:
        found = simulate(trace, scenario(seed=seed)).as_json()
        del found["wall_s"], found["assumptions"]
        return found

    assert figures(1) == figures(1)
    assert figures(1) != figures(2)


def test_a_sweep_in_parallel_finds_what_one_after_the_other_does() -> None:
    trace = small_trace(120)
    jobs = [Job(scenario(organisation), 0.7, {}) for organisation in Organisation]
    told: list[int] = []
    alone, parallel = run_all(trace, jobs, 1, told.append), run_all(trace, jobs, 2)
    assert [found.ttft_s for found in alone] == [found.ttft_s for found in parallel]
    assert told == sorted(told)
    assert told[-1] == sum(found.requests for found in alone)


def test_local_tiering_costs_no_network_and_global_tiering_more_with_the_load() -> None:
    trace = small_trace(200)
    bytes_at: dict[float, float] = {}
    for speed in (0.5, 2.0):
        local = simulate(trace, scenario(Organisation.PAIRED, speed=speed))
        away = simulate(trace, scenario(Organisation.GLOBAL, speed=speed))
        assert local.tiering_bytes == 0
        assert away.tiering_bytes > 0.2 * away.serving_bytes
        bytes_at[speed] = away.tiering_bytes / away.seconds
    assert bytes_at[2.0] > bytes_at[0.5]


def test_loads_before_offloads_are_no_slower() -> None:
    trace = small_trace(300)
    in_order, first = (simulate(trace, scenario(loads_first=value, speed=3.0)) for value in (False, True))
    assert first.load_s / first.hits < in_order.load_s / in_order.hits


def test_a_second_pass_finds_what_the_first_left() -> None:
    trace = small_trace(100)
    cold, warm = simulate(trace, scenario()), simulate(trace, scenario(passes=2))
    assert warm.percent(warm.hits) > cold.percent(cold.hits)
    assert warm.requests == cold.requests


def test_pipes_are_first_come_first_served() -> None:
    pipes = Pipes(2, 100)
    assert pipes.take(0, (0,), 50) == 0.5
    assert pipes.take(0, (0, 1), 100) == 1.0  # half on the busy one
    assert pipes.take(0, (0,), 1000, by=5) == float("inf")
    assert pipes.take(0, (1,), 50) == 1.0
    assert pipes.moved_bytes == 200
    assert pipes.take_first(0, (0,), 100) == 1.0  # before what waits
    assert pipes.take(0, (0,), 50) == 2.5


def test_requests_of_one_time_stamp_are_spread() -> None:
    trace = [request(1, at_ms=5000), request(2, at_ms=5000), request(3, at_ms=8000)]
    assert arrivals(trace, 3.0) == [0, 1.5, 3]
    with pytest.raises(ConfigurationError, match="must not go back"):
        arrivals([request(1, at_ms=5), request(2, at_ms=4)], 3.0)


def test_a_share_of_the_conversations_keeps_their_shape() -> None:
    trace = list(small_trace())
    share = share_for(trace, distinct_blocks(trace) // 4)
    part = conversations(trace, share)
    assert distinct_blocks(part) == pytest.approx(distinct_blocks(trace) / 4, rel=0.05)
    kept = {r.hash_ids[min(1, len(r.hash_ids) - 1)] for r in part}
    whole = [r for r in trace if r.hash_ids[min(1, len(r.hash_ids) - 1)] in kept]
    assert [r.hash_ids for r in part] == [r.hash_ids for r in whole]
    assert all(a.timestamp_ms <= b.timestamp_ms for a, b in pairwise(part))
    rate, whole_rate = len(part) / part[-1].timestamp_ms, len(trace) / trace[-1].timestamp_ms
    assert rate == pytest.approx(whole_rate, rel=0.2)
    assert conversations(trace, 1.0) == trace


def test_prefill_grows_with_what_is_before() -> None:
    engines = Engines.of(shape("qwen3-235b-a22b"), 1)
    flops = 1000 * 44e9 + 4 * 94 * 64 * 128 * (1000 * 1000 / 2)
    assert engines.prefill_s(1000, 0) == pytest.approx(flops / (8 * 148e12 * 0.5))
    assert engines.prefill_s(1000, 50_000) > engines.prefill_s(1000, 0)
    assert engines.prefill_s(1000, 0) + engines.prefill_s(1000, 1000) == pytest.approx(engines.prefill_s(2000, 0))


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"block_bytes": 0}, "block_bytes=0"),
        ({"block_bytes": 70 * BLOCK}, "must hold a block"),
        ({"speed": 0}, "speed=0"),
        ({"passes": 0}, "at least one"),
    ],
)
def test_what_cannot_be_simulated_is_refused(changed: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        scenario(**changed)
