"""`polarkv status` and `polarkv top`: the cluster at a glance, once or live."""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from polarkv_client.cli.admin_api import AdminClient
from polarkv_client.cli.common import Finite, Session, console, session_options, table
from polarkv_client.cli.main import ExitCode
from polarkv_client.errors import PolarKVError
from polarkv_client.settings_cli import show_size
from polarkv_client.states import NodeState

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

_STATE_COLOURS = {
    NodeState.ACTIVE: "green", NodeState.JOINING: "cyan", NodeState.DRAINING: "yellow", NodeState.DRAINED: "yellow",
    NodeState.DOWN: "red",
}  # fmt: skip
_RATES = (
    ("reads", ("hits_memory", "hits_disk", "misses")),
    ("memory hits", ("hits_memory",)),
    ("disk hits", ("hits_disk",)),
    ("stores", ("stored",)),
)


@dataclass(frozen=True)
class Sample:
    """What the manager said at a time (``time.monotonic()``)."""

    nodes: list[dict[str, Any]]
    stats: dict[str, Any]
    at: float

    @property
    def healthy(self) -> bool:
        """Whether there are cache nodes and every one is Active."""
        return bool(self.nodes) and all(node["state"] == NodeState.ACTIVE for node in self.nodes)

    def hit_rates(self, earlier: Sample | None = None) -> dict[str, float | None]:
        """Shares (0 … 1) of the keys read since ``earlier``, or the manager's start; None when there were none."""
        names = ("hits_memory", "hits_disk", "misses")
        counted = {name: self.stats[name] - (earlier.stats[name] if earlier else 0) for name in names}
        total = sum(counted.values())
        rates = {"memory": counted["hits_memory"], "disk": counted["hits_disk"]}
        rates["total"] = rates["memory"] + rates["disk"]
        return {name: count / total if total else None for name, count in rates.items()}

    def pool_kind(self, node: str) -> str:
        """What pages a node's memory has."""
        for name in self.stats["node_counters"].get(node, {}).get("slab", {}):
            if match := re.fullmatch(r'polarkv_pool_info\{kind="([^"]*)"\}', name):
                return match[1]
        return ""


def sample(admin: AdminClient) -> Sample:
    """Ask the manager."""
    return Sample(admin.nodes(), admin.stats(), time.monotonic())


def _bar(used: float, whole: float, width: int = 10) -> str:
    part = min(1.0, used / whole) if whole else 0.0
    full = round(part * width)
    colour = "green" if part < 0.85 else "yellow" if part < 0.97 else "red"
    return f"[{colour}]{'█' * full}[/][dim]{'░' * (width - full)}[/]"


def _use(used: int, whole: int) -> str:
    return f"{_bar(used, whole)} {show_size(used)} / {show_size(whole)}" if whole else "none"


def _percent(rate: float | None) -> str:
    return "–" if rate is None else f"{100 * rate:.1f} %"


def nodes_table(now: Sample) -> Table:
    """One row a cache node."""
    made = table("cache node", "state", "memory", "disk", "chunks in memory", "on disk only", "pages",
                 right=("chunks in memory", "on disk only"))  # fmt: skip
    for node in now.nodes:
        state = str(node["state"])
        colour = _STATE_COLOURS.get(NodeState(state), "white") if state in list(NodeState) else "white"
        complete = node.get("inventory_complete", True) or state == NodeState.DOWN  # an older manager does not say
        made.add_row(
            node["name"],
            f"[{colour}]{state}[/]" + ("" if complete else ", still reporting"),
            _use(node["memory_used_bytes"], node["memory_bytes"]),
            _use(node["disk_used_bytes"], node["disk_bytes"]),
            str(node["memory_entries"]),
            str(node["disk_only_entries"]),
            now.pool_kind(node["name"]),
        )
    return made


