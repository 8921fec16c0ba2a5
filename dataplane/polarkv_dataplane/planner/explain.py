"""Why a plan is what it is: which demands cost something, what one more of each would cost, what to watch out for."""

from __future__ import annotations

from dataclasses import dataclass, replace

from polarkv_dataplane.planner.prices import Offer, PriceFile
from polarkv_dataplane.planner.search import GB, Demand, Fleet, Terms, cheapest

TB_GIB = 932  # 10^12 bytes


@dataclass(frozen=True)
class Unit:
    """One demand as people speak of it; ``step`` and ``unit`` in the demand's own units."""

    fields: tuple[str, ...]
    name: str
    step: int  # by which "one more" differs
    step_name: str
    unit: int
    unit_name: str

    def show(self, amount: float) -> str:
        """With its unit."""
        return f"{amount / self.unit:,.4g} {self.unit_name}" if amount < 1000 * self.unit else self._whole(amount)

    def _whole(self, amount: float) -> str:
        return f"{amount / self.unit:,.0f} {self.unit_name}"


UNITS = (
    Unit(("bandwidth",), "network bandwidth", GB, "1 GB/s", GB, "GB/s"),
    Unit(("disk_bandwidth",), "disk bandwidth", GB, "1 GB/s", GB, "GB/s"),
    Unit(("capacity_gib",), "disk capacity", TB_GIB, "1 TB", 1, "GiB"),
    Unit(("memory_mib",), "memory", 100 * 1024, "100 GiB", 1024, "GiB"),
)


# Bandwidth is most often asked of both; then neither alone costs anything, as the other asks for the same machines.
BOTH = Unit(("bandwidth", "disk_bandwidth"), "network and disk bandwidth", GB, "1 GB/s", GB, "GB/s")


@dataclass(frozen=True)
class Price:
    """What a demand does to the bill: money a month saved without it, and paid for one more (None: not to be had)."""

    unit: Unit
    asked: int
    has: int
    saved_without: float
    one_more: float | None

    @property
    def binding(self) -> bool:
        """Whether the plan would be cheaper without it."""
        return self.saved_without > 0


@dataclass(frozen=True)
class Explanation:
    """Everything that is said about a plan beside the plan itself."""

    prices: tuple[Price, ...]
    limits: tuple[str, ...]
    cautions: tuple[str, ...]


def explain(offer: Offer, prices: PriceFile, demand: Demand, terms: Terms, fleet: Fleet) -> Explanation:
    """Take ``fleet``, the cheapest for ``demand``, apart."""
    having = {
        "bandwidth": fleet.network_bytes_per_s,
        "memory_mib": fleet.memory_mib,
    }
    if terms.disks:
        having |= {"disk_bandwidth": fleet.disk_bytes_per_s, "capacity_gib": fleet.capacity_gib}
    found = []
    for unit in (*UNITS, BOTH):
        asked = [getattr(demand, field) for field in unit.fields]
        if not set(unit.fields) <= set(having) or (unit is BOTH and not all(asked)):
            continue
        without = _cost(offer, replace(demand, **dict.fromkeys(unit.fields, 0)), terms) if any(asked) else fleet.cost
        raised = {field: (getattr(demand, field) or having[field]) + unit.step for field in unit.fields}
        more = _cost(offer, replace(demand, **raised), terms)
        found.append(
            Price(
                unit, min(asked), min(having[field] for field in unit.fields),
                saved_without=round(fleet.cost - (without if without is not None else fleet.cost), 6),
                one_more=None if more is None else round(more - fleet.cost, 6),
            )
        )  # fmt: skip
    return Explanation(tuple(found), _limits(fleet, demand), _cautions(prices, fleet, demand))


def _cost(offer: Offer, demand: Demand, terms: Terms) -> float | None:
    found = cheapest(offer, demand, terms, keep=1)
    return found[0].cost if found else None


def _limits(fleet: Fleet, demand: Demand) -> tuple[str, ...]:
    """What one node, disk or GiB less would miss, in words."""
    said = []
    fewer = replace(fleet, nodes=fleet.nodes - 1) if fleet.nodes > 1 else None
    if fewer is not None:
        said += [f"one node fewer: {missed}" for missed in _missed(fewer, demand)]
    if fleet.disk is not None:
        if fleet.disks > 1:
            said += [
                f"one disk a node fewer: {missed}" for missed in _missed(replace(fleet, disks=fleet.disks - 1), demand)
            ]
        if fleet.bought.gib > fleet.disk.capacity_gib[0]:
            smaller = replace(fleet, bought=fleet.bought._replace(gib=fleet.bought.gib - 1))
            said += [f"disks 1 GiB smaller: {missed}" for missed in _missed(smaller, demand)]
        else:
            said.append(f"disks are as small as {fleet.disk.name} comes: {fleet.bought.gib} GiB")
    return tuple(said)


def _missed(fleet: Fleet, demand: Demand) -> list[str]:
    having = (fleet.network_bytes_per_s, fleet.disk_bytes_per_s, fleet.capacity_gib, fleet.memory_mib)
    wanted = (demand.bandwidth, demand.disk_bandwidth, demand.capacity_gib, demand.memory_mib)
    return [
        f"{unit.name} {unit.show(has)} of {unit.show(asked)}"
        for unit, has, asked in zip(UNITS, having, wanted, strict=True)
        if has < asked
    ]


def _cautions(prices: PriceFile, fleet: Fleet, demand: Demand) -> tuple[str, ...]:
    said = []
    instance, terms = fleet.machine.instance, fleet.terms
    if fleet.disk is not None:
        path = instance.disk_bytes_per_s(burst=False, io_bytes=terms.io_bytes)
        sustained = fleet.disk_bytes_per_s_if(min(path, fleet.machine.network))
        if terms.disk_burst and sustained < demand.disk_bandwidth:
            said.append(
                f"{demand.disk_bandwidth / GB:.2f} GB/s from disks needs burst: the machines' baseline sustains "
                f"{sustained / GB:.2f} GB/s"
            )
    if terms.network_burst:
        baseline = fleet.nodes * instance.network_bytes_per_s(burst=False)
        said.append(f"network is counted at burst; the baseline sustains {baseline / GB:.2f} GB/s")
    if fleet.machine.network < demand.bandwidth:
        said.append(
            f"one node serves {fleet.machine.network / GB:.2f} GB/s: prompts reach the whole bandwidth only because "
            "their chunks spread over all nodes"
        )
    if not terms.reserve_mib:
        said.append("memory is nominal: it counts the whole machine, with nothing for the system and the servers")
    if not terms.system_disk:
        said.append("system disks are not in the bill")
    shown = [(f"{instance.name}: price", instance.status, instance.source, instance.note)]
    if fleet.disk is not None:
        shown.append((f"{fleet.disk.name}: price", fleet.disk.status, fleet.disk.source, fleet.disk.note))
    shown.append((f"{fleet.market.name}: terms", fleet.market.status, fleet.market.source, fleet.market.note))
    for what, status, sources, note in shown:
        dates = ", ".join(f"{name} ({prices.sources[name].date})" for name in sources)
        said.append(f"{what} {status}, from {dates}" + (f"; {note}" if note else ""))
    return tuple(said)
