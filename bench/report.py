"""The run as Markdown tables and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from bench.quiet import MINIMUM_SAMPLES, QUIET_BUSY_SHARE
from bench.results import Results, Summary
from bench.subject import LOOKUP_BATCHES
from bench.targets import Verdict, judge, size_name

# The whole reason is in the JSON and the log.
REASON_CHARACTERS = 300


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def _rate_cell(one: Summary | None) -> str:
    return f"{one.median:.2f} ({one.low:.2f}–{one.high:.2f})" if one else "–"


def _rates(results: Results) -> str:
    sizes = sorted(results.rates)
    names = dict.fromkeys(
        (row, metric) for size in sizes for row, one in results.rates[size].items() for metric in one.values
    )
    rows = [
        [f"{row}: {metric}", *(_rate_cell(results.rate(size, row, metric)) for size in sizes)] for row, metric in names
    ]
    failed = [
        [f"{row}: failed", *([reason.replace("|", "/")[:REASON_CHARACTERS]] + [""] * (len(sizes) - 1))]
        for row, reason in results.failures.items()
    ]
    return _table(["GB/s by chunk size, median (min–max)", *map(size_name, sizes)], rows + failed)


def _lookup_cell(one: Summary | None, keys: int) -> str:
    if one is None:
        return "–"
    spread = f"({one.low / 1e3:.2f}–{one.high / 1e3:.2f})"
    return f"{one.median / 1e3:.2f} k {spread}" + (f" = {one.median * keys / 1e6:.2f} M keys/s" if keys > 1 else "")


def _lookups(results: Results) -> str:
    rows = [
        [row, *(_lookup_cell(results.lookup_rate(row, keys), keys) for keys in LOOKUP_BATCHES)]
        for row in results.lookups
    ]
    plural = [f"{keys} key{'s' if keys > 1 else ''}" for keys in LOOKUP_BATCHES]
    return _table(["lookup calls/s, one client", *plural], rows)


def _verdicts(verdicts: Iterable[Verdict]) -> str:
    rows = [
        [one.text, one.point, "–" if one.ratio is None else f"{one.ratio:.2f}", f"≥ {one.at_least:g}", one.word]
        for one in verdicts
    ]
    return _table(["ratio of medians", "at", "reached", "target", ""], rows)


def _quietness(results: Results) -> str:
    every = results.all_series()
    summaries = [found for one in every for metric in one.values if (found := one.summary(metric))]
    loudest = max((one.busy for one in summaries), default=0.0)
    fewest = min((one.used for one in summaries), default=0)
    noisy = sum(one.busy > QUIET_BUSY_SHARE for one in summaries)
    return (
        f"Samples count when other work had at most {QUIET_BUSY_SHARE:.0%} of the processors while they were taken; "
        f"with fewer than {MINIMUM_SAMPLES} such samples, the quietest {MINIMUM_SAMPLES} count. In this run: at least "
        f"{fewest} a cell, {noisy} of {len(summaries)} cells used noisier ones, the worst with {loudest:.0%}.\n"
    )


def _about(results: Results) -> str:
    rows = [
        [name, "; ".join(f"{key}: {value}" for key, value in about.items())] for name, about in results.about.items()
    ]
    return _table(["what", "version and settings"], rows)


def markdown(results: Results) -> str:
    machine = "; ".join(f"{key}: {value}" for key, value in results.machine.items())
    parts = [machine + ".\n", _verdicts(judge(results)), _rates(results)]
    if results.lookups:
        parts.append(_lookups(results))
    return "\n".join([*parts, _quietness(results), _about(results)])


def write(results: Results, directory: Path, stamp: str) -> tuple[Path, Path]:
    """Write `<stamp>.json` and `<stamp>.md`; return their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    json_path, markdown_path = directory / f"{stamp}.json", directory / f"{stamp}.md"
    record = results.as_json() | {"targets": [vars(one) | {"verdict": one.word} for one in judge(results)]}
    json_path.write_text(json.dumps(record, indent=1) + "\n")
    markdown_path.write_text(markdown(results))
    return json_path, markdown_path
