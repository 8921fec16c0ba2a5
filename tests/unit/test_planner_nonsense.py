"""Price files full of nonsense: an error that names the record, or a plan; never a traceback, never for ever."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from polarkv_client.errors import ConfigurationError
from polarkv_dataplane.planner.prices import Offer, load_prices, offers
from polarkv_dataplane.planner.search import Demand, Terms, cheapest

FILE: dict[str, Any] = {
    "version": 1,
    "compiled": "2026-01-02",
    "sources": {"list": {"date": "2026", "ref": "a list"}},
    "markets": [
        {"name": "m", "provider": "p", "region": "r", "currency": "XXX", "disk_slots": 4, "system_disk_gib": 20,
         "system_disk_per_gib_month": 0.5, "status": "assumed", "source": ["list"]}
    ],
    "disks": [
        {"name": "d", "market": "m", "capacity_gib": [1, 65536],
         "throughput_mb_per_s": {"base": 100, "per_gib": 0.25, "max": 180},
         "iops": {"base": 1800, "per_gib": 12, "max": 10000}, "per_gib_month": 0.5,
         "extra": {"max_mb_per_s": 900, "per_mb_per_s_month": 0.04, "iops_each": 4, "iops_free": 100,
                   "iops_per_gib": 500, "max_iops": 70000, "per_iops_month": 0.005},
         "status": "assumed", "source": ["list"]}
    ],
    "instances": [
        {"name": "i", "market": "m", "vcpu": 2, "memory_gib": 4, "network_gbit_per_s": [2, 10],
         "disk_gbit_per_s": [2, 10], "disk_iops": 25000, "disk_slots": 8, "month": 100, "status": "assumed",
         "source": ["list"]}
    ],
}  # fmt: skip
NONSENSE = [-1, 0, 1e-320, 1e-12, 1e300, 10**30, 1024, True, "x", None, [], {}, float("nan"), float("inf")]


def places(record: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where a record has a value."""
    parts = record.items() if isinstance(record, dict) else enumerate(record) if isinstance(record, list) else ()
    for name, value in parts:
        yield (*place, name)
        yield from places(value, (*place, name))


def changed(kind: str, place: tuple[Any, ...], value: Any) -> dict[str, Any]:
    content = copy.deepcopy(FILE)
    inside = content[kind][0]
    for name in place[:-1]:
        inside = inside[name]
    inside[place[-1]] = value
    return content


def read(path: Path, content: dict[str, Any]) -> list[Offer] | ConfigurationError:
    path.write_text(yaml.safe_dump(content))
    try:
        return offers(load_prices(path))
    except ConfigurationError as error:
        return error


@pytest.mark.parametrize("kind", ["markets", "disks", "instances"])
def test_no_value_of_a_record_makes_planning_hang_or_fail(tmp_path: Path, kind: str) -> None:
    planned = 0
    for place in places(FILE[kind][0]):
        for value in NONSENSE:
            found = read(tmp_path / "p.yaml", changed(kind, place, value))
            if isinstance(found, ConfigurationError):
                assert found.fix
                assert any(name in f"{found.field} {found.fix}" for name in (kind, str(place[0]), "market")), found
                continue
            for offer in found:
                cheapest(offer, Demand(10**9, 10**9, 300, 5000), Terms(arch="any"), keep=2)
            planned += 1
    assert planned > 5


def test_a_thousand_free_disks_are_planned_soon(tmp_path: Path) -> None:
    """Nothing is dearer than nothing, so no price ends the search."""
    content = changed("disks", ("per_gib_month",), 0)
    content["instances"][0] |= {"disk_slots": 1024, "month": 0}
    found = read(tmp_path / "p.yaml", content)
    assert not isinstance(found, ConfigurationError)
    (fleet,) = cheapest(found[0], Demand(10**9, 10**9, 300, 5000), Terms(system_disk=False))
    assert fleet.cost_micro == 0
