"""The article's arithmetic, from the shipped price file."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import cache

import pytest

from polarkv_dataplane.planner.buying import Shelf
from polarkv_dataplane.planner.prices import Disk, Offer, load_prices, offers
from polarkv_dataplane.planner.search import GB, Demand, Fleet, Terms, cheapest, largest

NOMINAL = Terms(reserve_mib=0, system_disk=False, disk_burst=True)
GIB = 1024  # MiB
THE_DISKS_GIB = 67 * 320


@cache
def market() -> Offer:
    return offers(load_prices(), "alibaba-cn")[0]


def level(name: str) -> Disk:
    return next(disk for disk in market().disks if disk.name == name)


def the_cheapest(demand: Demand, terms: Terms) -> Fleet:
    return cheapest(market(), demand, terms)[0]


def test_a_disk_of_level_three_with_4_gb_per_s() -> None:
    bought = Shelf(level("PL3"), 1 << 20).buy(4 * GB, 0)
    assert bought is not None
    assert (bought.gib, bought.cost_micro) == (7760, 31_040 * 10**6)


def test_12_gb_per_s_from_the_fewest_yuan_of_disks_at_full_throughput() -> None:
    shelf = Shelf(level("PL0"), 1 << 20, full=True)
    count = -(-12 * GB // shelf.included(shelf.knee_gib))
    bought = shelf.buy(12 * GB // count, 0)
    assert bought is not None
    assert (count, bought.gib, count * bought.cost_micro) == (67, 320, 10_720 * 10**6)
    # No other level at full throughput brings as much for as little.
    for disk in market().disks:
        other = Shelf(disk, 1 << 20, full=True)
        each = other.buy(0, 0)
        assert each is not None
        assert -(-12 * GB // other.included(each.gib)) * each.cost_micro >= count * bought.cost_micro


def test_the_articles_cluster_with_nominal_memory() -> None:
    fleet = the_cheapest(Demand(12 * GB, 12 * GB, THE_DISKS_GIB, 156 * GIB), NOMINAL)
    assert (fleet.nodes, fleet.machine.instance.name, fleet.disks) == (39, "ecs.c9i.large", 2)
    assert fleet.disk is level("PL0")
    assert fleet.cost == pytest.approx(17_970, rel=0.01)
    assert fleet.cost <= 18_400
    assert fleet.memory_mib == 156 * GIB
    # The bill of the same machines with exactly those 67 disks, which 39 alike nodes cannot share out.
    assert 39 * fleet.machine.cost_micro + 67 * 160 * 10**6 == 17_970_490_000


def test_the_memory_pool_of_the_same_money() -> None:
    terms = replace(NOMINAL, disks=False)
    found = largest(market(), Demand(bandwidth=12 * GB), terms, ["memory_mib"], GIB, 18_414 * 10**6)
    fleet = found[0]
    assert (fleet.nodes, fleet.machine.instance.name, fleet.memory_mib) == (29, "ecs.r9i.xlarge", 928 * GIB)
    assert fleet.cost == pytest.approx(18_414, rel=0.01)
    assert the_cheapest(Demand(12 * GB, 0, 0, 928 * GIB), terms) == fleet


def test_the_articles_cluster_with_memory_that_can_be_used() -> None:
    terms = replace(NOMINAL, reserve_mib=1536, system_disk=True)
    fleet = the_cheapest(Demand(12 * GB, 12 * GB, THE_DISKS_GIB, 156 * GIB), terms)
    assert (fleet.nodes, fleet.machine.instance.name, fleet.disks) == (24, "ecs.c9i.xlarge", 3)
    assert fleet.memory_mib == 156 * GIB
    assert fleet.cost == pytest.approx(20_124, rel=0.01)


def test_what_a_node_can_send_caps_what_its_disks_can_read() -> None:
    """67 disks read 12.06 GB/s, but 39 small machines do not get it out: 28 have two disks, 11 have one."""
    machine = the_cheapest(Demand(12 * GB, 12 * GB, THE_DISKS_GIB, 156 * GIB), NOMINAL).machine
    served = 28 * min(machine.from_disk, 2 * 180 * 10**6) + 11 * min(machine.from_disk, 180 * 10**6)
    assert 67 * 180 * 10**6 >= 12 * GB > served


@pytest.mark.parametrize(
    "demand",
    [
        Demand(12 * GB, 12 * GB, THE_DISKS_GIB, 156 * GIB),
        Demand(bandwidth=100 * GB, disk_bandwidth=100 * GB),
        Demand(capacity_gib=1_000_000, memory_mib=4096 * GIB),
        Demand(memory_mib=1),
    ],
)
def test_a_plan_on_the_whole_file_is_quick(demand: Demand) -> None:
    began = time.process_time()  # the machine may be busy with others
    file = load_prices()
    assert len(file.instances) == 222
    assert len(file.disks) == 10
    assert all(cheapest(offer, demand, Terms()) for offer in offers(file))
    spent_s = time.process_time() - began
    print(f"{spent_s:.2f} s")
    assert spent_s < 2
