"""`polarkv plan`: the cheapest cluster that has what is asked for, and why it is that one."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from polarkv_client.cli.common import Finite, console, json_option, table
from polarkv_client.cli.trace import BLOCK_TOKENS, read_trace
from polarkv_client.errors import ConfigurationError
from polarkv_client.settings_cli import parse_size
from polarkv_dataplane.planner.cli.asking import (
    GIB,
    MIB,
    given,
    kv_bytes,
    model_options,
    parse_rate,
    parse_tokens,
    prices_option,
    progress_bar,
    refuse,
    whole,
)
from polarkv_dataplane.planner.cli.engines import engine_options, engines_of
from polarkv_dataplane.planner.explain import UNITS, Explanation, explain
from polarkv_dataplane.planner.manifest import LAYOUTS, cluster_yaml
from polarkv_dataplane.planner.prices import Offer, PriceFile, load_prices, micro, offers
from polarkv_dataplane.planner.search import Demand, Fleet, Terms, cheapest, largest
from polarkv_dataplane.planner.shapes import SHAPES
from polarkv_dataplane.planner.sim.scenario import Hardware, Organisation, Scenario
from polarkv_dataplane.planner.sim.workload import check_lengths

if TYPE_CHECKING:
    from rich.console import Console

    from polarkv_dataplane.planner.goal import Tried

# What is raised, in the demand's units, and by which step.
_MOST = {
    "bandwidth": (["bandwidth", "disk_bandwidth"], 1_000_000),
    "capacity": (["capacity_gib"], 1),
    "memory": (["memory_mib"], 1024),
}
_OF_A_TRACE = "--ttft-of --limit --jobs --engines --gpu --gpus --gpu-utilization --calibration"
_DEMANDS = "--bandwidth --disk-bandwidth --capacity --memory --maximize --context --sessions --loads --load-seconds"


@dataclass(frozen=True)
class Plan:
    """The answer for one market: fleets, the cheapest first, and what is said about the first."""

    offer: Offer
    demand: Demand
    fleets: list[Fleet]
    explanation: Explanation


def make_plan(
    offer: Offer, prices: PriceFile, demand: Demand, terms: Terms, budget: float | None,
    maximize: tuple[Sequence[str], int] | None,
) -> Plan | None:  # fmt: skip
    """Plan in one market; None when nothing there will do. ``maximize``: fields of the demand, and by which step."""
    if budget is None:
        found = cheapest(offer, demand, terms)
    elif maximize is None:
        found = [fleet for fleet in cheapest(offer, demand, terms) if fleet.cost_micro <= micro(budget)]
    else:
        fields, step = maximize
        found = largest(offer, demand, terms, fields, step, micro(budget))
        if found:
            best = found[0]
            has = Demand(best.network_bytes_per_s, best.disk_bytes_per_s, best.capacity_gib, best.memory_mib)
            reached = min(getattr(has, field) for field in fields) // step * step
            demand = replace(demand, **{field: max(reached, getattr(demand, field)) for field in fields})
    return Plan(offer, demand, found, explain(offer, prices, demand, terms, found[0])) if found else None


@click.command(short_help="Find the cheapest cluster for a bandwidth, a capacity, a model.")
@click.option("--bandwidth", metavar="RATE", help="What the network must serve, such as 12GB/s.")
@click.option("--disk-bandwidth", metavar="RATE", help="What must come from disks. Default: as --bandwidth.")
@click.option("--capacity", metavar="SIZE", help="Disk capacity of all cache nodes together.")
@click.option("--memory", metavar="SIZE", help="Memory for chunks of all cache nodes together.")
@click.option("--budget", type=Finite(0, 1e12, min_open=True), help="Most a month, in the market's currency.")
@click.option("--maximize", type=click.Choice(list(_MOST)), help="With --budget: get as much of this as it buys.")
@model_options
@click.option("--context", metavar="TOKENS", help="Length of a context, with --model: 32768, 128k.")
@click.option("--sessions", default=1, show_default=True, type=click.IntRange(1, 10**9), help="Contexts to keep.")
@click.option("--load-seconds", type=Finite(1e-6), help="Time to load one context.")
@click.option("--loads", default=1, show_default=True, type=click.IntRange(1, 10**9), help="Contexts loaded at once.")
@click.option("--trace", type=click.Path(path_type=Path), metavar="FILE", help="Plan for this trace, with --ttft.")
@click.option("--ttft", type=Finite(0, min_open=True), metavar="SECONDS", help="First token within that.")
@click.option("--ttft-of", type=click.Choice(["mean", "p50", "p90", "p99"]), default="mean", show_default=True,
              help="Of the trace's requests.")  # fmt: skip
@click.option("--limit", type=click.IntRange(1), metavar="N", help="The first N requests of --trace only.")
@click.option("--jobs", "workers", type=click.IntRange(1), help="Simulations at once. Default: one a processor.")
@engine_options
@click.option("--pool", type=click.Choice(["paired", "memory"]), default="paired", show_default=True,
              help="Memory and disks on each node, or memory alone.")  # fmt: skip
@click.option("--network", type=click.Choice(["baseline", "burst"]), default="baseline", show_default=True,
              help="Which network bandwidth of a machine counts.")  # fmt: skip
@click.option("--disk-path", type=click.Choice(["baseline", "burst"]), default="baseline", show_default=True,
              help="Which bandwidth between a machine and its disks counts.")  # fmt: skip
@click.option("--reserve", default="1.5GiB", show_default=True, metavar="SIZE", help="Memory of a machine not used.")
@click.option("--system-disk/--no-system-disk", default=True, show_default=True, help="Count each machine's own disk.")
@click.option("--nominal", is_flag=True, help="Count whole machines: no reserve, no system disk.")
@click.option("--full-throughput", is_flag=True, help="Only disks large enough for their level's full throughput.")
@click.option("--io-size", default="1MiB", show_default=True, metavar="SIZE", help="Of one read, for limits of IOPS.")
@click.option("--nodes", "node_range", type=(click.IntRange(1, 512), click.IntRange(1, 512)), default=(1, 512),
              show_default=True, metavar="LEAST MOST", help="How many cache nodes.")  # fmt: skip
@click.option("--arch", type=click.Choice(["amd64", "arm64", "any"]), default="amd64", show_default=True)
@click.option("--rdma", is_flag=True, help="Only machines that are known to have RDMA.")
@click.option("--instance", "instances", multiple=True, metavar="GLOB", help="Only these types; may be repeated.")
@click.option("--disk", "levels", multiple=True, metavar="GLOB", help="Only these disks; may be repeated.")
@prices_option
@click.option("--output", "-o", type=click.Choice(["text", "cr"]), default="text", show_default=True,
              help="cr: a PolarKVCluster and its storage class, for kubectl apply.")  # fmt: skip
@click.option("--name", default="polarkv", show_default=True, help="Name of the PolarKVCluster.")
@click.option("--namespace", default="polarkv", show_default=True, help="Its namespace.")
@click.option("--layout", type=click.Choice(LAYOUTS), default="JBOD", show_default=True, help="Of its volumes.")
@click.option("--rdma-resource", metavar="NAME", help="Device plugin's resource, such as aliyun/erdma.")
@click.option("--list-models", is_flag=True, help="Show the table of models and end.")
@json_option
def plan(as_json: bool, prices: Path | None, market: str | None, list_models: bool, **asked: Any) -> None:
    """Find the cheapest cluster that has what is asked for: machine type, count, disks of each, level and size.

    Nothing is approximated: every combination is priced, or proved dearer by a bound. Shown with the answer: other
    machine types, what each demand costs, what one more GB/s or TB would, and where the prices come from.
    """
    if list_models:
        refuse(" ".join(given().keys() - {"--list-models", "--dtype", "--json"}), "does not go with --list-models")
        _show_models(as_json, asked["dtype"])
        return
    _check_flags(asked)
    file = load_prices(prices)
    if asked["trace"] or asked["ttft"]:
        _plan_for_trace(file, market, as_json, asked)
        return
    demand, terms = _demand(asked), _terms(asked)
    budget, maximize = asked["budget"], _maximize(asked)
    if maximize is None and demand == Demand():
        raise ConfigurationError(
            "--bandwidth", asked["bandwidth"],
            "say what is needed: more than nothing of --bandwidth, --capacity, --memory, --model with --context, …"
        )  # fmt: skip
    plans = []
    for offer in offers(file, market):
        made = make_plan(offer, file, demand, terms, budget, maximize)
        if made is not None:
            plans.append(made)
    if not plans:
        raise click.ClickException(_why_none(file, market, demand, terms, budget))
    if asked["output"] == "cr":
        _write_cr(plans, asked)
    elif as_json:
        click.echo(json.dumps([_as_json(made) for made in plans], indent=2))
    else:
        for made in plans:
            _show(console(), made)


def _check_flags(asked: dict[str, Any]) -> None:
    """Refuse flags that would be without effect beside others."""
    if asked["nominal"]:
        refuse("--reserve --system-disk", "--nominal counts whole machines, no system disks: leave one of them out")
    if asked["pool"] == "memory":
        of_disks = "--disk-path --full-throughput --io-size --disk --layout --capacity --disk-bandwidth"
        refuse(of_disks, "--pool memory has no disks: leave one of them out")
        if asked["maximize"] == "capacity":
            raise ConfigurationError("--maximize", "capacity", "--pool memory has no disks: say memory or bandwidth")
    if asked["output"] == "cr":
        refuse("--json", "-o cr prints YAML: leave one of them out")
    else:
        refuse("--name --namespace --layout --rdma-resource", "is of a PolarKVCluster: say -o cr too")
    if asked["trace"] or asked["ttft"]:
        refuse(_DEMANDS + " --pool", "with --trace the demands are made from the trace: leave one of them out")
        if asked["calibration"]:
            refuse("--gpu --gpu-utilization", "--calibration says how fast an engine is: leave one of them out")
    else:
        refuse(_OF_A_TRACE, "says how a trace is simulated: say --trace and --ttft too")
        if asked["model"]:
            refuse("--kv-bytes-per-token", "--model says how much KV a token has: leave one of them out")
        if asked["context"] is None:
            refuse("--sessions --loads", "counts contexts: say --context too")


def _maximize(asked: dict[str, Any]) -> tuple[Sequence[str], int] | None:
    if asked["maximize"] is None:
        return None
    if asked["budget"] is None:
        raise ConfigurationError("--maximize", asked["maximize"], "say --budget too: how much it may cost a month")
    fields, step = _MOST[asked["maximize"]]
    if asked["pool"] == "memory" or asked["disk_bandwidth"] is not None:
        fields = [field for field in fields if field != "disk_bandwidth"]
    return fields, step


def _plan_for_trace(file: PriceFile, market: str | None, as_json: bool, asked: dict[str, Any]) -> None:
    from polarkv_dataplane.planner.goal import candidates, cheapest_that_meets, least_ttft_s

    if not asked["trace"] or not asked["ttft"]:
        raise ConfigurationError("--ttft", asked["ttft"], "say both --trace and --ttft: the load and the goal")
    token = kv_bytes(asked["model"], asked["dtype"], asked["tensor_parallel"], asked["kv_bytes_per_token"])
    if token is None:
        raise ConfigurationError("--model", None, "say --model, or --kv-bytes-per-token")
    requests = list(islice(read_trace(asked["trace"]), asked["limit"]))
    if not requests:
        raise ConfigurationError("--trace", str(asked["trace"]), "has no request in it")
    check_lengths(requests)
    offer, terms, block_bytes = offers(file, market)[0], _terms(asked), token * BLOCK_TOKENS
    fleets = candidates(offer, requests, block_bytes, terms)
    if asked["budget"] is not None:
        fleets = [fleet for fleet in fleets if fleet.cost <= asked["budget"]]
    if not fleets:
        raise click.ClickException("no fleet that this trace asks for can be bought: loosen the limits or the budget")
    base = Scenario(
        Organisation.MEMORY, Hardware.of(fleets[0]), engines_of(requests, asked), block_bytes,
        stripes=asked["tensor_parallel"],
    )  # fmt: skip
    percent = None if asked["ttft_of"] == "mean" else float(asked["ttft_of"].removeprefix("p"))
    least_s = least_ttft_s(requests, base, percent)
    if least_s > asked["ttft"]:
        raise click.ClickException(
            f"no cluster reaches --ttft={asked['ttft']:g}: with everything in memory and endless bandwidth "
            f"{base.engines.count} engines need {least_s:.2f} s ({asked['ttft_of']}): ask for more time or --engines"
        )
    with progress_bar("candidates", len(fleets)) as on_run:
        tried = cheapest_that_meets(
            requests, fleets, base, asked["ttft"], percent, asked["workers"] or os.cpu_count() or 1, on_run
        )
    met = tried[-1] if tried[-1].ttft_s <= asked["ttft"] else None
    if asked["output"] == "cr" and met is not None:
        _print_cr(met.fleet, asked)
    elif as_json:
        rows = [{**_fleet_json(each.fleet), "ttft_s": round(each.ttft_s, 4)} for each in tried]
        click.echo(json.dumps({"met": met is not None, "candidates": len(fleets), "tried": rows}, indent=2))
    else:
        _show_tried(console(stderr=asked["output"] == "cr"), tried, met is not None, len(fleets), asked)
    if met is None:
        raise click.exceptions.Exit(1)


def _show_tried(out: Console, tried: Sequence[Tried], met: bool, count: int, asked: dict[str, Any]) -> None:
    right = ("nodes", "a month", "hits", "TTFT")
    shown = table("nodes", "machine", "disks of each", "a month", "hits", "TTFT", right=right,
                  title=f"{len(tried)} of {count} candidates, cheapest first; TTFT: {asked['ttft_of']}")  # fmt: skip
    for each in tried:
        fleet = each.fleet
        disks = f"{fleet.disks} × {fleet.disk.name} {fleet.bought.gib:,} GiB" if fleet.disk else "none"
        shown.add_row(
            str(fleet.nodes), fleet.machine.instance.name, disks, f"{fleet.cost:,.2f} {fleet.market.currency}",
            f"{each.result.percent(each.result.hits):.1f} %", f"{each.ttft_s:.2f} s",
        )  # fmt: skip
    out.print(shown)
    best = min(tried, key=lambda each: each.ttft_s)
    out.print(
        f"the last one meets the goal of {asked['ttft']:g} s"
        if met
        else f"none meets the goal of {asked['ttft']:g} s; the best has {best.ttft_s:.2f} s: raise --budget or --ttft, "
        "or plan for more than the grid's demands with --bandwidth and --memory"
    )


def _demand(asked: dict[str, Any]) -> Demand:
    bandwidth = parse_rate(asked["bandwidth"], "--bandwidth") if asked["bandwidth"] is not None else 0
    capacity_gib = whole(parse_size(asked["capacity"], "--capacity"), GIB) if asked["capacity"] is not None else 0
    memory_mib = whole(parse_size(asked["memory"], "--memory"), MIB) if asked["memory"] is not None else 0
    token = kv_bytes(asked["model"], asked["dtype"], asked["tensor_parallel"], asked["kv_bytes_per_token"])
    paired = asked["pool"] == "paired"
    if asked["context"] is not None:
        if token is None:
            raise ConfigurationError("--context", asked["context"], "say --model (or --kv-bytes-per-token) too")
        context_bytes = parse_tokens(asked["context"], "--context") * token
        if paired:
            capacity_gib = max(capacity_gib, whole(context_bytes * asked["sessions"], GIB))
        else:
            memory_mib = max(memory_mib, whole(context_bytes * asked["sessions"], MIB))
        if asked["load_seconds"]:
            bandwidth = max(bandwidth, round(context_bytes * asked["loads"] / asked["load_seconds"]))
    elif token is not None or asked["load_seconds"]:
        raise ConfigurationError("--context", None, "say how many tokens a context has, such as --context 32k")
    disk_bandwidth = bandwidth if paired else 0
    if asked["disk_bandwidth"] is not None:
        disk_bandwidth = parse_rate(asked["disk_bandwidth"], "--disk-bandwidth")
    return Demand(bandwidth, disk_bandwidth, capacity_gib, memory_mib)


def _terms(asked: dict[str, Any]) -> Terms:
    least, most = asked["node_range"]
    if least > most:
        raise ConfigurationError("--nodes", f"{least} {most}", "the first number is the smaller one")
    nominal = asked["nominal"]
    io_bytes = parse_size(asked["io_size"], "--io-size")
    if io_bytes < 4096:
        raise ConfigurationError("--io-size", asked["io_size"], "use at least 4KiB")
    return Terms(
        disks=asked["pool"] == "paired",
        network_burst=asked["network"] == "burst",
        disk_burst=asked["disk_path"] == "burst",
        reserve_mib=0 if nominal else whole(parse_size(asked["reserve"], "--reserve"), MIB),
        system_disk=asked["system_disk"] and not nominal,
        full_throughput=asked["full_throughput"],
        io_bytes=io_bytes,
        least_nodes=least,
        most_nodes=most,
        arch=asked["arch"],
        rdma=asked["rdma"],
        instances=asked["instances"],
        levels=asked["levels"],
    )


def _why_none(file: PriceFile, market: str | None, demand: Demand, terms: Terms, budget: float | None) -> str:
    """Which single demand or limit stands in the way."""
    for offer in offers(file, market):
        if terms.disks and not offer.disks:
            return f"no disk of {offer.market.name} has a price: add some to a file of your own, or say --pool memory"
        if budget is not None and (found := cheapest(offer, demand, terms, keep=1)):
            return (
                f"nothing fits in the budget: the cheapest in {offer.market.name} costs {found[0].cost:,.2f} "
                f"{offer.market.currency} a month"
            )
        for unit in UNITS:
            asked = getattr(demand, unit.fields[0])
            if asked and cheapest(offer, replace(demand, **{unit.fields[0]: 0}), terms, keep=1):
                return f"no fleet has {unit.name} of {unit.show(asked)} with the rest: ask for less or allow more nodes"
        if cheapest(offer, demand, Terms(disks=terms.disks, arch="any"), keep=1):
            return "no fleet is left: loosen --instance, --disk, --arch, --rdma, --reserve or --nodes"
    return f"no fleet of {terms.most_nodes} nodes has all that is asked for"


def _write_cr(plans: list[Plan], asked: dict[str, Any]) -> None:
    if len(plans) > 1:
        names = ", ".join(made.offer.market.name for made in plans)
        raise ConfigurationError("--market", None, f"say which market the cluster is for: {names}")
    _print_cr(plans[0].fleets[0], asked)


def _print_cr(fleet: Fleet, asked: dict[str, Any]) -> None:
    text = cluster_yaml(fleet, asked["name"], asked["namespace"], asked["layout"], asked["rdma_resource"])
    click.echo(text, nl=False)


def _fleet_json(fleet: Fleet) -> dict[str, Any]:
    return {
        "instance": fleet.machine.instance.name,
        "nodes": fleet.nodes,
        "disk": fleet.disk.name if fleet.disk else None,
        "disks_per_node": fleet.disks,
        "disk_gib": fleet.bought.gib,
        "disk_extra_bytes_per_s": fleet.bought.extra_bytes_per_s,
        "network_bytes_per_s": fleet.network_bytes_per_s,
        "disk_bytes_per_s": fleet.disk_bytes_per_s,
        "capacity_gib": fleet.capacity_gib,
        "memory_gib": fleet.memory_mib / 1024,
        "cost_month": round(fleet.cost, 2),
        "currency": fleet.market.currency,
    }


def _as_json(made: Plan) -> dict[str, Any]:
    return {
        "market": made.offer.market.name,
        "fleet": _fleet_json(made.fleets[0]),
        "runners_up": [_fleet_json(fleet) for fleet in made.fleets[1:]],
        "demands": {
            price.unit.name.replace(" ", "_"): {
                "asked": price.asked,
                "has": price.has,
                "binding": price.binding,
                "saved_without": price.saved_without,
                f"one_more_{price.unit.step_name.replace(' ', '_').replace('/', '_per_')}": price.one_more,
            }
            for price in made.explanation.prices
        },
        "limits": made.explanation.limits,
        "cautions": made.explanation.cautions,
    }


def _show(out: Console, made: Plan) -> None:
    currency = made.offer.market.currency
    best = made.fleets[0]
    right = ("nodes", "a month", "more", "network", "from disk", "disk", "memory")
    shown = table("nodes", "machine", "disks of each", "a month", "more", "network", "from disk", "disk", "memory",
                  title=f"{made.offer.market.name}: the cheapest, and other machines", right=right)  # fmt: skip
    for fleet in made.fleets:
        disks = f"{fleet.disks} × {fleet.disk.name} {fleet.bought.gib:,} GiB" if fleet.disk else "none"
        if fleet.bought.extra_bytes_per_s:
            disks += f" +{fleet.bought.extra_bytes_per_s / 1e6:.0f} MB/s"
        shown.add_row(
            str(fleet.nodes), fleet.machine.instance.name, disks, f"{fleet.cost:,.2f} {currency}",
            "" if fleet is best else f"+{100 * (fleet.cost / best.cost - 1) if best.cost else 0:.1f} %",
            UNITS[0].show(fleet.network_bytes_per_s), UNITS[1].show(fleet.disk_bytes_per_s),
            UNITS[2].show(fleet.capacity_gib), UNITS[3].show(fleet.memory_mib),
        )  # fmt: skip
    out.print(shown)
    why = table("demand", "asked", "has", "costs", "one more", title="What each demand does to the bill",
                right=("asked", "has", "costs", "one more"))  # fmt: skip
    for price in made.explanation.prices:
        more = "not to be had" if price.one_more is None else f"{price.one_more:+,.2f} for {price.unit.step_name}"
        why.add_row(
            price.unit.name + (" [bold](binding)[/]" if price.binding else ""),
            price.unit.show(price.asked) if price.asked else "", price.unit.show(price.has),
            f"{price.saved_without:,.2f}" if price.asked else "", more,
        )  # fmt: skip
    out.print(why)
    for line in (*made.explanation.limits, *made.explanation.cautions):
        out.print(f"· {line}", markup=False, soft_wrap=True)
    out.print()


def _show_models(as_json: bool, dtype: str) -> None:
    if as_json:
        each = [{**shape._asdict(), "kv_bytes_per_token": shape.kv_bytes_per_token(dtype)} for shape in SHAPES.values()]
        click.echo(json.dumps(each, indent=2))
        return
    right = ("layers", "KV heads", "head size", "MLA rank", "bytes per token", "GiB for 32k")
    made = table("model", *right, title=f"KV of public models, {dtype}", right=right)
    for shape in SHAPES.values():
        token = shape.kv_bytes_per_token(dtype)
        heads = ("", "", f"{shape.mla_rank} + {shape.rope_dim}") if shape.mla_rank else (
            str(shape.kv_heads), str(shape.head_dim), "")  # fmt: skip
        made.add_row(shape.name, str(shape.layers), *heads, f"{token:,}", f"{token * 32768 / GIB:.2f}")
    console().print(made)
