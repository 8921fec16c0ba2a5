"""Price files: what is shipped is whole and sourced; what is wrong is named with its record."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from polarkv_client.errors import ConfigurationError
from polarkv_dataplane.planner.prices import Disk, Instance, Ramp, load_prices, micro, offers

Change = Callable[[dict[str, Any]], object]


def small_file() -> dict[str, Any]:
    return {
        "version": 1,
        "compiled": "2026-01-02",
        "sources": {"list": {"date": "2026", "ref": "a list"}},
        "markets": [
            {"name": "m", "provider": "p", "region": "r", "currency": "XXX", "disk_slots": 4, "status": "official",
             "source": ["list"]}
        ],
        "disks": [
            {"name": "slow", "market": "m", "throughput_mb_per_s": {"base": 1, "per_gib": 1, "max": 9},
             "per_gib_month": 0.5, "status": "official", "source": ["list"]}
        ],
        "instances": [
            {"name": "tiny", "market": "m", "vcpu": 1, "memory_gib": 2, "network_gbit_per_s": [1, 2],
             "disk_gbit_per_s": [1, 2], "month": 3, "status": "official", "source": ["list"]}
        ],
    }  # fmt: skip


def write(path: Path, content: object) -> Path:
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return path


def test_a_small_file_is_read(tmp_path: Path) -> None:
    file = load_prices(write(tmp_path / "p.yaml", small_file()))
    assert [offer.market.name for offer in offers(file)] == ["m"]
    assert file.instances[0].network_bytes_per_s(burst=True) == 250_000_000


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda f: f["disks"][0].pop("per_gib_month"), r"disks: slow.*per_gib_month"),
        (lambda f: f["disks"][0].update(per_gib_month=-1), r"disks: slow: per_gib_month=-1"),
        (lambda f: f["disks"][0].update(per_gib_month="cheap"), r"disks: slow: per_gib_month='cheap'"),
        (lambda f: f["disks"][0]["throughput_mb_per_s"].pop("max"), r"disks: slow: throughput_mb_per_s: max"),
        (lambda f: f["disks"][0].update(capacity_gib=[9, 3]), r"disks: slow.*\[smallest, largest\]"),
        (lambda f: f["disks"][0].update(speed=3), r"disks: slow: speed"),
        (lambda f: f["disks"][0].update(status="sure"), r"disks: slow: status='sure'"),
        (lambda f: f["disks"][0].update(market="moon"), r"disks: slow: market='moon'.*use one of m"),
        (lambda f: f["disks"][0].update(source=["rumour"]), r"disks: slow: source='rumour'"),
        (lambda f: f["disks"][0].update(rule="thumb"), r"disks: slow: rule='thumb'"),
        (lambda f: f["disks"].append(dict(f["disks"][0])), r"disks: slow.*two records"),
        (lambda f: f["instances"][0].pop("month"), r"instances: tiny.*month"),
        (lambda f: f["instances"][0].update(month=float("nan")), r"instances: tiny: month"),
        (lambda f: f["instances"][0].update(network_gbit_per_s=[2, 1]), r"instances: tiny.*baseline, burst"),
        (lambda f: f["instances"][0].update(memory_gib=0), r"instances: tiny: memory_gib=0"),
        (lambda f: f["instances"][0].pop("name"), r"instances: record 1: name"),
        (lambda f: f.update(version=2), r"version=2"),
        (lambda f: f.pop("markets"), r"markets"),
        (lambda f: f.update(instances=7), r"instances=7"),
    ],
)
def test_what_is_wrong_is_named_with_its_record(tmp_path: Path, change: Change, named: str) -> None:
    content = small_file()
    change(content)
    with pytest.raises(ConfigurationError, match=f"(?s){named}"):
        load_prices(write(tmp_path / "p.yaml", content))


@pytest.mark.parametrize(
    ("text", "named"), [("a: [", "is no YAML"), ("- 1", "one mapping"), ("", "one mapping"), ("\x00", "is no YAML")]
)
def test_what_is_no_price_file_is_refused(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        load_prices(write(tmp_path / "p.yaml", text))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"nowhere\.yaml.*readable"):
        load_prices(tmp_path / "nowhere.yaml")


def test_a_market_without_prices_is_not_planned_with() -> None:
    file = load_prices()
    assert [offer.market.name for offer in offers(file)] == ["alibaba-cn", "aws-us-east-1"]
    with pytest.raises(ConfigurationError, match="no machine of it has a price"):
        offers(file, "gcp")
    with pytest.raises(ConfigurationError, match="--market='moon'"):
        offers(file, "moon")


def test_every_shipped_record_says_where_it_is_from() -> None:
    file = load_prices()
    assert (len(file.disks), len(file.instances)) == (10, 222)
    records: list[Disk | Instance] = [*file.disks, *file.instances]
    for record in records:
        assert record.source, record.name
        assert record.offered == (record.status != "unknown")
        if record.status == "derived":
            assert record.rule, f"{record.name} is derived by no rule"
    assert sum(not instance.offered for instance in file.instances) == 11


def test_derived_prices_follow_their_rules() -> None:
    """A ninth-generation size costs 0.95 of the eighth's; rounding to cents happens once in each."""
    month = {instance.name: instance.month for instance in load_prices().instances}
    compared = 0
    for name, price in month.items():
        older = month.get(name.replace("9i.", "8i."))
        if "9i." in name and price is not None and older is not None:
            assert price == pytest.approx(0.95 * older, abs=0.02), name
            compared += 1
    assert compared >= 25


@pytest.mark.parametrize(("per_gib", "most"), [(1e-320, 65536), (1e-300, 1 << 30), (1e-12, 1 << 30), (1e9, 1 << 30)])
def test_no_slope_makes_the_smallest_disk_hard_to_find(per_gib: float, most: int) -> None:
    ramp = Ramp.model_construct(base=100.0, per_gib=per_gib, max=180.0)
    for wanted in (100 * 10**6 + 1, 140 * 10**6, 180 * 10**6):
        found = ramp.least_gib(wanted, 10**6, most)
        assert (found is None) == (ramp.at(most, 10**6) < wanted)
        assert found is None or ramp.at(found, 10**6) >= wanted > ramp.at(found - 1, 10**6)


def test_a_name_that_is_there_twice_is_no_choice(tmp_path: Path) -> None:
    """YAML would keep the last one: a price that somebody corrected above it would not count."""
    text = yaml.safe_dump(small_file(), sort_keys=False)
    (tmp_path / "p.yaml").write_text(text.replace("per_gib_month:", "per_gib_month: 9\n  per_gib_month:", 1))
    with pytest.raises(ConfigurationError, match=r"prices, line \d+='per_gib_month': is there twice"):
        load_prices(tmp_path / "p.yaml")


def test_prices_with_six_decimals_stay_exact() -> None:
    assert micro(0.1) + micro(0.2) == micro(0.3)
    assert micro(0.045625) == 45_625


@pytest.mark.parametrize(
    ("wanted_mb", "gib"), [(0, 0), (100, 0), (101, 4), (140, 160), (180, 320), (180.000001, None), (181, None)]
)
def test_the_smallest_disk_for_a_throughput(wanted_mb: float, gib: int | None) -> None:
    assert Ramp(base=100, per_gib=0.25, max=180).least_gib(round(wanted_mb * 10**6), 10**6, 65536) == gib
