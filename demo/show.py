"""The demo's course: one prompt in three processes, then a trace; tables, a picture, and a check of every claim."""

from __future__ import annotations

import argparse
import json
import os
import secrets
import signal
import subprocess
import sys
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.table import Table

from demo.checks import Check, judge_replay, judge_runs
from demo.cluster import ROOT, Cluster
from demo.run import Run
from polarkv_client.cli.common import console as make_console
from polarkv_client.cli.common import table as make_table
from polarkv_client.cli.trace import DEFAULT_SEED, generate_trace, lru_hit_rate, read_trace
from polarkv_client.layout import stride_bytes
from polarkv_client.settings_cli import parse_size

PUBLIC_TRACE = Path("..") / "shared" / "data" / "conversation_trace.jsonl"  # beside the checkout
NODES, MEMORY, DISK = 2, "64MiB", "640MiB"  # a node's; small, so that a minute of a trace needs both tiers
BLOCK_BYTES = 65_536 - 64  # with its header a block fills 64 KiB
_WORKER_S = 900.0
_TIERING_S = 60.0


def main() -> int:
    """Run the demo; returns its exit code."""
    options = _parse()
    signal.signal(signal.SIGTERM, _leave)  # so that the cluster is stopped then, too
    console = make_console()
    console.print(Panel.fit("[bold]PolarKV[/]: tier locally, serve globally", border_style="cyan"))
    console.print(f"starting a manager and {NODES} cache nodes, each with {MEMORY} of memory and {DISK} of disk")
    with Cluster(MEMORY, DISK, NODES) as cluster:
        runs = _prompt_part(console, cluster, options)
        replayed = _trace_part(console, cluster, options)
        crossed = cluster.metric("polarkv_tiering_cross_node_bytes_total")
    checks = [*judge_runs(runs), *judge_replay(replayed)]
    checks.append(Check("tiering never crossed the network", f"{crossed:.0f} bytes", crossed == 0))
    _picture(options.out, runs, replayed, checks)
    return _end(console, checks, options.out)


def _leave(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _prompt_part(console: Console, cluster: Cluster, options: argparse.Namespace) -> dict[str, Run]:
    """The prompt cold, from memory, and from disk: three processes, one after the other."""
    console.print(f"\n[bold]1. One prompt of {options.tokens:,} tokens, three inference processes[/]")
    salt = secrets.token_hex(8)
    runs = {"cold": _worker(console, cluster, options, salt, "a first process computes the prompt and stores its KV")}
    runs["memory"] = _worker(console, cluster, options, salt, "a second process finds it in memory")
    with console.status("moving every memory copy to disk"):
        cluster.move_memory_to_disk(_TIERING_S)
    runs["disk"] = _worker(console, cluster, options, salt, "a third process finds it on disk")
    console.print(_runs_table(runs))
    if runs["cold"].text:
        console.print(f"the model says: {runs['cold'].text!r}")
    return runs


def _worker(console: Console, cluster: Cluster, options: argparse.Namespace, salt: str, what: str) -> Run:
    command = [sys.executable, "-m", "demo.worker", "--connection", str(cluster.connection), "--salt", salt]
    for name in ("layers", "hidden", "tokens", "chunk_tokens"):
        command += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    if options.model:
        command += ["--model", str(options.model.resolve())]
    # Threads that wait for each other asleep: spinning, they lose seconds when the machine has other work.
    environment = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ}
    with console.status(what):
        done = subprocess.run(
            command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, timeout=_WORKER_S,
            check=False,
        )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"the inference process failed with exit code {done.returncode}; its words are above")
    run = Run(**json.loads(done.stdout))
    console.print(f"   {what}: first token after [bold]{run.ttft_s:.3f} s[/]")
    return run


