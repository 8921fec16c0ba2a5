"""``python -m tests.cluster.support COMMAND``: the test cluster from a shell."""

from __future__ import annotations

import sys
import time

import click

from bench.installing import InstallError
from tests.cluster.support import programs


@click.group()
def main() -> None:
    """Build the programs of a Kubernetes for tests."""


@main.command()
def build() -> None:
    """Build and unpack what the tests need and the user's cache directory does not hold yet."""
    began = time.monotonic()
    try:
        built = programs.build(*programs.tools())
        programs.unpack("etcd")
    except InstallError as error:
        sys.exit(f"error: {error}")
    click.echo(f"Kubernetes {programs.kubernetes_version()} is in {built} ({time.monotonic() - began:.0f} s)", err=True)


if __name__ == "__main__":
    main()
