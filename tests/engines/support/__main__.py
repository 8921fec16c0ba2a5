"""``python -m tests.engines.support COMMAND``: the engines' environments from a shell."""

from __future__ import annotations

import sys
import time

import click

from bench.installing import InstallError
from tests.engines.support.environments import ENGINES, Environment, models


@click.group()
def main() -> None:
    """Build what the tests in real engines need, and look at it."""


@main.command()
@click.argument("engines", nargs=-1, type=click.Choice(ENGINES))
def build(engines: tuple[str, ...]) -> None:
    """Build the environments of these ENGINES (all, when none is given) and the models, where they are not cached."""
    began = time.monotonic()
    chosen = [Environment(name) for name in engines or ENGINES]
    try:
        for environment in chosen:
            environment.build()
        models(chosen[0])
    except InstallError as error:
        sys.exit(f"error: {error}")
    click.echo(f"environments and models are ready ({time.monotonic() - began:.0f} s)", err=True)


@main.command()
def env() -> None:
    """Print where each environment is, or will be."""
    for name in ENGINES:
        environment = Environment(name)
        click.echo(f"{name}\t{environment.folder}\t{'built' if environment.is_built else 'not built'}")


if __name__ == "__main__":
    main()