def _runs_table(runs: dict[str, Run]) -> Table:
    columns = ("first token", "loading", "MB", "GB/s", "speed-up")
    table = make_table("process", *columns, "tokens", right=columns)
    table.caption, table.caption_justify = _model_line(runs["cold"]), "left"
    cold = runs["cold"]
    for name, run in runs.items():
        moved, seconds = (run.loaded_bytes, run.lookup_s) if run.loaded_bytes else (run.stored_bytes, run.store_s)
        same = run.generated == cold.generated
        table.add_row(
            {"cold": "cold", "memory": "from memory", "disk": "from disk"}[name],
            f"{run.ttft_s:.3f} s",
            f"{run.lookup_s * 1000:.1f} ms",
            f"{moved / 1e6:.1f}",
            f"{moved / seconds / 1e9:.2f}" if seconds else "–",
            f"{cold.ttft_s / run.ttft_s:.1f}×",
            "[green]identical[/]" if same else "[red]DIFFERENT[/]",
        )
    return table


def _model_line(run: Run) -> str:
    return (
        f"{run.model}: {run.parameters / 1e6:.0f} M weights, bfloat16, on the CPU; {run.bytes_per_token:,} bytes of KV "
        f"a token; {run.cacheable_tokens:,} of {run.prompt_tokens:,} tokens are in whole chunks"
    )


def _trace_part(console: Console, cluster: Cluster, options: argparse.Namespace) -> dict[str, Any]:
    """Replay a trace for about a minute; returns the replay's report with what an LRU of the same size would hit."""
    trace = options.trace or (ROOT / PUBLIC_TRACE if (ROOT / PUBLIC_TRACE).exists() else None)
    name = trace.name if trace else f"a generated trace with the public trace's statistics (seed {DEFAULT_SEED})"
    console.print(f"\n[bold]2. Replay of {name}[/]: {options.seconds:.0f} s, {BLOCK_BYTES:,} bytes a block")
    source = [str(trace)] if trace else ["--generate", str(DEFAULT_SEED)]
    command = [str(Path(sys.executable).parent / "polarkv"), "replay", *source, "--json", "--progress"]
    command += ["--block-bytes", str(BLOCK_BYTES), "--duration", str(options.seconds), "--concurrency", "4"]
    done = subprocess.run(
        command, env=cluster.environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        timeout=options.seconds + 120, check=False,
    )  # fmt: skip
    if not done.stdout.strip():
        raise SystemExit(f"`polarkv replay` failed with exit code {done.returncode}; its words are above")
    report: dict[str, Any] = json.loads(done.stdout)
    slots = NODES * (parse_size(MEMORY) + parse_size(DISK)) // stride_bytes(BLOCK_BYTES)
    requests = read_trace(trace) if trace else generate_trace(DEFAULT_SEED)
    report["lru_percent"] = 100 * lru_hit_rate(islice(requests, report["requests"]), slots)
    report["lru_blocks"] = slots
    console.print(_replay_table(report))
    return report


def _replay_table(report: dict[str, Any]) -> Table:
    table = make_table("blocks", "share", "what", right=("blocks", "share"))
    table.add_row(f"{report['blocks']:,}", "100.0 %", f"named by {report['requests']:,} requests")
    for name, what in (
        ("", f"hits, {report['bytes_loaded'] / 1e9:.2f} GB loaded"),
        ("memory_", "  [cyan]from memory[/]"),
        ("disk_", "  [blue]from disk[/]"),
    ):
        table.add_row(f"{report[name + 'hits']:,}", f"{report[name + 'hit_percent']:.1f} %", what)
    table.add_row("", f"{report['lru_percent']:.1f} %", f"what an LRU of {report['lru_blocks']:,} blocks would hit")
    table.add_row(f"{report['stored']:,}", "", f"stored, {report['bytes_stored'] / 1e9:.2f} GB")
    table.add_row(f"{report['corrupted']:,}", "", "with wrong bytes")
    return table