def _summary(now: Sample, earlier: Sample | None) -> list[str]:
    stats = now.stats
    rates = now.hit_rates(earlier)
    since = f"in the last {now.at - earlier.at:.0f} s" if earlier else f"since {stats['uptime_s']:.0f} s"
    states = ", ".join(f"{count} {name}" for name, count in stats["entries_by_state"].items() if count)
    lines = [
        f"hit rate {since}: [bold]{_percent(rates['total'])}[/] (memory {_percent(rates['memory'])}, "
        f"disk {_percent(rates['disk'])})",
        f"entries: {stats['entries']}" + (f" ({states})" if states else ""),
        f"leases {stats['leases']}, tickets {stats['tickets']}, waiting calls {stats['waiting_calls']}, "
        f"connections {stats['connections']}, pinned {show_size(stats['pinned_bytes'])}",
    ]
    if not stats["metadata_connected"]:
        lines.append("[yellow]the metadata store does not answer: a restarted manager has the nodes' word alone[/]")
    if stats["cross_node_bytes"]:
        lines.append(f"[red]{stats['cross_node_bytes']} bytes of tiering crossed between cache nodes: a defect[/]")
    return lines


def _rates(now: Sample, earlier: Sample) -> str:
    seconds = max(now.at - earlier.at, 1e-6)

    def rate(names: tuple[str, ...]) -> float:
        counts = now.stats["counts"], earlier.stats["counts"]
        return float(sum(counts[0].get(name, 0) - counts[1].get(name, 0) for name in names)) / seconds

    chunks = ", ".join(f"{name} {rate(names):.0f}/s" for name, names in _RATES)
    read, stored = rate(("read_bytes",)) / 1e9, rate(("stored_bytes",)) / 1e9
    return f"{chunks}; read {read:.2f} GB/s, stored {stored:.2f} GB/s"


@click.command(short_help="Cache nodes, tiers, use, hit rates.")
@session_options
def status(session: Session) -> None:
    """Show the cluster. Exit code 1 when a cache node is not Active."""
    with session.admin() as admin:
        now = sample(admin)
    data = {"healthy": now.healthy, "nodes": now.nodes, "hit_rates": now.hit_rates(), "stats": now.stats}
    session.show(data, lambda out: _render(out, now))
    if not now.healthy:
        click.get_current_context().exit(int(ExitCode.FAILED))


def _render(out: Console, now: Sample) -> None:
    out.print(nodes_table(now))
    for line in _summary(now, None):
        out.print(line)


@click.command(short_help="The same, live.")
@click.option("--interval", default=1.0, show_default=True, type=Finite(0.1, 60), metavar="SECONDS")
@click.option("--count", default=0, type=click.IntRange(0), metavar="N", help="Stop after N samples. Default: never.")
@session_options
def top(session: Session, interval: float, count: int) -> None:
    """Show the cluster again and again, with rates, until Ctrl-C. With --json one object a line."""
    earlier: Sample | None = None
    with session.admin() as admin:
        if session.as_json:
            _stream(session, admin, interval, count)
            return
        from rich.live import Live

        with Live(console=console(), auto_refresh=False, screen=console().is_terminal) as live:
            for _ in _ticks(interval, count):
                try:
                    now = sample(admin)
                    live.update(_screen(session, now, earlier), refresh=True)
                    earlier = now
                except PolarKVError as error:
                    # It may come back; who watches wants to see that.
                    live.update(f"[red]{error}[/]", refresh=True)
                    if count:
                        raise


def _ticks(interval_s: float, count: int) -> Iterator[None]:
    """``count`` times, or without end when it is 0, with a pause in between."""
    for done in itertools.count(1):
        yield
        if done == count:
            return
        time.sleep(interval_s)


def _screen(session: Session, now: Sample, earlier: Sample | None) -> RenderableType:
    from rich.console import Group

    lines = _summary(now, earlier)
    if earlier is not None:
        lines.insert(1, _rates(now, earlier))
    title = f"[bold]PolarKV[/] {session.settings().endpoint}  up {now.stats['uptime_s']:.0f} s  Ctrl-C ends"
    return Group(title, nodes_table(now), *lines)


def _stream(session: Session, admin: AdminClient, interval: float, count: int) -> None:
    earlier: Sample | None = None
    for _ in _ticks(interval, count):
        now = sample(admin)
        data = {"healthy": now.healthy, "nodes": now.nodes, "hit_rates": now.hit_rates(earlier), "stats": now.stats}
        click.echo(json.dumps(data))
        earlier = now
