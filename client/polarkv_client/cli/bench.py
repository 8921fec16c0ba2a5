"""`polarkv bench`: how fast this client stores to and loads from the running cluster, in a few seconds."""

from __future__ import annotations

import os
import secrets
import statistics
import time
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

import click

from polarkv_client.cli.common import Session, parse_chunk, progress, session_options, table
from polarkv_client.errors import PolarKVError
from polarkv_client.keys import Namespace, chunk_keys
from polarkv_client.results import Stored
from polarkv_client.settings_cli import show_size

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

    from polarkv_client.sync import SyncClient

_SAMPLE_BYTES = 1 << 20
_MARK_BYTES = 8
TO_REMOVE_S = 15.0  # leases and tickets of a call that was given up end before


@dataclass
class Bench:
    """What was measured. Rates are GB/s (10^9 bytes), one value a round; chunks are counted by what became of them.

    Six digits of a rate: a slow one has its first in the fourth.
    """

    chunk_bytes: int
    batch: int
    store_gb_per_s: list[float] = field(default_factory=list)
    load_gb_per_s: list[float] = field(default_factory=list)
    load_ms: list[float] = field(default_factory=list)
    transports: dict[str, str] = field(default_factory=dict)
    not_stored: int = 0
    missed: int = 0
    corrupted: int = 0

    def medians(self) -> dict[str, float]:
        """The medians of the rounds."""
        rates = {"store_gb_per_s": self.store_gb_per_s, "load_gb_per_s": self.load_gb_per_s, "load_ms": self.load_ms}
        return {name: round(statistics.median(values), 6) if values else 0.0 for name, values in rates.items()}


def measure(
    client: SyncClient, bench: Bench, rounds: int, advance: Callable[[int], None], used: list[bytes]
) -> None:  # fmt: skip
    """Store and load ``rounds`` batches, comparing every byte.

    Keys are added to ``used`` before they are stored: who is interrupted can remove them.
    """
    sample = os.urandom(min(_SAMPLE_BYTES, bench.chunk_bytes))
    repeated = (sample * -(-bench.chunk_bytes // len(sample)))[: bench.chunk_bytes]
    sources = [bytearray(repeated) for _ in range(bench.batch)]
    targets = [bytearray(bench.chunk_bytes) for _ in range(bench.batch)]
    namespace = Namespace(model_id=f"bench/{secrets.token_hex(8)}", chunk_tokens=1)
    batch_bytes = bench.batch * bench.chunk_bytes
    for number in range(rounds):
        keys = chunk_keys(namespace, range(number * bench.batch, (number + 1) * bench.batch))[-bench.batch :]
        used += keys
        for place, source in enumerate(sources):
            mark = (number * bench.batch + place).to_bytes(_MARK_BYTES, "little")[: bench.chunk_bytes]
            source[: len(mark)] = mark
        begun = time.perf_counter()
        stored = client.store(keys, sources)
        store_s = time.perf_counter() - begun
        begun = time.perf_counter()
        loaded = client.load(keys, targets)
        load_s = time.perf_counter() - begun
        bench.not_stored += sum(chunk.outcome is not Stored.STORED for chunk in stored.chunks)
        bench.missed += sum(not chunk.hit for chunk in loaded.chunks)
        pairs = zip(loaded.chunks, sources, targets, strict=True)
        bench.corrupted += sum(chunk.hit and source != target for chunk, source, target in pairs)
        bench.store_gb_per_s.append(round(batch_bytes / store_s / 1e9, 6))
        bench.load_gb_per_s.append(round(batch_bytes / load_s / 1e9, 6))
        bench.load_ms.append(round(load_s * 1000, 3))
        advance(2 * batch_bytes)
    bench.transports = {node.node: node.transport for node in client.status().nodes}


@click.command(short_help="Measure store and load bandwidth of the running cluster.")
@click.option("--chunk", default="1MiB", show_default=True, metavar="SIZE", help="Payload of one chunk.")
@click.option("--batch", default=16, show_default=True, type=click.IntRange(1, 1024), help="Chunks in one call.")
@click.option("--rounds", default=8, show_default=True, type=click.IntRange(1, 1000), help="Batches to store and load.")
@click.option(
    "--transport", type=click.Choice(["auto", "shm", "tcp"]), help="How bytes move. Default: as the client is set."
)
@click.option("--keep", is_flag=True, help="Leave the chunks in the cache instead of removing them (admin token).")
@session_options
def bench(session: Session, chunk: str, batch: int, rounds: int, transport: str | None, keep: bool) -> None:
    """Store fresh chunks and load them back, comparing every byte. A quick look, not a benchmark with peers."""
    chunk_bytes = parse_chunk(chunk, batch)
    result = Bench(chunk_bytes, batch)
    total_bytes = 2 * rounds * batch * chunk_bytes
    with (
        session.patient_client(transport=transport) as client,
        progress("bench", total_bytes, quiet=session.as_json) as advance,
    ):
        used: list[bytes] = []
        try:
            measure(client, result, rounds, advance, used)
        finally:
            if used and not keep and session.settings().admin:
                with session.admin() as admin:
                    admin.evict_within(used, TO_REMOVE_S, purge=True)
    session.show({**asdict(result), "median": result.medians()}, lambda out: _render(out, result))
    if result.corrupted:
        raise PolarKVError(f"{result.corrupted} chunks came back with wrong bytes")
    if result.not_stored or result.missed:
        click.get_current_context().exit(1)


def _render(out: Console, result: Bench) -> None:
    medians = result.medians()
    made = table("", "median", "lowest", "highest", right=("median", "lowest", "highest"))
    for name, values in (("store GB/s", result.store_gb_per_s), ("load GB/s", result.load_gb_per_s)):
        middle = medians[f"{name.split()[0]}_gb_per_s"]
        made.add_row(name, f"{middle:.2f}", f"{min(values):.2f}", f"{max(values):.2f}")
    ways = ", ".join(f"{node} by {transport}" for node, transport in sorted(result.transports.items()))
    out.print(f"{len(result.load_ms)} batches of {result.batch} × {show_size(result.chunk_bytes)}; {ways}")
    out.print(made)
    if result.not_stored or result.missed:
        lost = f"{result.not_stored} chunks not stored, {result.missed} not found again"
        out.print(f"[yellow]{lost}: too little memory?[/]")
