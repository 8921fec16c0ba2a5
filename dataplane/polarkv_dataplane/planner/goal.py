"""A fleet for a trace and a time to first token: candidates by cost, simulated until one is good enough.

Fleets are exact (``search``), the demands that they are made for are a grid: shares of the trace's working set in
memory and on disks, multiples of the bytes that it moves. So the answer is the cheapest of the candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import inf

from polarkv_client.cli.trace import Request
from polarkv_client.layout import stride_bytes
from polarkv_dataplane.planner.prices import Offer
from polarkv_dataplane.planner.search import Demand, Fleet, Terms, cheapest
from polarkv_dataplane.planner.sim.run import Result, simulate
from polarkv_dataplane.planner.sim.scenario import GIB, Hardware, Organisation, Scenario
from polarkv_dataplane.planner.sim.sweep import Job, run_all
from polarkv_dataplane.planner.sim.workload import distinct_blocks

IN_MEMORY = (1 / 64, 1 / 16, 1 / 4, 1.0)  # shares of the working set
ON_DISK = (1 / 8, 1 / 4, 1 / 2, 1.0)
BANDWIDTH = (1.0, 2.0, 4.0)  # times what the trace moves on average when everything is found or stored
MIB = 1 << 20


@dataclass(frozen=True)
class Tried:
    """A candidate and what its simulation showed."""

    fleet: Fleet
    result: Result
    ttft_s: float


def candidates(offer: Offer, trace: Sequence[Request], block_bytes: int, terms: Terms) -> list[Fleet]:
    """Fleets for the grid, paired and of memory alone, cheapest first; each once."""
    working_set = distinct_blocks(trace) * stride_bytes(block_bytes)
    span_s = max(1.0, (trace[-1].timestamp_ms - trace[0].timestamp_ms) / 1000)
    moved = sum(len(request.hash_ids) for request in trace) * block_bytes / span_s
    demands: list[tuple[Terms, Demand]] = []
    for factor, memory in product(BANDWIDTH, IN_MEMORY):
        rate, memory_mib = round(factor * moved), _up(memory * working_set, MIB)
        demands.append((replace(terms, disks=False), Demand(rate, memory_mib=memory_mib)))
        demands += [(terms, Demand(rate, rate, _up(share * working_set, GIB), memory_mib)) for share in ON_DISK]
    found: dict[tuple[object, ...], Fleet] = {}
    for how, demand in demands:
        for fleet in cheapest(offer, demand, how, keep=1):
            if fleet.machine.memory_mib * MIB >= stride_bytes(block_bytes):
                found.setdefault(fleet.key, fleet)
    return sorted(found.values(), key=lambda fleet: fleet.key)


def least_ttft_s(trace: Sequence[Request], base: Scenario, percent: float | None) -> float:
    """The TTFT if everything stayed in memory and came at once: engines alone decide, so no cluster has a lower one."""
    slot_bytes = stride_bytes(base.block_bytes)
    hardware = Hardware(1, (2 * distinct_blocks(trace) + 1) * slot_bytes, 0, inf, 0)
    ideal = base.with_organisation(Organisation.MEMORY, hardware)
    return _ttft_s(simulate(trace, replace(ideal, engines=replace(base.engines, network_bytes_per_s=inf))), percent)


def cheapest_that_meets(
    trace: Sequence[Request], fleets: Sequence[Fleet], base: Scenario, goal_s: float, percent: float | None,
    workers: int = 1, on_run: Callable[[int], None] = lambda _: None,
) -> list[Tried]:  # fmt: skip
    """Simulate in order of cost until the TTFT (its mean, or what ``percent`` of requests do not exceed) is met.

    Returns what was tried; the last one meets the goal, unless none does. ``on_run`` is told how many were tried.
    """
    tried: list[Tried] = []
    for start in range(0, len(fleets), workers):
        part = fleets[start : start + workers]
        jobs = [Job(_scenario(fleet, base), 1.0, {}) for fleet in part]
        for fleet, result in zip(part, run_all(trace, jobs, workers), strict=True):
            ttft = _ttft_s(result, percent)
            tried.append(Tried(fleet, result, ttft))
            if ttft <= goal_s:
                on_run(len(tried))
                return tried
        on_run(len(tried))
    return tried


def _ttft_s(result: Result, percent: float | None) -> float:
    return result.ttft_mean if percent is None else result.ttft_at(percent)


def _scenario(fleet: Fleet, base: Scenario) -> Scenario:
    organisation = Organisation.PAIRED if fleet.disk is not None else Organisation.MEMORY
    return base.with_organisation(organisation, Hardware.of(fleet, disk_burst=fleet.terms.disk_burst))


def _up(amount: float, unit: int) -> int:
    return -int(-amount // unit)
