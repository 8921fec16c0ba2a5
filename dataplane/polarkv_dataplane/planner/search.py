"""The cheapest fleet: instance type × count × disks × level × size. Enumerated, with bounds that prove the rest dearer.

A fleet is alike on all its nodes, as a StatefulSet is. Every number is whole (see ``prices``), so that equal costs are
equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import NamedTuple

from polarkv_dataplane.planner.buying import Bought, Shelf
from polarkv_dataplane.planner.prices import Disk, Instance, Market, Offer, micro

GB = 10**9


@dataclass(frozen=True)
class Demand:
    """What a fleet must have: bytes/s over the network and from disks, GiB on disks, MiB of memory for the cache."""

    bandwidth: int = 0
    disk_bandwidth: int = 0
    capacity_gib: int = 0
    memory_mib: int = 0


@dataclass(frozen=True)
class Terms:
    """How to count. ``disks`` False: a pool of memory alone. Patterns are globs; empty ones allow everything."""

    disks: bool = True
    network_burst: bool = False
    disk_burst: bool = False
    reserve_mib: int = 1536
    system_disk: bool = True
    full_throughput: bool = False
    io_bytes: int = 1 << 20
    least_nodes: int = 1
    most_nodes: int = 512
    arch: str = "amd64"
    rdma: bool = False
    instances: tuple[str, ...] = ()
    levels: tuple[str, ...] = ()


@dataclass(frozen=True)
class Machine:
    """An instance type under the terms: bytes/s, MiB for the cache, what one costs with its system disk."""

    instance: Instance
    network: int
    path: int
    memory_mib: int
    slots: int
    cost_micro: int

    @classmethod
    def of(cls, instance: Instance, market: Market, terms: Terms) -> Machine:
        """Count a type by ``terms``."""
        system = market.system_disk_gib * micro(market.system_disk_per_gib_month) if terms.system_disk else 0
        return cls(
            instance,
            instance.network_bytes_per_s(burst=terms.network_burst),
            instance.disk_bytes_per_s(burst=terms.disk_burst, io_bytes=terms.io_bytes),
            round(instance.memory_gib * 1024) - terms.reserve_mib,
            market.disk_slots if instance.disk_slots is None else instance.disk_slots,
            micro(instance.month or 0) + system,
        )

    @cached_property
    def from_disk(self) -> int:
        """Bytes/s that one node can serve from its disks, whatever they are."""
        return min(self.path, self.network)


@dataclass(frozen=True)
class Fleet:
    """A cluster that can be bought; ``disks`` and ``bought`` are those of each node."""

    market: Market
    terms: Terms
    machine: Machine
    nodes: int
    disk: Disk | None
    disks: int
    bought: Bought
    cost_micro: int

    @property
    def key(self) -> tuple[int, int, int, int, str, str]:
        """Order: the cheapest first, then the fewest nodes and disks."""
        level = self.disk.name if self.disk else ""
        return self.cost_micro, self.nodes, self.disks, self.bought.gib, self.machine.instance.name, level

    @property
    def network_bytes_per_s(self) -> int:
        return self.nodes * self.machine.network

    @property
    def disk_bytes_per_s(self) -> int:
        """What all nodes together can serve from disks."""
        return self.disk_bytes_per_s_if(self.machine.from_disk)

    def disk_bytes_per_s_if(self, node_limit: int) -> int:
        """The same with another limit a node."""
        if self.disk is None:
            return 0
        each = Shelf(self.disk, self.terms.io_bytes).included(self.bought.gib) + self.bought.extra_bytes_per_s
        return self.nodes * min(node_limit, self.disks * each)

    @property
    def capacity_gib(self) -> int:
        return self.nodes * self.disks * self.bought.gib

    @property
    def memory_mib(self) -> int:
        return self.nodes * self.machine.memory_mib

    @property
    def cost(self) -> float:
        """A month, in the market's currency."""
        return self.cost_micro / 1e6

    def meets(self, demand: Demand) -> bool:
        """Whether it has what is asked for."""
        return (
            self.network_bytes_per_s >= demand.bandwidth
            and self.disk_bytes_per_s >= demand.disk_bandwidth
            and self.capacity_gib >= demand.capacity_gib
            and self.memory_mib >= demand.memory_mib
        )


class _Bound(NamedTuple):
    """What all disks together cost at least, and what those of one node do."""

    total_micro: int
    node_micro: int


def cheapest(offer: Offer, demand: Demand, terms: Terms, keep: int = 5) -> list[Fleet]:
    """The cheapest fleets of the ``keep`` cheapest instance types, cheapest first; empty when no fleet will do.

    Exact: a type, a count or a number of disks is left out only when a lower bound of its cost is above that of the
    ``keep``-th type found.
    """
    shelves = [
        Shelf(disk, terms.io_bytes, terms.full_throughput)
        for disk in offer.disks
        if terms.disks and _allowed(disk.name, terms.levels)
    ]
    if (demand.disk_bandwidth or demand.capacity_gib or terms.disks) and not shelves:
        return []
    bound = _disks_cost_at_least(shelves, demand)
    machines = []
    for instance in offer.instances:
        machine = Machine.of(instance, offer.market, terms)
        fewest = _fewest_nodes(machine, demand, terms)
        if fewest is not None:
            least = fewest * machine.cost_micro + max(bound.total_micro, fewest * bound.node_micro)
            machines.append((least, instance.name, fewest, machine))
    best: list[Fleet] = []
    for least, _, fewest, machine in sorted(machines, key=lambda item: item[:2]):
        ceiling = best[keep - 1].cost_micro if len(best) >= keep else None
        if ceiling is not None and least > ceiling:
            break
        found = _best_of(offer.market, machine, fewest, shelves, demand, terms, bound, ceiling)
        if found is not None:
            best = sorted([*best, found], key=lambda fleet: fleet.key)[:keep]
    return best


