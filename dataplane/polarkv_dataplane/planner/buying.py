"""What one disk costs that must have so much throughput and so much capacity."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from typing import NamedTuple

from polarkv_dataplane.planner.prices import MB, Disk, micro


class Bought(NamedTuple):
    """One disk: its size, the throughput bought beside it, and what it costs a month."""

    gib: int
    extra_bytes_per_s: int
    cost_micro: int


@dataclass(frozen=True)
class Shelf:
    """One kind of disk, read and written in operations of ``io_bytes``; ``full``: only sizes of full throughput."""

    disk: Disk
    io_bytes: int
    full: bool = False

    @cached_property
    def per_gib_micro(self) -> int:
        """Price of a GiB."""
        return micro(self.disk.per_gib_month or 0)

    @cached_property
    def knee_gib(self) -> int:
        """The smallest size with all the throughput that capacity brings."""
        least, most = self.disk.capacity_gib
        wanted = self.included(most)
        while least < most:  # throughput never falls with size
            middle = (least + most) // 2
            least, most = (least, middle) if self.included(middle) >= wanted else (middle + 1, most)
        return least

    @cached_property
    def smallest_gib(self) -> int:
        """The smallest size that is allowed."""
        return self.knee_gib if self.full else self.disk.capacity_gib[0]

    @cached_property
    def most_bytes_per_s(self) -> int:
        """The most throughput that one disk can have."""
        disk, extra, most = self.disk, self.disk.extra, self.disk.capacity_gib[1]
        if extra is None:
            return self.included(most)
        assert disk.throughput_mb_per_s is not None
        throughput = disk.throughput_mb_per_s.at(most, MB) + round(extra.max_mb_per_s * MB)
        return throughput if disk.iops is None else min(throughput, self._operations(most, extra.max_iops))

    @cached_property
    def least_micro_per_gb_per_s(self) -> int:
        """No disk of this kind brings 1 GB/s for less, however many are bought: a bound for pruning."""
        gib, disk, extra = self.smallest_gib, self.disk, self.disk.extra
        assert disk.throughput_mb_per_s is not None
        # Larger disks bring no more for their money, but for rounding: up to one byte, and one operation, a second.
        most = disk.throughput_mb_per_s.at(gib, MB) + 1
        if disk.iops is not None:
            most = min(most, self._operations(gib, 1))
        at_smallest = gib * self.per_gib_micro * 10**9 // most
        if extra is None or at_smallest == 0:
            return at_smallest
        # IOPS that come free with one disk come free with every one, so only the price of the scarcer thing is sure.
        by_operations = micro(extra.per_iops_month) * 10**9 // self.io_bytes if disk.iops is not None else at_smallest
        return min(at_smallest, micro(extra.per_mb_per_s_month) * 1000, by_operations)

    def included(self, gib: int) -> int:
        """Bytes/s that come with a size."""
        disk = self.disk
        assert disk.throughput_mb_per_s is not None
        throughput = disk.throughput_mb_per_s.at(gib, MB)
        return throughput if disk.iops is None else min(throughput, disk.iops.at(gib, 1) * self.io_bytes)

    def _operations(self, gib: int, more: float) -> int:
        """Bytes/s of the operations of a size and so many more."""
        assert self.disk.iops is not None
        return int((self.disk.iops.at(gib, 1) + more) * self.io_bytes)

    def buy(self, wanted_bytes_per_s: int, least_gib: int) -> Bought | None:
        """The cheapest disk that has both; None when none has."""
        least = max(self.smallest_gib, least_gib)
        best: Bought | None = None
        for gib in self._sizes(wanted_bytes_per_s, least):
            bought = self.at_size(gib, wanted_bytes_per_s)
            if bought is not None and (best is None or (bought.cost_micro, bought.gib) < (best.cost_micro, best.gib)):
                best = bought
        return best

    def at_size(self, gib: int, wanted_bytes_per_s: int) -> Bought | None:
        """A disk of this very size with the throughput that is missing bought; None when that cannot be bought."""
        short = max(0, wanted_bytes_per_s - self.included(gib))
        cost = gib * self.per_gib_micro
        if not short:
            return Bought(gib, 0, cost)
        extra, ramp = self.disk.extra, self.disk.throughput_mb_per_s
        assert ramp is not None
        missing = max(0, wanted_bytes_per_s - ramp.at(gib, MB))
        if extra is None or missing > round(extra.max_mb_per_s * MB):
            return None
        included = self.disk.iops.at(gib, 1) if self.disk.iops else 0
        iops = max(0.0, missing / MB * extra.iops_each - extra.iops_free)
        if self.disk.iops is not None:
            iops = max(iops, wanted_bytes_per_s / self.io_bytes - included)
        if iops > min(extra.max_iops, max(0.0, extra.iops_per_gib * gib - included)):
            return None
        # Rounded up, so that a bound from exact prices is one.
        price = -(-missing * micro(extra.per_mb_per_s_month) // MB) + ceil(iops * micro(extra.per_iops_month))
        return Bought(gib, short, cost + price)

    def _sizes(self, wanted: int, least: int) -> Iterator[int]:
        """Sizes of which one is the cheapest: cost is convex in size, with bends only where something runs out."""
        most = self.disk.capacity_gib[1]
        if least > most:
            return
        enough = self._first(least, most, wanted)
        if self.disk.extra is None:
            if enough is not None:
                yield enough
            return
        extra = self.disk.extra
        free = wanted
        if extra.iops_each * wanted > extra.iops_free * MB:
            free = round(extra.iops_free / extra.iops_each * MB)
        first = self._first_buyable(least, most, wanted)
        bends = [least, enough, self._first(least, most, wanted - free), first]
        if first is not None and self.disk.iops is not None and wanted > self._operations(first, 0):
            bends += self._valley(first, most, wanted)
        if least <= self.knee_gib <= most:
            bends.append(self.knee_gib)
        for bend in {size for size in bends if size is not None}:
            yield from (size for size in (bend - 1, bend, bend + 1) if least <= size <= most)

    def _valley(self, low: int, high: int, wanted: int) -> Iterable[int]:
        """About the cheapest size where operations are short too, and bends are where either runs out."""
        while high - low > 4:
            third = (high - low) // 3
            left, right = self.at_size(low + third, wanted), self.at_size(high - third, wanted)
            if left is None or (right is not None and left.cost_micro > right.cost_micro):
                low += third
            else:
                high -= third
        return range(low, high + 1)

    def _first(self, least: int, most: int, wanted: int) -> int | None:
        if self.included(least) >= wanted:
            return least
        ramp, iops = self.disk.throughput_mb_per_s, self.disk.iops
        assert ramp is not None
        sizes = [ramp.least_gib(wanted, MB, most), iops.least_gib(-(-wanted // self.io_bytes), 1, most) if iops else 0]
        if any(size is None for size in sizes):
            return None
        gib = max(least, *(size for size in sizes if size is not None))
        return gib if gib <= most else None

    def _first_buyable(self, least: int, most: int, wanted: int) -> int | None:
        """The smallest size with which the rest can be bought."""
        if self.at_size(most, wanted) is None:
            return None
        while least < most:
            middle = (least + most) // 2
            least, most = (least, middle) if self.at_size(middle, wanted) else (middle + 1, most)
        return least
