"""Clusters of equal budget, and the runs that compare them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import ceil

from polarkv_client.cli.trace import Request
from polarkv_client.errors import ConfigurationError
from polarkv_client.layout import stride_bytes
from polarkv_dataplane.planner.prices import Offer, micro
from polarkv_dataplane.planner.search import Demand, Fleet, Terms, cheapest, largest
from polarkv_dataplane.planner.sim.scenario import Engines, Hardware, Organisation, Scenario
from polarkv_dataplane.planner.sim.sweep import Job
from polarkv_dataplane.planner.sim.workload import conversations, distinct_blocks, share_for

BUSY_SHARE = 0.7
MOST_ENGINES = 1024


@dataclass(frozen=True)
class Clusters:
    """Clusters to compare: a pool of memory, and machines with disks for the others."""

    budget: float
    memory: Hardware
    paired: Hardware

    def hardware(self, organisation: Organisation) -> Hardware:
        """The cluster of an organisation: a pool of disks and both kinds of tiers are the same machines."""
        return self.memory if organisation is Organisation.MEMORY else self.paired


@dataclass(frozen=True)
class Fleets:
    """What one budget buys."""

    budget: float
    memory: Fleet
    paired: Fleet

    def clusters(self, *, disk_burst: bool = False) -> Clusters:
        """To be simulated."""
        return Clusters(self.budget, Hardware.of(self.memory), Hardware.of(self.paired, disk_burst=disk_burst))


def fleets(offer: Offer, budget: float, demand: Demand, terms: Terms) -> Fleets:
    """The memory pool with the most memory, and the paired cluster that ``demand`` asks for, each within the budget.

    A demand that names no capacity gets as much as the budget buys.

    Raises:
        ConfigurationError: the budget is too small for one of them.
    """
    alone = Demand(bandwidth=demand.bandwidth)
    memory = largest(offer, alone, replace(terms, disks=False), ["memory_mib"], 1024, micro(budget))
    if demand.capacity_gib:
        paired = [fleet for fleet in cheapest(offer, demand, terms) if fleet.cost <= budget]
    else:
        paired = largest(offer, demand, terms, ["capacity_gib"], 1, micro(budget))
    for kind, found in (("a memory pool", memory), ("a paired cluster", paired)):
        if not found:
            raise ConfigurationError("--budget", budget, f"does not buy {kind} that has what is asked for")
    return Fleets(budget, memory[0], paired[0])


def engines_for(trace: Sequence[Request], engines: Engines) -> Engines:
    """As many as are :data:`BUSY_SHARE` busy, or a little less, without a cache: a rule, so that nobody tunes it.

    Raises:
        ConfigurationError: that is more than can be simulated.
    """
    span_s = max(1.0, (trace[-1].timestamp_ms - trace[0].timestamp_ms) / 1000) if trace else 1.0
    needed = sum(engines.prefill_s(request.input_length, 0) for request in trace) / span_s / BUSY_SHARE
    if needed > MOST_ENGINES:
        raise ConfigurationError(
            "--engines", None,
            f"{needed:,.0f} would be {BUSY_SHARE:.0%} busy, and {MOST_ENGINES} can be simulated: say how many there "
            "are, or look whether the trace's lengths are tokens and its time stamps ms",
        )  # fmt: skip
    return replace(engines, count=max(1, ceil(needed)))


def blocks_in_memory(hardware: Hardware, block_bytes: int) -> int:
    """Blocks that the memory of all machines holds."""
    return hardware.nodes * (hardware.memory_bytes // stride_bytes(block_bytes))


def jobs(
    trace: Sequence[Request],
    bought: Iterable[Clusters],
    base: Scenario,
    organisations: Sequence[Organisation],
    working_sets: Sequence[float] = (),
    speeds: Sequence[float] = (1.0,),
) -> list[Job]:
    """Every budget × working set × speed × organisation.

    ``working_sets`` are multiples of what the memory pool of the budget holds; without any the whole trace is run.

    Raises:
        ConfigurationError: a working set is larger than the trace's, or so small that no conversation is left.
    """
    made = []
    whole = distinct_blocks(trace)
    if not whole:
        raise ConfigurationError("trace", f"{len(trace)} requests", "names no block: there is nothing to cache")
    for each in bought:
        in_memory = max(1, blocks_in_memory(each.hardware(Organisation.MEMORY), base.block_bytes))
        for wanted in working_sets or (whole / in_memory,):
            share = share_for(trace, round(min(wanted * in_memory, whole)), base.seed)
            blocks = distinct_blocks(conversations(trace, share, base.seed))
            if not blocks or wanted * in_memory > 1.01 * whole:
                raise ConfigurationError(
                    "--working-sets", wanted,
                    f"the whole trace is {whole / in_memory:.2f} times the memory of {in_memory:,} blocks: use less"
                    if blocks else "no conversation is as small as that: use more",
                )  # fmt: skip
            for speed in speeds:
                for organisation in organisations:
                    hardware = each.hardware(organisation)
                    scenario = replace(base, organisation=organisation, hardware=hardware, speed=speed)
                    labels: dict[str, float | str] = {
                        "budget": each.budget, "wanted": wanted if working_sets else 0,
                        "working_set": round(blocks / in_memory, 3), "blocks": blocks,
                        "speed": speed, "organisation": str(organisation),
                    }  # fmt: skip
                    made.append(Job(scenario, share, labels))
    return made
