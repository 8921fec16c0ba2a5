"""Tests of one suite shared among guests that run side by side: whoever is free takes the next one.

A guest and this side talk through files of the folder that they share; the guest's end is ``sharing_plugin``. Which
test goes to whom is decided here, one at a time, so that no guest is idle while there is something left to do.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec

COLLECTED = "collected"  # the guest's list of tests
RAN = "ran"  # the tests that it has run, a line each
ASKED = "asked-{}"  # the guest wants a test for the nth time
TOLD = "told-{}"  # which one it is; empty when none is left


class Collected(msgspec.Struct, frozen=True):
    """A test, as the guest has collected it."""

    name: str
    module: str
    in_order: bool  # the module's tests build on one another: one guest runs all


class Disagreement(Exception):
    """Two guests have collected different tests."""


def write(path: Path, text: str) -> None:
    """Write a file that is seen whole or not at all."""
    draft = path.with_name(f"{path.name}.draft")
    draft.write_text(text, encoding="utf-8")
    draft.rename(path)


class Sharing:
    """The tests that are left, and what has become of the others. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.known = threading.Event()  # what is to be run, or that nobody will say so any more
        self._collected: list[Collected] = []
        self._left: dict[str, list[int]] = {}  # of each module, in order
        self._holder: dict[str, str] = {}  # the guest that began a module
        self._ran: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()  # of tests that each guest ran

    def collect(self, collected: list[Collected]) -> None:
        """A guest says what it has found. Raises Disagreement."""
        with self._lock:
            if not self._collected:
                self._collected = collected
                for number, each in enumerate(collected):
                    self._left.setdefault(each.module, []).append(number)
            elif collected != self._collected:
                raise Disagreement("two guests have collected different tests: none of them can take the other's")
        self.known.set()

    def left(self) -> int:
        """How many tests nobody has taken yet that another guest may take."""
        with self._lock:
            return sum(len(self._left[module]) for module in self._left if self._free(module))

    def _free(self, module: str) -> bool:
        numbers = self._left[module]
        return bool(numbers) and not (module in self._holder and self._collected[numbers[0]].in_order)

    def take(self, guest: str) -> int | None:
        """The number of the guest's next test: of the module that it has begun, so that what the module's tests share
        is made once; else of one that nobody has begun; else from the end of another guest's."""
        with self._lock:
            for module, numbers in self._left.items():
                if numbers and self._holder.get(module) == guest:
                    return numbers.pop(0)
            for module, numbers in self._left.items():
                if numbers and module not in self._holder:
                    self._holder[module] = guest
                    return numbers.pop(0)
            most = max(filter(self._free, self._left), key=lambda module: len(self._left[module]), default=None)
            return None if most is None else self._left[most].pop()

    def ran(self, guest: str, names: list[str]) -> None:
        """The tests that a guest has run, once it has ended."""
        with self._lock:
            self._ran.update(names)
            self.counts[guest] += len(names)

    def total(self) -> int:
        """How many tests there are."""
        return len(self._collected)

    def wrong(self) -> list[str]:
        """A line for each test that did not run exactly once."""
        wanted = Counter(each.name for each in self._collected)
        return [
            f"{name}: ran {self._ran[name]} times, not {wanted[name]}"
            for name in sorted(wanted | self._ran)
            if self._ran[name] != wanted[name]
        ]


class Attendant:
    """Serves one guest, through its folder."""

    def __init__(self, sharing: Sharing, guest: str, check: Callable[[], None]) -> None:
        """``check`` raises when the guest is to end."""
        self._check = check
        self._sharing = sharing
        self._guest = guest
        self._told = 0
        self._heard = False

    def look(self, share: Path) -> None:
        """Answer what the guest asks. Raises Disagreement."""
        self._check()
        if not self._heard and (share / COLLECTED).exists():
            self._sharing.collect(msgspec.json.decode((share / COLLECTED).read_bytes(), type=list[Collected]))
            self._heard = True
        if (share / ASKED.format(self._told)).exists():
            number = self._sharing.take(self._guest)
            write(share / TOLD.format(self._told), "" if number is None else str(number))
            self._told += 1

    def ended(self, share: Path) -> None:
        """Take down what the guest has run."""
        if (share / RAN).exists():
            self._sharing.ran(self._guest, (share / RAN).read_text(encoding="utf-8").splitlines())
