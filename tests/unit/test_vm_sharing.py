"""Tests shared among guests: each is run once, by whoever is free."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest

from tests.vm.support.sharing import ASKED, COLLECTED, RAN, TOLD, Attendant, Collected, Disagreement, Sharing


def made(module: str, count: int, *, in_order: bool = False) -> list[Collected]:
    return [Collected(f"{module}::{number}", module, in_order) for number in range(count)]


SUITE = [*made("a", 5), *made("b", 3, in_order=True), *made("c", 20)]


def shared(suite: list[Collected]) -> Sharing:
    sharing = Sharing()
    sharing.collect(suite)
    return sharing


@pytest.mark.parametrize("seed", range(20))
def test_every_test_is_given_out_once(seed: int) -> None:
    rng = random.Random(seed)
    sharing = shared(SUITE)
    given: dict[str, list[int]] = {"one": [], "two": []}
    open_guests = list(given)
    while open_guests:
        guest = rng.choice(open_guests)
        number = sharing.take(guest)
        if number is None:
            open_guests.remove(guest)
        else:
            given[guest].append(number)
    assert sorted(given["one"] + given["two"]) == list(range(len(SUITE)))
    for numbers in given.values():
        in_order = [number for number in numbers if SUITE[number].in_order]
        assert in_order in ([], [5, 6, 7])
        sharing.ran("any", [SUITE[number].name for number in numbers])
    assert sharing.wrong() == []


def test_a_guest_stays_with_its_module_and_then_helps_another() -> None:
    sharing = shared([*made("a", 2), *made("c", 4)])
    assert [sharing.take("one"), sharing.take("two"), sharing.take("one")] == [0, 2, 1]
    assert [sharing.take("one"), sharing.take("two"), sharing.take("one")] == [5, 3, 4]
    assert sharing.take("one") is None


def test_what_is_in_order_is_nobody_elses() -> None:
    sharing = shared(made("b", 3, in_order=True))
    assert sharing.left() == 3
    assert sharing.take("one") == 0
    assert sharing.left() == 0
    assert sharing.take("two") is None
    assert [sharing.take("one"), sharing.take("one"), sharing.take("one")] == [1, 2, None]


def test_guests_that_found_different_tests_are_an_error() -> None:
    sharing = shared(SUITE)
    sharing.collect(list(SUITE))
    with pytest.raises(Disagreement):
        sharing.collect(SUITE[1:])


def test_what_ran_twice_or_not_at_all_is_named() -> None:
    sharing = shared(made("a", 3))
    sharing.ran("one", ["a::0", "a::1"])
    sharing.ran("two", ["a::1"])
    assert sharing.wrong() == ["a::1: ran 2 times, not 1", "a::2: ran 0 times, not 1"]
    assert dict(sharing.counts) == {"one": 2, "two": 1}


class Ended(Exception):
    pass


def test_a_guest_is_served_through_its_folder(tmp_path: Path) -> None:
    def check() -> None:
        if (tmp_path / "end").exists():
            raise Ended

    sharing = Sharing()
    attendant = Attendant(sharing, "one", check)
    attendant.look(tmp_path)
    assert not sharing.known.is_set()
    (tmp_path / COLLECTED).write_bytes(msgspec.json.encode(made("a", 1)))
    for count, said in enumerate(["0", ""]):
        (tmp_path / ASKED.format(count)).touch()
        attendant.look(tmp_path)
        attendant.look(tmp_path)
        assert (tmp_path / TOLD.format(count)).read_text(encoding="utf-8") == said
    assert sharing.known.is_set()
    assert len(sharing.wrong()) == 1
    (tmp_path / RAN).write_text("a::0\n", encoding="utf-8")
    attendant.ended(tmp_path)
    assert sharing.wrong() == []
    (tmp_path / "end").touch()
    with pytest.raises(Ended):
        attendant.look(tmp_path)
