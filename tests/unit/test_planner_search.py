"""The search is exact: it equals trying everything, on small price files made at random."""

from __future__ import annotations

import random
from datetime import date
from itertools import product
from math import ceil

import pytest

from polarkv_dataplane.planner.explain import explain
from polarkv_dataplane.planner.prices import MB, Disk, Extra, Instance, Market, Offer, PriceFile, Ramp, Source, micro
from polarkv_dataplane.planner.search import GB, Demand, Fleet, Terms, cheapest, largest

MOST_NODES, MOST_GIB = 6, 24


def small_offer(dice: random.Random) -> Offer:
    market = Market(
        name="m", provider="p", region="r", currency="XXX", disk_slots=dice.randint(1, 3), status="assumed", source=(),
        system_disk_gib=dice.choice([0, 2]), system_disk_per_gib_month=0.25,
    )  # fmt: skip
    disks = tuple(small_disk(dice, f"d{number}") for number in range(dice.randint(1, 3)))
    machines = tuple(
        Instance(
            name=f"i{number}", market="m", vcpu=1, memory_gib=dice.choice([1, 2, 4, 8]),
            network_gbit_per_s=(dice.choice([1, 2, 4]), 4), disk_gbit_per_s=(dice.choice([0.5, 1, 2, 4]), 4),
            disk_iops=dice.choice([None, 100, 300]), disk_slots=dice.choice([None, 1, 2]),
            month=round(dice.uniform(0.5, 20), 2), status="assumed", source=(),
        )
        for number in range(dice.randint(1, 5))
    )  # fmt: skip
    return Offer(market, disks, machines)


def small_disk(dice: random.Random, name: str) -> Disk:
    least = dice.choice([1, 3])
    extra = None
    if dice.random() < 0.4:
        extra = Extra(
            max_mb_per_s=dice.choice([50, 200]), per_mb_per_s_month=dice.choice([0, 0.02, 0.1]),
            iops_each=dice.choice([0, 1, 4]), iops_free=dice.choice([0, 40]), iops_per_gib=dice.choice([20, 60]),
            max_iops=dice.choice([100, 1000]), per_iops_month=dice.choice([0, 0.004]),
        )  # fmt: skip
    base = dice.choice([0, 20, 100])
    return Disk(
        name=name, market="m", capacity_gib=(least, MOST_GIB),
        throughput_mb_per_s=Ramp(base=base, per_gib=dice.choice([0, 2.5, 7]), max=base + dice.choice([0, 30, 90])),
        iops=dice.choice([None, Ramp(base=30, per_gib=12, max=200), Ramp(base=0, per_gib=0.4, max=200)]), extra=extra,
        per_gib_month=dice.choice([0.05, 0.5, 1.1]), status="assumed", source=(),
    )  # fmt: skip


def a_demand(dice: random.Random, terms: Terms) -> Demand:
    return Demand(
        bandwidth=dice.choice([0, round(dice.uniform(0.05, 1.2) * GB)]),
        disk_bandwidth=dice.choice([0, round(dice.uniform(0.02, 0.8) * GB)]) if terms.disks else 0,
        capacity_gib=dice.choice([0, dice.randint(1, 90)]) if terms.disks else 0,
        memory_mib=dice.choice([0, dice.randint(1, 16 * 1024)]),
    )


def some_terms(dice: random.Random) -> Terms:
    return Terms(
        disks=dice.random() < 0.8, network_burst=dice.random() < 0.3, disk_burst=dice.random() < 0.3,
        reserve_mib=dice.choice([0, 512, 1536]), system_disk=dice.random() < 0.5, full_throughput=dice.random() < 0.25,
        least_nodes=dice.choice([1, 2]), most_nodes=MOST_NODES, io_bytes=dice.choice([1 << 20, 1 << 20, 128 << 10]),
    )  # fmt: skip


def disk_rate(disk: Disk, gib: int, io_bytes: int) -> int:
    ramp = disk.throughput_mb_per_s
    assert ramp is not None
    rate = round(min(ramp.base + ramp.per_gib * gib, ramp.max) * MB)
    if disk.iops is not None:
        rate = min(rate, round(min(disk.iops.base + disk.iops.per_gib * gib, disk.iops.max)) * io_bytes)
    return rate


