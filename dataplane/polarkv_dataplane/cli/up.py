"""`polarkv up` and `polarkv down`: the embedded cluster."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import click

from polarkv_client.cli.common import console, json_option, output_options
from polarkv_client.cli.main import ExitCode
from polarkv_client.errors import ConfigurationError
from polarkv_client.settings_cli import Section, show_size
from polarkv_dataplane.cli.servers import log_level_option
from polarkv_dataplane.embedded.places import Places, read_json
from polarkv_dataplane.embedded.settings import UpSettings
from polarkv_dataplane.embedded.starter import end_supervisor, start_supervisor, stop_directory

UP = Section("up", UpSettings)


@click.command(short_help="Start a cluster on this machine.")
@UP.options()
@click.option(
    "--detach/--foreground",
    default=False,
    help="Return once it is ready, or stay until Ctrl-C (the default) and stop it then.",
)
@log_level_option
@output_options
def up(config: Path | None, as_json: bool, log_level: str, detach: bool, **flags: Any) -> None:
    """Start a manager and cache nodes as processes of this machine, and say how to connect.

    Every size is of each cache node. The directory keeps files, metadata and tokens: a later start on it serves what is
    on disk. A server that dies is started again; nothing outlives the supervisor. With --config FILE the servers read
    their sections [manager], [slab] and [disk] from it too; their environment variables reach them as well.
    """
    settings: UpSettings = UP.load(flags, config)
    with _signals_as_interrupts():
        process = start_supervisor(settings, attached=not detach, config=config, log_level=log_level)
        try:
            _announce(settings, process.pid, as_json=as_json, detach=detach)
            if detach:
                # It is no longer ours to wait for.
                process.returncode = 0
                return
            _relay(process, as_json=as_json)
            code = process.wait()
        except KeyboardInterrupt:
            if not as_json:
                console(stderr=True).print("stopping …")
            end_supervisor(process)
            return
    if code:
        log_file = Places(settings.dir).log("supervisor")
        raise click.ClickException(f"the supervisor ended with code {code}; see {log_file}")


@contextlib.contextmanager
def _signals_as_interrupts() -> Iterator[None]:
    """SIGTERM and SIGHUP end the wait as Ctrl-C does."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    earlier = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


def _relay(process: subprocess.Popen[bytes], *, as_json: bool) -> None:
    """Show what the supervisor says of servers that ended, until it ends."""
    assert process.stdout is not None
    for line in process.stdout:
        event = json.loads(line)
        if as_json:
            click.echo(json.dumps(event), err=True)
        elif "text" in event:
            click.secho(event["text"], err=True, fg="red" if event.get("event") == "crash loop" else "yellow")


def _announce(settings: UpSettings, pid: int, *, as_json: bool, detach: bool) -> None:
    places = Places(settings.dir)
    connection = read_json(places.connection)
    if as_json:
        known = {
            "state": "ready",
            "pid": pid,
            "dir": str(settings.dir),
            "connection": str(places.connection),
            "endpoint": connection["endpoint"],
            "admin": connection["admin"],
            "nodes": settings.nodes,
        }
        click.echo(json.dumps(known, indent=2))
        return
    usual = places.connection == Path(".polarkv").absolute() / places.connection.name
    named = "" if usual else f" --connection {shlex.quote(os.path.relpath(places.connection))}"
    down = "polarkv down" if usual else f"polarkv down --dir {shlex.quote(os.path.relpath(settings.dir))}"
    out = console()
    out.print(
        f"[bold green]PolarKV is up[/]: {settings.nodes} cache node{'s' * (settings.nodes > 1)}, each with "
        f"{show_size(settings.memory_bytes)} of memory and {show_size(settings.disk_bytes)} on disk"
    )
    out.print(f"  connect   SyncClient.connect({str(places.connection)!r})", soft_wrap=True)
    out.print(f"  look      polarkv status{named}", soft_wrap=True)
    out.print(f"  try       polarkv put FILE{named}", soft_wrap=True)
    out.print(f"  admin     {connection['admin']}/docs", soft_wrap=True)
    out.print(f"  logs      {places.log('manager').parent}", soft_wrap=True)
    out.print(f"  stop      {down if detach else 'Ctrl-C'}", soft_wrap=True)


@click.command(short_help="Stop the cluster of a directory.")
@click.option(
    "--dir", "directory", type=click.Path(path_type=Path), default=Path(".polarkv"), show_default=True,
    envvar="POLARKV_UP_DIR", show_envvar=True, help="Directory of the cluster.",
)  # fmt: skip
@json_option
def down(as_json: bool, directory: Path) -> None:
    """Stop the cluster that runs in a directory, whoever started it. What is on disk stays, what is in memory goes."""
    directory = directory.expanduser().absolute()
    if not directory.is_dir():
        raise ConfigurationError(
            "--dir", str(directory), "there is no such directory: name the one given to 'polarkv up'"
        )
    stopped = stop_directory(directory)
    if as_json:
        click.echo(json.dumps({"dir": str(directory), "stopped": stopped}))
    else:
        console().print(f"stopped the cluster in {directory}" if stopped else f"no cluster runs in {directory}")
    if not stopped:
        click.get_current_context().exit(int(ExitCode.FAILED))
