"""`polarkv simulate`: what a trace would see of clusters that cost the same."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import click

from polarkv_client.cli.common import console, json_option, table
from polarkv_client.cli.trace import (
    BLOCK_TOKENS,
    CONVERSATION_REQUESTS,
    Request,
    generate_trace,
    lru_hit_rate,
    read_trace,
)
from polarkv_client.errors import ConfigurationError
from polarkv_client.settings_cli import parse_size
from polarkv_dataplane.planner.cli.asking import (
    GIB,
    MIB,
    check_folder,
    kv_bytes,
    model_options,
    parse_rate,
    prices_option,
    progress_bar,
    refuse,
    whole,
)
from polarkv_dataplane.planner.cli.engines import engine_options, engines_of
from polarkv_dataplane.planner.prices import load_prices, offers
from polarkv_dataplane.planner.report.tables import Row, less_percent, rows
from polarkv_dataplane.planner.search import Demand, Terms
from polarkv_dataplane.planner.sim.comparison import Clusters, fleets, jobs
from polarkv_dataplane.planner.sim.scenario import Hardware, Organisation, Scenario
from polarkv_dataplane.planner.sim.sweep import Job, run_all
from polarkv_dataplane.planner.sim.workload import check_lengths

_LRU_POINTS = 12
_LEAST, _MOST = 1e-3, 1e9
_BUYING = "--budget --bandwidth --memory --capacity --nominal --disk-path --prices --market"
_OWN = "--node-memory --node-disk --node-network --node-disk-bandwidth"


def _numbers(text: str, field: str) -> list[float]:
    """``1,2.5`` as numbers.

    Raises:
        ConfigurationError: one is no positive number.
    """
    try:
        found = [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        found = []
    if not found or not all(_LEAST <= number <= _MOST for number in found):
        raise ConfigurationError(field, text, f"use positive numbers ({_LEAST:g} to {_MOST:g}), separated by commas")
    return found


@click.command(short_help="Simulate a trace on clusters of equal budget.")
@click.argument("trace", type=click.Path(path_type=Path), required=False)
@click.option("--generate", "seed_of_trace", type=int, metavar="SEED", help="Make a trace like the public one instead.")
@click.option("--limit", type=click.IntRange(1), metavar="N", help="The first N requests only.")
@model_options
@click.option("--budget", "budgets", default="18414", show_default=True, metavar="N,N", help="What a month may cost.")
@click.option("--bandwidth", default="12GB/s", show_default=True, metavar="RATE", help="What each cluster must serve.")
@click.option("--memory", metavar="SIZE", help="Memory that the paired cluster must have.")
@click.option("--capacity", metavar="SIZE", help="Disk capacity of the paired cluster. Default: what the budget buys.")
@click.option("--nominal", is_flag=True, help="Count whole machines: no reserve, no system disk.")
@click.option("--disk-path", type=click.Choice(["baseline", "burst"]), default="baseline", show_default=True,
              help="Disks' bandwidth in the simulation.")  # fmt: skip
@prices_option
@click.option("--nodes", type=click.IntRange(1, 512), help="A cluster of your own instead of bought ones: nodes,")
@click.option("--node-memory", default="64GiB", show_default=True, metavar="SIZE", help="  memory of each,")
@click.option("--node-disk", default="1TiB", show_default=True, metavar="SIZE", help="  disk of each,")
@click.option("--node-network", default="1.25GB/s", show_default=True, metavar="RATE", help="  network of each,")
@click.option("--node-disk-bandwidth", default="500MB/s", show_default=True, metavar="RATE", help="  disks of each.")
@click.option("--organisation", "organisations", multiple=True, type=click.Choice([str(o) for o in Organisation]),
              help="Which to simulate; may be repeated. Default: memory, disk, paired.")  # fmt: skip
@click.option("--working-sets", metavar="X,X", help="Shares of the trace, as multiples of the memory pool's size.")
@click.option("--speeds", default="1", show_default=True, metavar="X,X", help="Requests come so many times as fast.")
@click.option("--concurrency", default=0, type=click.IntRange(0), help="So many requests at once, without time stamps.")
@engine_options
@click.option("--loads-first/--in-order", default=False, show_default=True, help="Disks do loads before offloads.")
@click.option("--gate/--no-gate", default=False, show_default=True, help="Skip loads slower than computing.")
@click.option("--passes", default=1, show_default=True, type=click.IntRange(1, 10), help="The last one is reported.")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(-(1 << 63), (1 << 63) - 1),
              help="Of which conversations are kept, and where blocks lie.")  # fmt: skip
@click.option("--jobs", "workers", type=click.IntRange(1), help="Runs at once. Default: one a processor.")
@click.option("--output", "-o", type=click.Path(), metavar="DIR", help="Write tables, plots and a page.")
@click.option("--progress/--no-progress", default=None, help="Show a progress bar (default: on a terminal).")
@json_option
def simulate(
    trace: Path | None, seed_of_trace: int | None, limit: int | None, as_json: bool, progress: bool | None,
    workers: int | None, output: str | None, **asked: Any,
) -> None:  # fmt: skip
    """Simulate the requests of TRACE on a memory pool, a disk pool and paired tiers that cost the same a month.

    The same policies as the manager's, with virtual time: its own core runs, network and disks are queues. Reports what
    each finds in which tier, how long first tokens take, what crosses the network, and what it saves.
    """
    _check_flags(asked)
    if (trace is None) == (seed_of_trace is None):
        raise click.UsageError("name a TRACE file, or pass --generate SEED for a made one (not both)")
    if trace is None:
        assert seed_of_trace is not None
        requests = list(generate_trace(seed_of_trace, limit or CONVERSATION_REQUESTS))
    else:
        requests = list(islice(read_trace(trace), limit))
    if not requests:
        raise ConfigurationError("trace", str(trace), "has no request in it")
    check_lengths(requests)
    planned = _jobs(requests, asked)
    folder = None if output is None else check_folder(output)
    total = sum(round(len(requests) * job.share) * job.scenario.passes for job in planned)
    with progress_bar("requests", total, progress) as on_progress:
        results = run_all(requests, planned, workers or os.cpu_count() or 1, on_progress)
    found = rows(planned, results)
    assumptions = planned[0].scenario.assumptions()
    if folder is not None:
        _write(folder, requests, planned, found, assumptions)
    if as_json:
        click.echo(json.dumps({"assumptions": assumptions, "rows": found}, indent=2))
    else:
        _show(found, folder)


def _jobs(requests: Sequence[Request], asked: dict[str, Any]) -> list[Job]:
    token = kv_bytes(asked["model"], asked["dtype"], asked["tensor_parallel"], asked["kv_bytes_per_token"])
    if token is None:
        raise ConfigurationError("--model", None, "say --model, or --kv-bytes-per-token")
    chosen = [Organisation(name) for name in asked["organisations"]]
    chosen = chosen or [Organisation.MEMORY, Organisation.DISK, Organisation.PAIRED]
    bought = [_own_cluster(asked)] if asked["nodes"] else _bought(asked)
    base = Scenario(
        chosen[0], bought[0].hardware(chosen[0]), engines_of(requests, asked), token * BLOCK_TOKENS,
        stripes=asked["tensor_parallel"], concurrency=asked["concurrency"], loads_first=asked["loads_first"],
        gate=asked["gate"], passes=asked["passes"], seed=asked["seed"],
    )  # fmt: skip
    speeds = _numbers(asked["speeds"], "--speeds")
    working_sets = _numbers(asked["working_sets"], "--working-sets") if asked["working_sets"] is not None else ()
    return jobs(requests, bought, base, chosen, working_sets, speeds)


def _own_cluster(asked: dict[str, Any]) -> Clusters:
    hardware = Hardware(
        asked["nodes"],
        parse_size(asked["node_memory"], "--node-memory"), parse_size(asked["node_disk"], "--node-disk"),
        parse_rate(asked["node_network"], "--node-network"),
        parse_rate(asked["node_disk_bandwidth"], "--node-disk-bandwidth"),
    )  # fmt: skip
    return Clusters(0, hardware, hardware)


def _bought(asked: dict[str, Any]) -> list[Clusters]:
    bandwidth = parse_rate(asked["bandwidth"], "--bandwidth")
    demand = Demand(
        bandwidth, bandwidth,
        whole(parse_size(asked["capacity"], "--capacity"), GIB) if asked["capacity"] is not None else 0,
        whole(parse_size(asked["memory"], "--memory"), MIB) if asked["memory"] is not None else 0,
    )  # fmt: skip
    # Bought for bursts, as the article counts; what is simulated is said by --disk-path.
    terms = Terms(disk_burst=True, reserve_mib=0, system_disk=False) if asked["nominal"] else Terms(disk_burst=True)
    offer = offers(load_prices(asked["prices"]), asked["market"])[0]
    burst = asked["disk_path"] == "burst"
    budgets = _numbers(asked["budgets"], "--budget")
    return [fleets(offer, budget, demand, terms).clusters(disk_burst=burst) for budget in budgets]


def _check_flags(asked: dict[str, Any]) -> None:
    """Refuse flags that would be without effect beside others."""
    if asked["nodes"]:
        refuse(_BUYING, "--nodes describes a cluster that is not bought: leave one of them out")
    else:
        refuse(_OWN, "describes a cluster that is not bought: say --nodes too")
    if asked["concurrency"]:
        refuse("--speeds", "--concurrency ignores time stamps: leave one of them out")
    if asked["calibration"]:
        refuse("--gpu --gpu-utilization", "--calibration says how fast an engine is: leave one of them out")


def _write(folder: Path, requests: Sequence[Request], planned: Sequence[Job], found: list[Row], facts: Any) -> None:
    from polarkv_dataplane.planner.report.page import write_report
    from polarkv_dataplane.planner.report.plots import PLOTS, hits_by_capacity

    block_bytes = planned[0].scenario.block_bytes
    capacities = [row["memory_gib"] if row["organisation"] == "memory" else row["disk_gib"] for row in found]
    largest = max(capacities) * GIB / block_bytes
    points = [int(largest / 2**step) for step in range(_LRU_POINTS) if largest / 2**step >= 1]
    lru = [(blocks * block_bytes / GIB, 100 * lru_hit_rate(requests, blocks)) for blocks in reversed(points)]
    made = {name: plot(found) for name, plot in PLOTS.items()}
    made["hits-by-capacity"] = hits_by_capacity(found, lru if all(job.share >= 1 for job in planned) else ())
    pngs = {name: png for name, png in made.items() if png is not None}
    write_report(folder, "Simulated clusters of equal budget", found, pngs, facts, _notes(found))


def _notes(found: Sequence[Row]) -> list[str]:
    said = []
    for other in ("memory", "disk"):
        for row, less in less_percent(found, "paired", other):
            where = f"{row['cost_month']:,.0f} {row['currency']} a month, " if row["cost_month"] else ""
            said.append(
                f"{where}working set {row['working_set']} × the memory pool, load × {row['speed']}: mean TTFT of "
                f"paired tiers is {abs(less):.1f} % {'lower' if less >= 0 else 'higher'} than the {other} pool's"
            )
    return said


def _show(found: Sequence[Row], output: Path | None) -> None:
    out = console()
    right = ("budget", "working set", "load", "hits", "memory", "disk", "mean", "P50", "P90", "P99", "served",
             "tiering", "GPU h saved")  # fmt: skip
    made = table("budget", "working set", "load", "organisation", *right[3:], title="TTFT in s, bytes over the network",
                 right=right)  # fmt: skip
    for row in found:
        made.add_row(
            f"{row['budget']:,.0f}", f"{row['working_set']:.2f}", f"{row['speed']:g}", row["organisation"],
            f"{row['hit_percent']:.1f} %", f"{row['memory_hit_percent']:.1f} %", f"{row['disk_hit_percent']:.1f} %",
            *(f"{row[f'ttft_{name}_s']:.2f}" for name in ("mean", "p50", "p90", "p99")),
            f"{row['serving_bytes'] / 1e12:.2f} TB", f"{row['tiering_bytes'] / 1e12:.2f} TB",
            f"{row['gpu_seconds_saved'] / 3600:,.1f}",
        )  # fmt: skip
    out.print(made)
    for note in _notes(found):
        out.print(f"· {note}", markup=False, soft_wrap=True)
    if output is not None:
        out.print(f"tables, plots and report.html are in {output}")
