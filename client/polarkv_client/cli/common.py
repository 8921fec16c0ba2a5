"""What subcommands share: where the cluster is, tables or JSON, and progress bars on standard error."""

from __future__ import annotations

import functools
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from polarkv_client.config import CONNECTION_FILE, CONNECTION_VARIABLE, ClientConfig, load_config
from polarkv_client.errors import ConfigurationError, DeadlineExceeded, Unavailable
from polarkv_client.layout import MAX_PAYLOAD_BYTES
from polarkv_client.settings_cli import Section, Setting, parse_size, read_section, show_size

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from polarkv_client.cli.admin_api import AdminClient
    from polarkv_client.sync import SyncClient

CLIENT = Section("client", ClientConfig)
_WAIT_FOR_SPACE_MS = 10_000
_DEADLINE_MS = 30_000
_MOST_BATCH_BYTES = 2 << 30
_FOLDERS = (".polarkv", "~/.polarkv")


@dataclass(frozen=True)
class Session:
    """One run of a subcommand: how it was told to find the cluster, and how to answer."""

    as_json: bool
    connection: Path | None
    config: Path | None
    cluster: str | None = None  # NAMESPACE/NAME in Kubernetes

    def settings(self, **flags: Any) -> ClientConfig:
        """The client's settings: flags, then the environment, then the configuration file, then the connection file.

        Raises:
            ConfigurationError: one is wrong, or nothing says where the cluster is.
        """
        values = dict(flags)
        if self.config:
            by_name = {setting.name: setting for setting in CLIENT.settings()}
            for name, value in read_section(self.config, CLIENT).items():
                setting: Setting = by_name[name]
                if setting.variable not in os.environ and values.get(name) is None:
                    values[name] = setting.read(value, str(self.config))
        if self.cluster:
            from polarkv_client.cli.kubernetes import locate

            for name, value in locate(self.cluster).items():
                if f"POLARKV_{name.upper()}" not in os.environ and values.get(name) is None:
                    values[name] = value
            return load_config(self.connection, **values)
        found = find_connection(self.connection)
        if found is None and not values.get("endpoint") and "POLARKV_ENDPOINT" not in os.environ:
            raise ConfigurationError(
                "--connection", None,
                f"nothing says where the cluster is: start one with 'polarkv up', name its {CONNECTION_FILE} with "
                f"--connection or {CONNECTION_VARIABLE}, 'polarkv --cluster NAMESPACE/NAME' in Kubernetes, or set "
                "POLARKV_ENDPOINT and POLARKV_TOKEN",
            )  # fmt: skip
        return load_config(found, **values)

    def client(self, **flags: Any) -> SyncClient:
        """A connected client.

        Raises:
            Unavailable, DeadlineExceeded: nobody answers. Others as ``SyncClient.connect``.
        """
        from polarkv_client.host import host_id
        from polarkv_client.manager_client import ManagerClient
        from polarkv_client.sync import SyncClient

        config = self.settings(**flags)
        # The client would go on with misses; a person wants to know why nobody answers.
        probe = ManagerClient(config, host_id())
        try:
            probe.connect(time.monotonic() + (config.connect_timeout_ms + config.manager_timeout_ms) / 1000)
        except (Unavailable, DeadlineExceeded) as error:
            hint = "is the cluster up? ('polarkv up' starts one, 'polarkv doctor' looks)"
            raise type(error)(f"{error}; {hint}") from None
        finally:
            probe.close()
        return SyncClient.connect(config)

    def patient_client(self, **flags: Any) -> SyncClient:
        """As :meth:`client`, with longer waits where none are set: a person waits for it, not an inference engine."""
        patient = {"wait_for_space_ms": _WAIT_FOR_SPACE_MS, "deadline_ms": _DEADLINE_MS}
        told = self.settings(**flags).model_fields_set
        return self.client(**{name: ms for name, ms in patient.items() if name not in told}, **flags)

    def admin(self) -> AdminClient:
        """A client of the admin API."""
        from polarkv_client.cli.admin_api import AdminClient

        return AdminClient(self.settings())

    def show(self, data: Any, render: Callable[[Console], None]) -> None:
        """Print ``data`` as JSON where that was asked for, else what ``render`` prints."""
        if self.as_json:
            click.echo(json.dumps(data, indent=2, default=str))
        else:
            render(console())


