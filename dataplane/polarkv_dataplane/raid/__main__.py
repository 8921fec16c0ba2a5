"""``python -m polarkv_dataplane.raid``: hold a cache node's array for as long as its servers run."""

from __future__ import annotations

import logging
import sys
from functools import partial
from pathlib import Path
from typing import Any

import click

from polarkv_client.errors import ConfigurationError
from polarkv_dataplane.raid import observe
from polarkv_dataplane.raid.plan import SERVING, Refused
from polarkv_dataplane.raid.runner import Runner, StepFailed
from polarkv_dataplane.raid.settings import RAID, RaidSettings
from polarkv_dataplane.runtime import log
from polarkv_dataplane.runtime.stopping import Stop

CONFIG = click.option("--config", type=click.Path(path_type=Path), help="Configuration file (TOML or JSON).")
logger = logging.getLogger("polarkv_dataplane.raid")


@click.group()
def main() -> None:
    """Hold an array of block devices as one mounted file system. Needs root, and `md` in the kernel."""


@main.command()
@RAID.options()
@CONFIG
def hold(config: Path | None, **flags: Any) -> None:
    """Assemble the array, or make it on blank devices; mount it, and wait.

    On SIGTERM it is unmounted and stopped, and the exit status is 0.
    """
    log.set_up()
    settings: RaidSettings = RAID.load(flags, config)
    wanted = settings.wanted()
    runner = Runner(wanted, partial(observe.see, wanted, settings.devices), retry_s=settings.retry_ms / 1000)
    stop = Stop()
    stop.on_signals()
    try:
        if runner.assemble(stop):
            logger.info("array %s is mounted at %s", wanted.array, wanted.mount)
            stop.wait()
    except Exception:
        # An array that runs keeps its disks on a machine that the pod may leave. The error is the one that counts.
        try:
            runner.release()
        except (ConfigurationError, StepFailed) as error:
            logger.warning("the array could not be stopped: %s", error)
        raise
    runner.release()
    logger.info("array %s is stopped", wanted.array)


@main.command()
@RAID.options()
@CONFIG
def check(config: Path | None, **flags: Any) -> None:
    """Exit with 0 while the array's file system is mounted and every member answers."""
    settings: RaidSettings = RAID.load(flags, config)
    state = observe.state_of(observe.mounted_at(str(settings.mount)))
    if state not in SERVING:
        sys.exit(f"error: {settings.mount}: {state or 'no array is mounted'}")


if __name__ == "__main__":
    try:
        main()
    except (ConfigurationError, Refused, StepFailed) as error:
        sys.exit(f"error: {error}")
