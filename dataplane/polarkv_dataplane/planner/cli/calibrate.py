"""`polarkv calibrate`: measure rates, for the simulation and for the client's choice to load or to recompute."""

from __future__ import annotations

import socket
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import httpx
import msgspec

from polarkv_client.calibration import Calibration
from polarkv_client.cli.common import Finite, Session, parse_chunk, progress, session_options
from polarkv_client.errors import ConfigurationError
from polarkv_dataplane.planner.cli.asking import check_folder, refuse
from polarkv_dataplane.planner.measuring import Transfers, measure_prefill, measure_transfers

_ENGINE_TIMEOUT_S = 600.0
_MOST_DIGITS = 8


@click.command(short_help="Measure store, load and prefill rates of this machine and cluster.")
@click.option("--engine", "engine_url", metavar="URL", help="An engine with OpenAI's API, such as http://host:8000.")
@click.option("--engine-model", default="", metavar="NAME", help="Its model. Default: the first that it lists.")
@click.option("--prompt-tokens", default="1024,8192", show_default=True, metavar="N,N", help="Lengths of prompts.")
@click.option("--prefill", type=Finite(0, 1e12, min_open=True), metavar="TOKENS/S", help="Known; not measured.")
@click.option("--transfers/--no-transfers", default=True, show_default=True, help="Measure the running cluster.")
@click.option("--chunk", default="1MiB", show_default=True, metavar="SIZE", help="Payload of one chunk.")
@click.option("--batch", default=16, show_default=True, type=click.IntRange(1, 1024), help="Chunks in one call.")
@click.option("--rounds", default=5, show_default=True, type=click.IntRange(1, 1000), help="Of each measurement.")
@click.option("--output", "-o", type=click.Path(path_type=Path), metavar="FILE", help="Write the calibration here.")
@session_options
def calibrate(session: Session, engine_url: str | None, output: Path | None, **asked: Any) -> None:
    """Measure how fast chunks are stored, loaded from memory and from disk, and how fast an engine computes prompts.

    Give the file to clients as POLARKV_CALIBRATION, and to 'polarkv simulate --calibration': clients then skip loads
    that would take longer than computing (POLARKV_RECOMPUTE_GATE=false turns that off).
    """
    if engine_url and asked["prefill"]:
        raise ConfigurationError("--prefill", asked["prefill"], "measure it with --engine or say it, not both")
    if not engine_url:
        refuse("--engine-model --prompt-tokens", "is of an engine: say --engine too")
    if not asked["transfers"]:
        refuse("--chunk --batch", "--no-transfers moves no chunks: leave one of them out")
        if not engine_url and not asked["prefill"]:
            raise ConfigurationError("--no-transfers", True, "nothing is left to measure: say --engine or --prefill")
    if output is not None:
        check_folder(str(output.absolute().parent))
        if output.is_dir():
            raise ConfigurationError("--output", str(output), "is a folder: name a file")
    prefill, said = asked["prefill"] or 0.0, ""
    if engine_url:
        with httpx.Client(timeout=_ENGINE_TIMEOUT_S) as http:
            lengths = _lengths(asked["prompt_tokens"])
            measured = measure_prefill(engine_url, asked["engine_model"], lengths, asked["rounds"], http=http)
        prefill, said = measured.tokens_per_s, f", and {measured.overhead_s * 1000:.0f} ms for any prompt"
    moved = _transfers(session, asked) if asked["transfers"] else Transfers(0, 0, 0, "not measured")
    found = Calibration(
        measured=datetime.now(UTC).isoformat(timespec="seconds"), host=socket.gethostname(),
        prefill_tokens_per_s=round(prefill, 3), store_bytes_per_s=moved.store, memory_bytes_per_s=moved.memory,
        disk_bytes_per_s=round(moved.disk, 3),
    )  # fmt: skip
    if output is not None:
        found.write(output)
    shown = {**msgspec.structs.asdict(found), "disk_not_measured_because": moved.why}
    session.show(shown, lambda out: out.print(_text(found, moved.why, said, output), markup=False))


def _lengths(text: str) -> list[int]:
    lengths = [int(part) for part in text.split(",") if part.strip().isdecimal() and len(part) < _MOST_DIGITS]
    if len(lengths) != 2 or len(set(lengths)) != 2 or not min(lengths):
        raise ConfigurationError("--prompt-tokens", text, "use two different numbers of tokens, such as 1024,8192")
    return lengths


def _transfers(session: Session, asked: dict[str, Any]) -> Transfers:
    rounds, batch = asked["rounds"], asked["batch"]
    chunk_bytes = parse_chunk(asked["chunk"], batch)
    total = 2 * rounds * batch * chunk_bytes
    with (
        session.patient_client() as client,
        progress("calibrate", total, quiet=session.as_json) as advance,
    ):
        if not session.settings().admin:
            return measure_transfers(client, None, chunk_bytes, batch, rounds, advance)
        with session.admin() as admin:
            return measure_transfers(client, admin, chunk_bytes, batch, rounds, advance)


def _text(found: Calibration, why: str, said: str, output: Path | None) -> str:
    def rate(bytes_per_s: float) -> str:
        if not bytes_per_s:
            return "not measured"
        return f"{bytes_per_s / 1e9:.2f} GB/s" if bytes_per_s >= 1e8 else f"{bytes_per_s / 1e6:.3g} MB/s"

    prefill = f"{found.prefill_tokens_per_s:,.0f} tokens/s{said}" if found.prefill_tokens_per_s else "not measured"
    lines = [
        f"store:             {rate(found.store_bytes_per_s)}",
        f"load from memory:  {rate(found.memory_bytes_per_s)}",
        f"load from disk:    {rate(found.disk_bytes_per_s)}" + (f" ({why})" if why else ""),
        f"prefill:           {prefill}",
    ]
    if output is not None and not found.prefill_tokens_per_s:
        lines.append(
            f"written to {output}, without a prefill rate: clients skip no load by it; measure it with --engine, or "
            "say --prefill"
        )
    elif output is not None:
        lines.append(f"written to {output}: set POLARKV_CALIBRATION={output.absolute()} where clients run")
    return "\n".join(lines)
