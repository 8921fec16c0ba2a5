"""Price files: disks, virtual machines and what they cost. Schema: docs/planner.md.

Everything is kept in whole numbers so that sums are exact: money in millionths of the currency a month, rates in
bytes/s (10^9 bytes/s = 1 GB/s), capacity and memory in GiB as vendors sell them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass
from datetime import date
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from polarkv_client.errors import ConfigurationError

MB = 1_000_000
MICRO = 1_000_000
SHIPPED = "the shipped price file"

Money = Annotated[float, Field(ge=0, le=1e9)]
Rate = Annotated[float, Field(ge=0, le=1e7)]
_Gib = Annotated[int, Field(ge=1, le=1 << 30)]
_Slots = Annotated[int, Field(ge=0, le=1024)]
Status = Literal["official", "measured", "derived", "third_party", "assumed", "unknown"]


def micro(amount: float) -> int:
    """Millionths of the currency; binary fractions of prices with up to six decimals are undone."""
    return round(amount * MICRO)


class Record(BaseModel):
    """A record of a price file: nothing it does not know is let through."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Source(Record):
    """Where figures come from."""

    date: Annotated[str, BeforeValidator(str)]  # YAML reads 2026 as a number, 2026-11-29 as a date
    ref: str


class Ramp(Record):
    """``min(base + per_gib × capacity, max)``."""

    base: Rate
    per_gib: Rate
    max: Rate

    def at(self, gib: int, unit: int) -> int:
        """The value for a disk of ``gib``, in units of which the file's is ``unit``."""
        return round(min(self.base + self.per_gib * gib, self.max) * unit)

    def least_gib(self, wanted: int, unit: int, most: int) -> int | None:
        """The smallest disk, of at most ``most`` GiB, that has ``wanted``; None when no size has."""
        gib = bisect_left(range(most + 1), wanted, key=lambda size: self.at(size, unit))
        return gib if gib <= most else None


class Extra(Record):
    """Throughput that can be bought beside capacity, a MB/s at a time, with the IOPS that it takes."""

    max_mb_per_s: Rate
    per_mb_per_s_month: Money
    iops_each: Rate = 0
    iops_free: Rate = 0
    iops_per_gib: Rate = 0
    max_iops: Rate = 0
    per_iops_month: Money = 0


class StorageClass(Record):
    """What a Kubernetes StorageClass of this disk says."""

    provisioner: str
    parameters: dict[str, str] = Field(default_factory=dict)


class Disk(Record):
    """One kind of cloud disk."""

    name: str
    market: str
    capacity_gib: tuple[_Gib, _Gib] = (1, 65536)
    throughput_mb_per_s: Ramp | None = None
    iops: Ramp | None = None
    extra: Extra | None = None
    per_gib_month: Money | None = None
    status: Status
    rule: str = ""
    source: tuple[str, ...]
    note: str = ""
    storage_class: StorageClass | None = None

    @model_validator(mode="after")
    def _complete(self) -> Disk:
        if self.capacity_gib[0] > self.capacity_gib[1]:
            raise ValueError("capacity_gib must be [smallest, largest]")
        if self.status != "unknown" and (self.per_gib_month is None or self.throughput_mb_per_s is None):
            raise ValueError("per_gib_month and throughput_mb_per_s are needed (or status: unknown)")
        return self

    @property
    def offered(self) -> bool:
        """Whether enough is known to plan with it."""
        return self.status != "unknown"


class Instance(Record):
    """One type of virtual machine. Bandwidths are [baseline, burst]."""

    name: str
    market: str
    vcpu: Annotated[int, Field(ge=1)]
    memory_gib: Annotated[float, Field(gt=0, le=1e6)]
    network_gbit_per_s: tuple[Rate, Rate]
    disk_gbit_per_s: tuple[Rate, Rate]
    disk_iops: Annotated[int, Field(ge=0)] | None = None
    disk_slots: _Slots | None = None
    arch: Literal["amd64", "arm64"] = "amd64"
    rdma: bool | None = None
    month: Money | None = None
    status: Status
    rule: str = ""
    source: tuple[str, ...]
    note: str = ""

    @model_validator(mode="after")
    def _complete(self) -> Instance:
        for name in ("network_gbit_per_s", "disk_gbit_per_s"):
            baseline, burst = getattr(self, name)
            if baseline > burst:
                raise ValueError(f"{name} must be [baseline, burst], and a burst is no less than the baseline")
        if self.status != "unknown" and self.month is None:
            raise ValueError("month is needed (or status: unknown)")
        return self

    @property
    def offered(self) -> bool:
        """Whether its price is known."""
        return self.status != "unknown"

    def network_bytes_per_s(self, *, burst: bool) -> int:
        """Bytes/s over the network."""
        return round(self.network_gbit_per_s[burst] * 125 * MB)

    def disk_bytes_per_s(self, *, burst: bool, io_bytes: int) -> int:
        """Bytes/s between the machine and all its disks, with operations of ``io_bytes``."""
        path = round(self.disk_gbit_per_s[burst] * 125 * MB)
        return path if self.disk_iops is None else min(path, self.disk_iops * io_bytes)


