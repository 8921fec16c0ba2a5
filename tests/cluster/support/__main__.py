"""``python -m tests.cluster.support COMMAND``: the test cluster from a shell."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import click

from bench.installing import InstallError
from tests.cluster.support import cluster, programs
from tests.cluster.support import images as built_images
from tests.cluster.support.daemons import DaemonError
from tests.cluster.support.layout import NODES


@click.group()
def main() -> None:
    """Bring a Kubernetes for tests up on this machine, look at it, and end it. `up` and `down` need root."""


@main.command()
def build() -> None:
    """Build and unpack what the tests need and the user's cache directory does not hold yet.

    For a cluster that KUBECONFIG names that is kubectl and helm alone.
    """
    began = time.monotonic()
    if os.environ.get("KUBECONFIG"):
        built = programs.build("kubectl", "helm")
    else:
        built = programs.build(*programs.tools())
        for group in programs.PACKAGES:
            programs.unpack(group)
        # Here and not in the first test that needs them: a test has a deadline.
        built_images.archives()
    click.echo(f"Kubernetes {programs.kubernetes_version()} is in {built} ({time.monotonic() - began:.0f} s)", err=True)


@main.command()
@click.option("--nodes", default=1, show_default=True, type=click.IntRange(1, NODES), help="How many nodes.")
@click.option("--image", "images", multiple=True, type=click.Path(path_type=Path, exists=True), help="OCI archive.")
def up(nodes: int, images: tuple[Path, ...]) -> None:
    """Bring a cluster up that stays until `down`; print the line that makes it your shell's."""
    show(cluster.up([*built_images.archives(), *(image.resolve() for image in images)], nodes, detached=True))


@main.command()
def status() -> None:
    """List the clusters that run."""
    for each in cluster.find():
        click.echo(f"cluster {each.layout.number}: {each.layout.url} {each.layout.folder}")


@main.command()
def env() -> None:
    """Print the lines that make the first running cluster your shell's, with kubectl and helm on its path."""
    found = cluster.find()
    if not found:
        sys.exit("error: no cluster runs; `python -m tests.cluster.support up` starts one")
    show(found[0])


@main.command()
@click.argument("numbers", nargs=-1, type=int)
def down(numbers: tuple[int, ...]) -> None:
    """End the clusters of these NUMBERS (all, when none is given) and remove what they left on this machine."""
    for number in numbers or [each.layout.number for each in cluster.find()]:
        cluster.down(number)
    cluster.sweep()


def show(found: cluster.Cluster) -> None:
    """Print what a shell can evaluate."""
    click.echo(f"export KUBECONFIG={found.kubeconfig}")
    click.echo(f'export PATH="{found.layout.kubernetes}:$PATH"')


if __name__ == "__main__":
    try:
        main()
    except (InstallError, DaemonError, cluster.ClusterError) as error:
        sys.exit(f"error: {error}")