def disk_cost(disk: Disk, gib: int, wanted: int, io_bytes: int) -> int | None:
    """What a disk with ``wanted`` bytes/s costs, some of them bought beside its own, by the schema's words."""
    cost = gib * micro(disk.per_gib_month or 0)
    if wanted <= disk_rate(disk, gib, io_bytes):
        return cost
    extra, ramp = disk.extra, disk.throughput_mb_per_s
    assert ramp is not None
    missing = max(0, wanted - round(min(ramp.base + ramp.per_gib * gib, ramp.max) * MB))
    if extra is None or missing > round(extra.max_mb_per_s * MB):
        return None
    iops = max(0.0, missing / MB * extra.iops_each - extra.iops_free)
    included = 0
    if disk.iops is not None:
        included = round(min(disk.iops.base + disk.iops.per_gib * gib, disk.iops.max))
        iops = max(iops, wanted / io_bytes - included)
    if iops > extra.max_iops or iops > max(0.0, extra.iops_per_gib * gib - included):
        return None
    return cost + -(-missing * micro(extra.per_mb_per_s_month) // MB) + ceil(iops * micro(extra.per_iops_month))


def by_trying_everything(offer: Offer, demand: Demand, terms: Terms) -> int | None:
    """The least cost over all types, counts, levels, numbers and sizes."""
    best: int | None = None
    for instance, nodes in product(offer.instances, range(terms.least_nodes, MOST_NODES + 1)):
        network = round(instance.network_gbit_per_s[terms.network_burst] * 125 * MB)
        path = round(instance.disk_gbit_per_s[terms.disk_burst] * 125 * MB)
        if instance.disk_iops is not None:
            path = min(path, instance.disk_iops * terms.io_bytes)
        memory = round(instance.memory_gib * 1024) - terms.reserve_mib
        if memory <= 0 or nodes * network < demand.bandwidth or nodes * memory < demand.memory_mib:
            continue
        one = micro(instance.month or 0)
        if terms.system_disk:
            one += offer.market.system_disk_gib * micro(offer.market.system_disk_per_gib_month)
        if not terms.disks:
            best = min(filter(None, (best, nodes * one)))
            continue
        if nodes * min(network, path) < demand.disk_bandwidth:
            continue
        slots = offer.market.disk_slots if instance.disk_slots is None else instance.disk_slots
        for disk, count in product(offer.disks, range(1, slots + 1)):
            each = disks_of_a_node(disk, nodes * count, demand, terms)
            if each is not None:
                best = min(filter(None, (best, nodes * (one + count * each))))
    return best


def disks_of_a_node(disk: Disk, disks: int, demand: Demand, terms: Terms) -> int | None:
    wanted = -(-demand.disk_bandwidth // disks)
    io_bytes = terms.io_bytes
    most = disk_rate(disk, disk.capacity_gib[1], io_bytes)
    costs = [
        disk_cost(disk, gib, wanted, io_bytes)
        for gib in range(disk.capacity_gib[0], disk.capacity_gib[1] + 1)
        if disks * gib >= demand.capacity_gib and (not terms.full_throughput or disk_rate(disk, gib, io_bytes) == most)
    ]
    return min((cost for cost in costs if cost is not None), default=None)


@pytest.mark.parametrize("first_seed", range(0, 200, 20))
def test_the_answer_is_that_of_trying_everything(first_seed: int) -> None:
    solved = 0
    for seed in range(first_seed, first_seed + 20):
        dice = random.Random(seed)
        offer, terms = small_offer(dice), some_terms(dice)
        for _ in range(3):
            demand = a_demand(dice, terms)
            found = cheapest(offer, demand, terms, keep=dice.choice([1, 3, 5]))
            least = by_trying_everything(offer, demand, terms)
            assert (found[0].cost_micro if found else None) == least, (seed, demand)
            solved += bool(found)
            assert all(fleet.meets(demand) for fleet in found)
            assert [fleet.key for fleet in found] == sorted(fleet.key for fleet in found)
    assert solved >= 20  # the files are not so poor that there is nothing to compare


def test_the_runners_up_are_the_cheapest_of_every_other_type() -> None:
    for seed in range(40):
        dice = random.Random(1000 + seed)
        offer, terms = small_offer(dice), some_terms(dice)
        demand = a_demand(dice, terms)
        alone = []
        for instance in offer.instances:
            cost = by_trying_everything(Offer(offer.market, offer.disks, (instance,)), demand, terms)
            if cost is not None:
                alone.append(cost)
        found = cheapest(offer, demand, terms, keep=3)
        assert [fleet.cost_micro for fleet in found] == sorted(alone)[:3], seed


@pytest.mark.parametrize(("field", "step"), [("memory_mib", 1024), ("capacity_gib", 1), ("bandwidth", 10 * MB)])
def test_the_most_for_the_money_leaves_no_step_unbought(field: str, step: int) -> None:
    for seed in range(25):
        dice = random.Random(seed)
        offer = small_offer(dice)
        terms = Terms(reserve_mib=0, most_nodes=MOST_NODES)
        budget = round(dice.uniform(10, 60) * 10**6)
        found = largest(offer, Demand(), terms, [field], step, budget)
        if not found:
            assert not any(fleet.cost_micro <= budget for fleet in cheapest(offer, Demand(), terms))
            continue
        assert found[0].cost_micro <= budget
        bought = amount(found[0], field) // step * step
        more = by_trying_everything(offer, Demand(**{field: bought + step}), terms)
        assert more is None or more > budget


def test_rounded_operations_hide_no_larger_disk() -> None:
    """With 0.4 operations a GiB a disk of 1 GiB has none, and one of 2 GiB one: bounds must not go by the smallest."""
    market = Market(name="m", provider="p", region="r", currency="X", disk_slots=3, status="assumed", source=())
    disk = Disk(
        name="d", market="m", capacity_gib=(1, 20), throughput_mb_per_s=Ramp(base=500, per_gib=0, max=500),
        iops=Ramp(base=0, per_gib=0.4, max=400), per_gib_month=1, status="assumed", source=(),
    )  # fmt: skip
    machines = tuple(
        Instance(name=name, market="m", vcpu=1, memory_gib=4, network_gbit_per_s=(1, 1), disk_gbit_per_s=(1, 1),
                 month=month, status="assumed", source=())
        for name, month in (("a", 9), ("b", 9.1))
    )  # fmt: skip
    offer, terms = Offer(market, (disk,), machines), Terms(reserve_mib=0, system_disk=False, most_nodes=MOST_NODES)
    for rate in range(1, 70):
        demand = Demand(disk_bandwidth=rate * MB)
        assert cheapest(offer, demand, terms, keep=1)[0].cost_micro == by_trying_everything(offer, demand, terms), rate


def test_the_most_is_never_less_than_the_demand() -> None:
    """A demand between two steps is not rounded down to the lower one."""
    for seed in range(40):
        dice = random.Random(seed)
        offer = small_offer(dice)
        terms = Terms(reserve_mib=0, most_nodes=MOST_NODES)
        demand = Demand(memory_mib=dice.randint(1, 20_000))
        least = by_trying_everything(offer, demand, terms)
        for budget in () if least is None else (least - 1, least):
            found = largest(offer, demand, terms, ["memory_mib"], 1024, budget)
            assert bool(found) == (budget == least)
            assert all(fleet.meets(demand) for fleet in found)


def amount(fleet: Fleet, field: str) -> int:
    amounts = {"memory_mib": fleet.memory_mib, "capacity_gib": fleet.capacity_gib}
    return amounts.get(field, fleet.network_bytes_per_s)


def test_prices_of_demands_are_differences_of_plans() -> None:
    for seed in range(15):
        dice = random.Random(seed)
        offer, terms = small_offer(dice), some_terms(dice)
        demand = a_demand(dice, terms)
        found = cheapest(offer, demand, terms, keep=1)
        if not found:
            continue
        file = PriceFile(version=1, compiled=date(2026, 1, 1), sources={"s": Source(date="2026", ref="x")},
                         markets=(offer.market,), disks=offer.disks, instances=offer.instances)  # fmt: skip
        for price in explain(offer, file, demand, terms, found[0]).prices:
            without = Demand(**{**vars(demand), **dict.fromkeys(price.unit.fields, 0)})
            cost = by_trying_everything(offer, without, terms)
            assert cost is not None
            assert price.saved_without == pytest.approx((found[0].cost_micro - cost) / 1e6)
            assert price.binding == (cost < found[0].cost_micro)
            assert price.one_more is None or price.one_more >= 0
