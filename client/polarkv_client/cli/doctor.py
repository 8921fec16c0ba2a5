"""`polarkv doctor`: what is missing on this machine, and the exact fix."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from polarkv_client import errors
from polarkv_client.cli.common import Session, find_connection, session_options, table
from polarkv_client.cli.doctor_checks import machine_findings
from polarkv_client.cli.findings import Finding, Level
from polarkv_client.cli.main import ExitCode
from polarkv_client.states import NodeState

if TYPE_CHECKING:
    from rich.console import Console

_COLOURS = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "red"}


def connection_findings(session: Session) -> Iterator[Finding]:
    """Whether the cluster that the session names, if it names one, can be reached and is whole."""
    named = find_connection(session.connection)
    try:
        settings = session.settings()
    except errors.ConfigurationError as error:
        if named is None and error.field == "--connection":
            text = "no cluster is named here, so none was looked at"
            yield Finding("connection", Level.OK, text, "'polarkv up' starts one; --connection FILE names one")
        else:
            yield Finding("connection", Level.FAIL, f"{error.field}={error.value!r}", error.fix)
        return
    try:
        with session.client() as client:
            status = client.status()
        yield Finding("connection", Level.OK, f"{status.endpoint}, tenant {status.tenant!r}, epoch {status.epoch}")
    except errors.PolarKVError as error:
        fix = "start it ('polarkv up'), or see the manager's log; is the path from here open?"
        if isinstance(error, errors.Unauthorized):
            fix = "use the token from the cluster's connection.json or the manager's tokens file"
        yield Finding("connection", Level.FAIL, f"{settings.endpoint}: {error}", fix)
        return
    if not settings.admin:
        yield Finding("cache nodes", Level.OK, "not looked at: the connection names no admin address")
        return
    try:
        with session.admin() as admin:
            nodes = admin.nodes()
    except errors.PolarKVError as error:
        yield Finding("cache nodes", Level.FAIL, str(error), "check admin and admin_token in the connection file")
        return
    yield _nodes_finding(nodes)


def _nodes_finding(nodes: list[dict[str, object]]) -> Finding:
    found = ", ".join(f"{node['name']} {node['state']}" for node in nodes) or "none"
    active = sum(node["state"] == NodeState.ACTIVE for node in nodes)
    if not active:
        fix = "no cache node serves: see the slab and disk servers' logs"
        return Finding("cache nodes", Level.FAIL, found, fix)
    if active < len(nodes):
        fix = "the others are misses meanwhile: see their logs, or 'polarkv drain NODE --cancel'"
        return Finding("cache nodes", Level.WARN, found, fix)
    return Finding("cache nodes", Level.OK, found)


@click.command(short_help="Check this machine and the connection; say how to mend what is missing.")
@click.option(
    "--dir", "directory", type=click.Path(path_type=Path), default=Path(".polarkv"), show_default=True,
    help="Directory that the disk tier is to use.",
)  # fmt: skip
@session_options
def doctor(session: Session, directory: Path) -> None:
    """Look at everything that PolarKV needs or can use here. Exit code 1 when something needed is missing."""
    findings = [*machine_findings(directory.expanduser().absolute()), *connection_findings(session)]
    worst = max((finding.level for finding in findings), key=list(Level).index)
    data = {"level": worst.value, "checks": [asdict(finding) for finding in findings]}
    session.show(data, lambda out: _render(out, findings))
    if worst is Level.FAIL:
        click.get_current_context().exit(int(ExitCode.FAILED))


def _render(out: Console, findings: list[Finding]) -> None:
    from rich.markup import escape

    made = table("", "check", "found")
    made.columns[2].no_wrap = False
    for finding in findings:
        fix = f"\n[bold]fix:[/] {escape(finding.fix)}" if finding.fix and finding.level is not Level.OK else ""
        hint = f" ({finding.fix})" if finding.fix and finding.level is Level.OK else ""
        colour = _COLOURS[finding.level]
        made.add_row(f"[{colour}]{finding.level}[/]", finding.check, f"{escape(finding.found)}{escape(hint)}{fix}")
    out.print(made)