class Market(Record):
    """Where records can be bought together: one provider, one region's list, one currency."""

    name: str
    provider: str
    region: str
    currency: str
    disk_slots: _Slots
    system_disk_gib: Annotated[int, Field(ge=0)] = 0
    system_disk_per_gib_month: Money = 0
    status: Status
    source: tuple[str, ...]
    note: str = ""


class PriceFile(Record):
    """A whole price file, checked."""

    version: Literal[1]
    compiled: date
    rules: dict[str, str] = Field(default_factory=dict)
    sources: dict[str, Source]
    markets: tuple[Market, ...]
    disks: tuple[Disk, ...]
    instances: tuple[Instance, ...]

    @cached_property
    def by_market(self) -> dict[str, Market]:
        """The markets by name."""
        return {market.name: market for market in self.markets}

    def check(self) -> None:
        """Names lead somewhere and are not taken twice.

        Raises:
            ConfigurationError: one does not; the text names the record.
        """
        for kind in ("markets", "disks", "instances"):
            records: tuple[Market | Disk | Instance, ...] = getattr(self, kind)
            names = Counter((record.name, getattr(record, "market", "")) for record in records)
            for record in records:
                where = f"{kind}: {record.name}"
                if names[record.name, getattr(record, "market", "")] > 1:
                    raise ConfigurationError(where, record.name, "there are two records of this name; keep one")
                self._check_names(record, where)

    def _check_names(self, record: Market | Disk | Instance, where: str) -> None:
        if not isinstance(record, Market):
            if record.market not in self.by_market:
                known = ", ".join(self.by_market)
                fix = f"use one of {known}, or add it" if known else "add it to markets"
                raise ConfigurationError(f"{where}: market", record.market, fix)
            for rule in record.rule.split(" + ") if record.rule else ():
                if rule not in self.rules:
                    raise ConfigurationError(f"{where}: rule", rule, "add it to rules, so that readers know it")
        for name in record.source:
            if name not in self.sources:
                raise ConfigurationError(f"{where}: source", name, "add it to sources, with its date")


@dataclass(frozen=True)
class Offer:
    """What one market sells, as far as it can be planned with."""

    market: Market
    disks: tuple[Disk, ...]
    instances: tuple[Instance, ...]


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]  # C's is ten times faster
    """Of a name that is there twice YAML keeps the last one, without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """As YAML's, without repeated names."""
        seen: set[str] = set()
        for name, _ in node.value:
            if (text := str(name.value)) in seen:
                raise ConfigurationError(f"prices, line {name.start_mark.line + 1}", text, "is there twice; keep one")
            seen.add(text)
        made: dict[Any, Any] = super().construct_mapping(node, deep)
        return made


def load_prices(path: Path | None = None) -> PriceFile:
    """Read a price file (YAML, or JSON, which is YAML); without a path the shipped one.

    Raises:
        ConfigurationError: it cannot be read or a record is wrong; the text names record and field.
    """
    where = str(path) if path else SHIPPED
    try:
        text = path.read_bytes() if path else files(__package__).joinpath("prices.yaml").read_bytes()
    except OSError as error:
        raise ConfigurationError("prices", where, f"name a readable price file ({error.strerror})") from error
    try:
        content = yaml.load(text, _Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        first = " ".join(str(error).split())
        raise ConfigurationError("prices", where, f"is no YAML: {first}") from error
    if not isinstance(content, dict):
        raise ConfigurationError("prices", where, "must be one mapping with version, sources, markets, disks, …")
    try:
        prices = PriceFile.model_validate(content)
    except ValidationError as error:
        first_error = error.errors()[0]
        value = first_error["input"]
        shown = value if isinstance(value, (str, int, float, type(None))) else "…"
        message = first_error["msg"].removeprefix("Value error, ")
        raise ConfigurationError(_place(content, first_error["loc"]), shown, message) from None
    prices.check()
    return prices


def offers(prices: PriceFile, market: str | None = None) -> list[Offer]:
    """What can be planned with, by market; a market without a complete record is left out.

    Raises:
        ConfigurationError: there is no such market, or nothing in it is complete.
    """
    if market is not None and market not in prices.by_market:
        raise ConfigurationError("--market", market, f"use one of {', '.join(prices.by_market)}")
    found = []
    for each in prices.markets:
        if market in (None, each.name):
            disks = tuple(disk for disk in prices.disks if disk.market == each.name and disk.offered)
            machines = tuple(item for item in prices.instances if item.market == each.name and item.offered)
            if machines:
                found.append(Offer(each, disks, machines))
    if not found:
        raise ConfigurationError("--market", market, "no machine of it has a price; add prices to a file of your own")
    return found


def _place(content: dict[str, Any], place: tuple[int | str, ...]) -> str:
    """Where in the file, with the record's name instead of its number: ``disks: PL3: per_gib_month``."""
    parts = [str(part) for part in place]
    if len(place) > 1 and isinstance(place[1], int):
        records = content.get(str(place[0]))
        record = records[place[1]] if isinstance(records, list) else None
        name = record.get("name") if isinstance(record, dict) else None
        parts[1] = str(name) if name else f"record {place[1] + 1}"
    return ": ".join(parts) or "prices"
