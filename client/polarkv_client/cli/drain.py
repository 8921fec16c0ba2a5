"""`polarkv drain`: empty a cache node before it goes, or take it back."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from polarkv_client.cli.admin_api import AdminClient
from polarkv_client.cli.common import Session, console, session_options
from polarkv_client.cli.main import ExitCode
from polarkv_client.errors import ConfigurationError, PolarKVError
from polarkv_client.states import DrainMode, NodeState

if TYPE_CHECKING:
    from rich.console import Console

_POLL_S = 0.1


@click.command(short_help="Empty a cache node, or take it back.")
@click.argument("node")
@click.option("--cancel", is_flag=True, help="Take the node back into service.")
@click.option("--discard", is_flag=True, help="Drop memory copies. Default: write them to disk first.")
@click.option("--wait", is_flag=True, help="Wait until it is drained (with --cancel: Active).")
@click.option("--timeout", "timeout_s", default=120.0, show_default=True, metavar="SECONDS", help="Longest wait.")
@session_options
def drain(session: Session, node: str, cancel: bool, discard: bool, wait: bool, timeout_s: float) -> None:
    """Stop granting on cache node NODE, wait for grants to end, then write its memory copies to disk."""
    if cancel and discard:
        raise click.UsageError("--discard says how to drain; it does not go with --cancel")
    with session.admin() as admin:
        known = find_node(admin, node)
        if cancel:
            admin.cancel_drain(node)
            wanted = {NodeState.ACTIVE}
        else:
            admin.drain(node, DrainMode.DISCARD if discard else DrainMode.FLUSH)
            wanted = {NodeState.DRAINED}
        known = _await(session, admin, node, wanted, timeout_s) if wait else find_node(admin, node)
    session.show(known, lambda out: _render(out, known))
    if wait and known["state"] not in wanted:
        click.get_current_context().exit(int(ExitCode.FAILED))


def find_node(admin: AdminClient, name: str) -> dict[str, Any]:
    """The node of that name.

    Raises:
        ConfigurationError: there is none.
    """
    nodes = admin.nodes()
    for node in nodes:
        if node["name"] == name:
            return node
    names = ", ".join(str(node["name"]) for node in nodes) or "none"
    raise ConfigurationError("NODE", name, f"there is no such cache node; there are: {names}")


def _await(session: Session, admin: AdminClient, name: str, wanted: set[NodeState], timeout_s: float) -> dict[str, Any]:
    deadline = time.monotonic() + timeout_s
    goal = ", ".join(sorted(wanted))
    with console(stderr=True).status(f"waiting until {name} is {goal} …") as line:
        while True:
            node = find_node(admin, name)
            if node["state"] in wanted or node["state"] == NodeState.DOWN:
                return node
            if time.monotonic() >= deadline:
                raise PolarKVError(f"{name} is still {node['state']} after {timeout_s:g} s; it goes on by itself")
            line.update(f"{name} is {node['state']}; waiting until it is {goal} …")
            time.sleep(_POLL_S)


def _render(out: Console, node: dict[str, Any]) -> None:
    out.print(f"{node['name']} is [bold]{node['state']}[/]")
