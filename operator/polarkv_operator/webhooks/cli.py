"""`polarkv webhook`: the injection webhook in the foreground, until SIGTERM or SIGINT."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import click

from polarkv_client.cli.common import output_options
from polarkv_client.settings_cli import Section
from polarkv_operator.webhooks.settings import WebhookSettings

WEBHOOK = Section("webhook", WebhookSettings)


@click.command(short_help="Run the injection webhook (in Kubernetes).")
@WEBHOOK.options()
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
def webhook(config: Path | None, as_json: bool, log_level: str, **flags: Any) -> None:
    """Run the admission webhook that gives labelled pods the client library. The chart runs it; people seldom do."""
    logging.basicConfig(level=log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    settings = WEBHOOK.load(flags, config)
    from polarkv_operator.webhooks.server import run_webhook

    run_webhook(settings)