def largest(
    offer: Offer, demand: Demand, terms: Terms, fields: Sequence[str], step: int, budget_micro: int
) -> list[Fleet]:
    """The cheapest fleets with the most of ``demand``'s ``fields`` that ``budget_micro`` buys, in whole ``step``s.

    They are raised together; none gets less than the demand says. The cheapest cost never falls when more is asked
    for, so halving finds it.
    """

    def at(steps: int) -> list[Fleet]:
        raised = {field: max(steps * step, getattr(demand, field)) for field in fields}
        found = cheapest(offer, replace(demand, **raised), terms)
        return [fleet for fleet in found if fleet.cost_micro <= budget_micro]

    low = min(getattr(demand, field) for field in fields) // step
    best = at(low)
    if not best:
        return []
    high = max(1, 2 * low)
    while more := at(high):
        low, best, high = high, more, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        if more := at(middle):
            low, best = middle, more
        else:
            high = middle
    return best


def _allowed(name: str, patterns: tuple[str, ...]) -> bool:
    return not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)


def _ceil(amount: int, each: int) -> int:
    return -(-amount // each)


def _fewest_nodes(machine: Machine, demand: Demand, terms: Terms) -> int | None:
    """Nodes without which one of the machine's own limits is missed; None when the type is no use."""
    instance = machine.instance
    if not _allowed(instance.name, terms.instances) or terms.arch not in ("any", instance.arch):
        return None
    if (terms.rdma and not instance.rdma) or machine.memory_mib <= 0 or (terms.disks and not machine.slots):
        return None
    nodes = terms.least_nodes
    limits = [(demand.bandwidth, machine.network), (demand.memory_mib, machine.memory_mib)]
    limits.append((demand.disk_bandwidth, machine.from_disk))
    for wanted, each in limits:
        if wanted and not each:
            return None
        nodes = max(nodes, _ceil(wanted, each) if wanted else 0)
    return nodes if nodes <= terms.most_nodes else None


def _disks_cost_at_least(shelves: list[Shelf], demand: Demand) -> _Bound:
    if not shelves:
        return _Bound(0, 0)
    by_capacity = demand.capacity_gib * min(shelf.per_gib_micro for shelf in shelves)
    by_rate = demand.disk_bandwidth * min(shelf.least_micro_per_gb_per_s for shelf in shelves) // GB
    smallest = min(shelf.smallest_gib * shelf.per_gib_micro for shelf in shelves)
    return _Bound(max(by_capacity, by_rate), smallest)


def _best_of(
    market: Market, machine: Machine, fewest: int, shelves: list[Shelf], demand: Demand, terms: Terms, bound: _Bound,
    ceiling: int | None,
) -> Fleet | None:  # fmt: skip
    """The cheapest fleet of one type that costs no more than ``ceiling``."""
    best: Fleet | None = None
    for nodes in range(fewest, terms.most_nodes + 1):
        machines_micro = nodes * machine.cost_micro
        limit = best.cost_micro if best is not None else ceiling
        if limit is not None and machines_micro + max(bound.total_micro, nodes * bound.node_micro) > limit:
            break
        if not terms.disks:
            return Fleet(market, terms, machine, nodes, None, 0, Bought(0, 0, 0), machines_micro)
        for shelf in shelves:
            smallest_micro = shelf.smallest_gib * shelf.per_gib_micro
            for disks in range(_fewest_disks(shelf, nodes, demand), machine.slots + 1):
                if limit is not None and machines_micro + nodes * disks * smallest_micro > limit:
                    break
                total = nodes * disks
                bought = shelf.buy(_ceil(demand.disk_bandwidth, total), _ceil(demand.capacity_gib, total))
                if bought is None:
                    continue
                cost = machines_micro + total * bought.cost_micro
                fleet = Fleet(market, terms, machine, nodes, shelf.disk, disks, bought, cost)
                if (limit is None or cost <= limit) and (best is None or fleet.key < best.key):
                    best, limit = fleet, cost
                if bought.cost_micro == smallest_micro:  # no disk is cheaper, so more of them are dearer
                    break
    return best


def _fewest_disks(shelf: Shelf, nodes: int, demand: Demand) -> int:
    """Disks a node without which none is fast or large enough."""
    return max(
        1,
        _ceil(demand.disk_bandwidth, nodes * max(1, shelf.most_bytes_per_s)),
        _ceil(demand.capacity_gib, nodes * shelf.disk.capacity_gib[1]),
    )
