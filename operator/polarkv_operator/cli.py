"""`polarkv operator`: the operator in the foreground, until SIGTERM or SIGINT."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import click

from polarkv_client.cli.common import output_options
from polarkv_client.settings_cli import Section
from polarkv_operator.settings import OperatorSettings

OPERATOR = Section("operator", OperatorSettings)


@click.command(short_help="Run the Kubernetes operator.")
@OPERATOR.options()
@click.option(
    "--log-level",
    type=click.Choice(("DEBUG", "INFO", "WARNING", "ERROR"), case_sensitive=False),
    default="INFO",
    envvar="POLARKV_LOG_LEVEL",
    show_default=True,
    show_envvar=True,
    help="Least severe log lines to write (to standard error).",
)
@output_options
def operator(config: Path | None, as_json: bool, log_level: str, **flags: Any) -> None:
    """Run the operator: it brings every PolarKVCluster to its spec. One of several acts, the others wait."""
    settings = OPERATOR.load(flags, config)
    logging.basicConfig(level=log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for chatty in ("httpx", "httpcore", "urllib3", "kubernetes", "aiohttp.access"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    from polarkv_operator.handlers import run

    run(settings)