def _picture(path: Path, runs: dict[str, Run], report: dict[str, Any], checks: list[Check]) -> None:
    from demo import picture

    cold = runs["cold"]
    bars = [picture.Bar("Cold", "computed, then stored", cold.ttft_s, 1, picture.COLD)]
    for tier, color in (("memory", picture.MEMORY), ("disk", picture.DISK)):
        run = runs[tier]
        detail = f"{run.loaded_bytes / 1e6:.1f} MB at {run.loaded_bytes / run.lookup_s / 1e9:.1f} GB/s"
        bars.append(picture.Bar(f"From {tier}", detail, run.ttft_s, cold.ttft_s / run.ttft_s, color))
    same = all(run.generated == cold.generated for run in runs.values())
    facts = [
        f"{report['requests']:,} requests, {report['blocks']:,} blocks",
        f"{report['corrupted']} corrupted of {report['hits']:,} loaded",
        f"tiering moved {checks[-1].seen} across nodes",
    ]
    share = picture.TraceShare(
        "A trace, replayed", report["memory_hit_percent"], report["disk_hit_percent"], report["lru_percent"], facts
    )
    subheading = (
        f"{cold.prompt_tokens:,}-token prompt · {cold.model}, {cold.parameters / 1e6:.0f} M weights, bfloat16, CPU · "
        f"generated tokens {'identical' if same else 'DIFFERENT'} in all three processes"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.draw(path, "A prompt is computed once", subheading, bars, share)


def _end(console: Console, checks: list[Check], picture: Path) -> int:
    console.print("\n[bold]3. What was checked[/]")
    for check in checks:
        mark = "[green]✔[/]" if check.held else "[red]✘[/]"
        console.print(f"   {mark} {check.claim} ([{'dim' if check.held else 'red'}]{check.seen}[/])")
    console.print(f"\nThe picture of it: [bold]{picture}[/]")
    if failed := sum(not check.held for check in checks):
        console.print(f"[red bold]{failed} of {len(checks)} checks did not hold.[/]")
        return 1
    steps = Table.grid(padding=(0, 2))
    for command, what in (
        ("make demo ARGS='--model PATH'", "the same with your own model (a Hugging Face folder with full attention)"),
        ("make demo ARGS='--tokens 16384'", "a longer prompt: the cold time grows, a hit's hardly"),
        (".venv/bin/polarkv up --nodes 2", "a cluster that stays (after `make venv`); it says how to connect"),
        (".venv/bin/polarkv replay TRACE", "your own trace against it; `polarkv top` beside it shows it live"),
        ("make test", "what happens under kill -9, frozen processes, full disks and damaged files"),
    ):
        steps.add_row(f"[cyan]{command}[/]", what)
    console.print(Panel.fit(steps, title="try next", border_style="cyan", title_align="left"))
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="demo", description=__doc__)
    parser.add_argument("--model", type=Path, help="a model folder in the Hugging Face format; else random weights")
    parser.add_argument("--layers", type=int, default=8, help="layers of the random model")
    parser.add_argument("--hidden", type=int, default=512, help="its hidden size, a multiple of 64")
    parser.add_argument("--tokens", type=int, default=4160, help="tokens of the prompt")
    parser.add_argument("--chunk-tokens", type=int, default=256, help="tokens of a chunk")
    parser.add_argument("--trace", type=Path, help="else the public trace where it is, or a generated one")
    parser.add_argument("--seconds", type=float, default=45, help="how long to replay the trace")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "demo.png", help="where the picture goes")
    options = parser.parse_args()
    if options.tokens <= options.chunk_tokens or options.chunk_tokens < 1:
        parser.error(f"--tokens {options.tokens}: use more than one chunk (--chunk-tokens {options.chunk_tokens})")
    if options.hidden < 64 or options.hidden % 64 or options.layers < 1:
        parser.error(f"--hidden {options.hidden} --layers {options.layers}: use a multiple of 64, at least one layer")
    if options.trace and not options.trace.is_file():
        parser.error(f"--trace {options.trace}: there is no such file")
    return options
