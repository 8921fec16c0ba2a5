"""The page about an entry's states shows the table that runs."""

import runpy
from pathlib import Path

from polarkv_dataplane.manager.core.table import TABLE, Event

ROOT = Path(__file__).resolve().parents[2]


def test_the_diagram_is_the_table() -> None:
    generator = runpy.run_path(str(ROOT / "docs" / "generators" / "states.py"))
    page = (ROOT / generator["OUTPUT"]).read_text(encoding="utf-8")
    assert generator["render"]() == page, "run 'make docs' and commit the result"
    arrows = [line for line in page.splitlines() if " --> " in line]
    assert len(arrows) == sum(event is not Event.NODE_LOST for _, event in TABLE)


def test_every_state_is_lost_with_its_node() -> None:
    """The diagram leaves these arrows out, and the text says so."""
    lost = {before: after for (before, event), after in TABLE.items() if event is Event.NODE_LOST}
    assert set(lost.values()) == {None} and len(lost) == 7
