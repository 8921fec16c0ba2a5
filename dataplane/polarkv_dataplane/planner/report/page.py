"""Everything that a sweep found, in one folder: results.json, results.csv, PNGs, report.html."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from polarkv_dataplane.planner.report.tables import COLUMNS, Row, as_csv

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; font-size: 13px; display: block; overflow-x: auto }
td, th { padding: .2rem .6rem; border-bottom: 1px solid #ddd; text-align: right; white-space: nowrap }
td:first-child, th:first-child { text-align: left } img { max-width: 100%; width: 46rem }
"""


def write_report(
    folder: Path, title: str, table: Sequence[Row], pngs: Mapping[str, bytes], assumptions: Mapping[str, Any],
    notes: Sequence[str] = (),
) -> list[Path]:  # fmt: skip
    """Write the files; returns their paths. What is there already is replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    contents = {
        "results.json": json.dumps({"assumptions": assumptions, "notes": list(notes), "rows": list(table)}, indent=2),
        "results.csv": as_csv(table),
        "report.html": _html(title, table, pngs, assumptions, notes),
    }
    written = []
    for name, text in contents.items():
        written.append(folder / name)
        written[-1].write_text(text, encoding="utf-8")
    for name, png in pngs.items():
        written.append(folder / f"{name}.png")
        written[-1].write_bytes(png)
    return written


def _html(
    title: str, table: Sequence[Row], pngs: Mapping[str, bytes], assumptions: Mapping[str, Any], notes: Sequence[str]
) -> str:
    images = "".join(
        f'<p><img alt="{escape(name)}" src="data:image/png;base64,{base64.b64encode(png).decode()}"></p>'
        for name, png in pngs.items()
    )
    head = "".join(f"<th>{escape(column.replace('_', ' '))}</th>" for column in COLUMNS)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(_shown(row[column]))}</td>" for column in COLUMNS) + "</tr>" for row in table
    )
    listed = "".join(f"<tr><td>{escape(name)}</td><td>{escape(_shown(value))}</td></tr>"
                     for name, value in assumptions.items())  # fmt: skip
    said = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
        f"<h1>{escape(title)}</h1><ul>{said}</ul>{images}<h2>Runs</h2><table><tr>{head}</tr>{body}</table>"
        f"<h2>Assumptions</h2><table>{listed}</table></html>\n"
    )


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1e6 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and abs(value) > 9999 else str(value)
