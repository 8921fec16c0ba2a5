"""A plugin of pytest, in a guest: runs the tests that the other side of ``sharing`` tells it, one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.support.waiting import wait_until
from tests.vm.support.sharing import ASKED, COLLECTED, RAN, TOLD, Collected, write

SHARE = Path("/run/polarkv-vm")
ANSWER_S = 60.0


def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Instead of all that was collected."""
    if session.config.option.collectonly or session.testsfailed:
        return None
    collected = [
        Collected(item.nodeid, item.nodeid.partition("::")[0], item.get_closest_marker("in_order") is not None)
        for item in session.items
    ]
    write(SHARE / COLLECTED, msgspec.json.encode(collected).decode())
    following = told()
    number = next(following)
    with (SHARE / RAN).open("w", encoding="utf-8") as ran:
        while number is not None:
            # What the tests share is kept for the next one: so that one must be known before this one is run.
            upcoming = next(following)
            item = session.items[number]
            nextitem = None if upcoming is None else session.items[upcoming]
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=nextitem)
            print(item.nodeid, file=ran, flush=True)
            if session.shouldfail:
                raise session.Failed(session.shouldfail)
            if session.shouldstop:
                raise session.Interrupted(session.shouldstop)
            number = upcoming
    return True


def told() -> Iterator[int | None]:
    """The numbers of this guest's tests; None at the end."""
    count = 0
    while True:
        (SHARE / ASKED.format(count)).touch()
        answer = SHARE / TOLD.format(count)
        wait_until(answer.exists, "the next test's number", ANSWER_S, 0.005)
        text = answer.read_text(encoding="utf-8")
        yield int(text) if text else None
        count += 1
