"""`polarkv manager`, `polarkv slab`, `polarkv disk`: one server in the foreground, until SIGTERM or SIGINT."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from polarkv_client.cli.common import output_options
from polarkv_client.settings_cli import Section
from polarkv_dataplane.disk.settings import DiskSettings
from polarkv_dataplane.manager.settings import ManagerSettings
from polarkv_dataplane.runtime import log
from polarkv_dataplane.slab.settings import SlabSettings

MANAGER = Section("manager", ManagerSettings)
SLAB = Section("slab", SlabSettings)
DISK = Section("disk", DiskSettings)
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


def log_level_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--log-level``."""
    return click.option(
        "--log-level",
        type=click.Choice(LOG_LEVELS, case_sensitive=False),
        default="INFO",
        envvar="POLARKV_LOG_LEVEL",
        show_default=True,
        show_envvar=True,
        help="Least severe log lines to write (to standard error).",
    )(command)


def _begin(section: Section, config: Path | None, log_level: str, flags: dict[str, Any]) -> Any:
    log.set_up(log_level)
    return section.load(flags, config)


@click.command(short_help="Run a manager: metadata, grants, tiering; the admin API.")
@MANAGER.options()
@log_level_option
@output_options
def manager(config: Path | None, as_json: bool, log_level: str, **flags: Any) -> None:
    """Run a manager in the foreground. It keeps metadata only; bytes never pass through it."""
    settings = _begin(MANAGER, config, log_level, flags)
    from polarkv_dataplane.manager.shell.app import run_manager

    run_manager(settings)


@click.command(short_help="Run a slab server: the memory of a cache node.")
@SLAB.options()
@log_level_option
@output_options
def slab(config: Path | None, as_json: bool, log_level: str, **flags: Any) -> None:
    """Run a slab server in the foreground. It owns the memory of a cache node and serves clients from it."""
    settings = _begin(SLAB, config, log_level, flags)
    from polarkv_dataplane.slab.server import run_slab

    run_slab(settings)


@click.command(short_help="Run a disk server: the files of a cache node.")
@DISK.options()
@log_level_option
@output_options
def disk(config: Path | None, as_json: bool, log_level: str, **flags: Any) -> None:
    """Run a disk server in the foreground. It moves chunks between its slab server's memory and its own files."""
    settings = _begin(DISK, config, log_level, flags)
    from polarkv_dataplane.disk.server import run_disk

    run_disk(settings)