def find_connection(named: Path | None) -> Path | None:
    """The connection file: the named one, else the environment's, else that of the usual places if it is there."""
    if named is not None:
        return named
    if from_environment := os.environ.get(CONNECTION_VARIABLE):
        return Path(from_environment)
    candidates = (Path(folder).expanduser() / CONNECTION_FILE for folder in _FOLDERS)
    return next((path for path in candidates if path.exists()), None)


def parse_chunk(text: str, batch: int = 1) -> int:
    """Bytes of ``--chunk``, of which a ``--batch`` is in memory at a time, once to store and once to load.

    Raises:
        ConfigurationError: it is no size, or none that a chunk can have, or a batch is larger than a machine bears.
    """
    chunk_bytes = parse_size(text, "--chunk")
    if not 1 <= chunk_bytes <= MAX_PAYLOAD_BYTES:
        raise ConfigurationError("--chunk", text, f"use 1B to {show_size(MAX_PAYLOAD_BYTES)}")
    if batch * chunk_bytes > _MOST_BATCH_BYTES:
        fix = f"{batch} chunks of {text} are more than {show_size(_MOST_BATCH_BYTES)}: use fewer or smaller ones"
        raise ConfigurationError("--batch", batch, fix)
    return chunk_bytes


class Finite(click.FloatRange):
    """A range of numbers, without NaN and infinity, which are within every range."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """As click does."""
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number.", param, ctx)
        return number


def json_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--json``."""
    return click.option("--json", "as_json", is_flag=True, help="Answer with JSON on standard output.")(command)


def output_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--json`` and ``--config``."""
    command = click.option(
        "--config",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Configuration file (TOML, or JSON by its suffix).",
    )(command)
    return json_option(command)


def session_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--connection``, ``--config`` and ``--json``; the command gets a :class:`Session` as its first argument."""

    @output_options
    @click.option(
        "--connection", type=click.Path(path_type=Path), metavar="FILE",
        help=f"Connection file of a cluster, or its folder. Default: ${CONNECTION_VARIABLE}, ./.polarkv/, ~/.polarkv/.",
    )  # fmt: skip
    @functools.wraps(command)
    def with_session(as_json: bool, connection: Path | None, config: Path | None, **others: Any) -> Any:
        # The command's own option, before the subcommand's name.
        cluster = click.get_current_context().find_root().params.get("cluster")
        return command(Session(as_json, connection, config, cluster), **others)

    return with_session


def console(*, stderr: bool = False) -> Console:
    """A console. Where standard output is no terminal, lines are as long as they need to be."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() or "COLUMNS" in os.environ else 160
    return Console(stderr=stderr, width=width, highlight=False, soft_wrap=False)


def table(*columns: str, title: str | None = None, right: tuple[str, ...] = ()) -> Table:
    """A plain table; columns named in ``right`` are numbers."""
    from rich import box
    from rich.table import Table

    made = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold", pad_edge=False)
    for column in columns:
        made.add_column(column, justify="right" if column in right else "left", no_wrap=True)
    return made


@contextmanager
def progress(what: str, total_bytes: int, *, quiet: bool = False) -> Iterator[Callable[[int], None]]:
    """A progress bar over bytes on standard error, where that is a terminal; yields what advances it."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console(stderr=True),
        transient=True,
        disable=quiet or not sys.stderr.isatty(),
    )
    with bar:
        task = bar.add_task(what, total=total_bytes)
        yield lambda size_bytes: bar.update(task, advance=size_bytes)
