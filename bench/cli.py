"""`python -m bench`: options, progress and where results go."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench import report
from bench.harness import LIMITS, Harness, Plan, clean
from bench.installing import cache_root
from bench.remote import REPOSITORY
from bench.subject import KIB, MIB, SIZES_BYTES, WORKING_SET_BYTES
from bench.targets import judge
from bench.worker import SUBJECTS

RESULTS = REPOSITORY / "bench" / "results"
DOCS = REPOSITORY / "docs"
# On a busy machine rounds take longer: a full run ends within twelve minutes all the same, a quick one within two.
LAST_ROUND_SECONDS = 540.0
QUICK_LAST_ROUND_SECONDS = 75.0
UNITS = {"k": KIB, "m": MIB}


def _size(text: str) -> int:
    word = text.strip().lower().removesuffix("ib")
    unit = UNITS.get(word[-1:])
    if unit is None or not word[:-1].isdigit() or int(word[:-1]) * unit not in SIZES_BYTES:
        raise argparse.ArgumentTypeError(f"{text!r} is not one of 256k, 1m, 4m, 16m")
    return int(word[:-1]) * unit


def _name(text: str) -> str:
    known = [LIMITS, *SUBJECTS]
    if text not in known:
        raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(known)}")
    return text


def _list(convert: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    def parse(text: str) -> list[Any]:
        return [convert(word) for word in text.split(",") if word]

    return parse


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench", description="Measure limits, PolarKV and peers in one run."
    )
    parser.add_argument("--sizes", type=_list(_size), default=list(SIZES_BYTES), help="chunk sizes: 256k,1m,4m,16m")
    parser.add_argument("--rounds", type=int, default=9, help="interleaved rounds for each size (9)")
    parser.add_argument(
        "--only", type=_list(_name), default=[LIMITS, *SUBJECTS], help=f"of: {','.join([LIMITS, *SUBJECTS])}"
    )
    parser.add_argument("--quick", action="store_true", help="3 rounds of 1 and 4 MiB: under two minutes")
    parser.add_argument("--no-lookups", action="store_true", help="leave out the metadata calls")
    parser.add_argument(
        "--patience", type=float, default=1.0, help="seconds to wait for a quiet machine before a round"
    )
    parser.add_argument("--dir", type=Path, default=None, help="where disk files go (the user's cache directory)")
    parser.add_argument("--publish", action="store_true", help="also write docs/performance-latest.{json,md}")
    options = parser.parse_args(argv)
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds}: must be at least 1")
    if options.quick:
        options.rounds, options.sizes = min(options.rounds, 3), [MIB, 4 * MIB]
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0 when everything asked for was measured, 3 when something was not; missed ratios do not fail a run."""
    options = _arguments(argv)
    parent = options.dir or cache_root("bench") / "work"
    parent.mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix="run-", dir=parent))
    began = time.monotonic()

    def say(line: str) -> None:
        print(f"[{time.monotonic() - began:6.1f} s] {line}", file=sys.stderr, flush=True)

    plan = Plan(
        sizes_bytes=options.sizes,
        rounds=options.rounds,
        names=options.only,
        total_bytes=WORKING_SET_BYTES,
        patience_seconds=options.patience,
        last_round_seconds=QUICK_LAST_ROUND_SECONDS if options.quick else LAST_ROUND_SECONDS,
        lookup_seconds=0.0 if options.no_lookups else 0.3,
        directory=directory,
    )
    # So that a terminated run ends its workers and servers too.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        results = Harness(plan, say).run()
    except BaseException:
        clean(directory)
        raise
    stamp = time.strftime("%Y%m%d-%H%M%S")
    json_path, markdown_path = report.write(results, RESULTS, stamp)
    if options.publish:
        report.write(results, DOCS, "performance-latest")
    print(report.markdown(results))
    say(f"wrote {json_path} and {markdown_path}")
    missed = [one for one in judge(results) if one.word == "MISS"]
    say(f"{len(missed)} targets missed, {len(results.failures)} subjects with failures")
    if results.failures:
        say(f"logs kept in {directory / 'logs'}")
        return 3
    clean(directory)
    return 0
