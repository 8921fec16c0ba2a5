"""``python -m tests.vm.support COMMAND``: the virtual machine from a shell."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import click

from bench.installing import InstallError
from polarkv_client.errors import ConfigurationError
from polarkv_client.settings_cli import parse_size
from tests.vm.support import machine, programs
from tests.vm.support.suite import BOOTS, Suite

GUEST_SECONDS = 1800.0
ANY_ARGUMENTS = {"ignore_unknown_options": True, "allow_interspersed_args": False}


def size(_context: click.Context, _option: click.Parameter, text: str) -> int:
    """Read the value of an option that is a number of bytes."""
    return parse_size(text)


def sizes(context: click.Context, option: click.Parameter, texts: tuple[str, ...]) -> list[int]:
    """Read the values of an option that may be given several times."""
    return [size(context, option, text) for text in texts]


@click.group()
def main() -> None:
    """Run things in a throw-away Linux kernel that has RDMA devices and arrays. No root, no hardware, no image needed.

    The guest sees this machine's files and cannot change them: what it writes is gone with it. /scratch is an ext4.
    RDMA devices rxe0 and rxe1 (10.9.0.1, 10.9.0.2) are the two ends of one link.
    """


@main.command()
def build() -> None:
    """Build the kernel and unpack the tools that the user's cache directory does not hold yet."""
    began = time.monotonic()
    machine.chosen().layers()
    click.echo(f"the guest's programs are in {programs.CACHE} ({time.monotonic() - began:.0f} s)", err=True)


@main.command(context_settings=ANY_ARGUMENTS)
@click.option("--disk", "disks", multiple=True, callback=sizes, help="Attach an empty disk of this size (256MiB).")
@click.option("--memory", default="4GiB", show_default=True, callback=size, help="The guest's memory.")
@click.option("--timeout", default=GUEST_SECONDS, show_default=True, type=float, help="Seconds before it is ended.")
@click.argument("command", nargs=-1, required=True)
def run(disks: list[int], memory: int, timeout: float, command: tuple[str, ...]) -> None:
    """Run COMMAND in the guest, in this folder and environment; exit with its status.

    124 is out of time; 125, the guest died. Disks are /dev/ubdb and so on, and listed in POLARKV_VM_DISKS.
    """
    sys.exit(guest(command, disks, timeout, memory))


@main.command(context_settings=ANY_ARGUMENTS)
@click.option("--timeout", default=GUEST_SECONDS, show_default=True, type=float, help="Seconds that each guest has.")
@click.argument("arguments", nargs=-1)
def test(timeout: float, arguments: tuple[str, ...]) -> None:
    """Run the suite tests/vm in guests side by side, and beside them what boots guests of its own.

    ARGUMENTS go to pytest, such as `-k raid`, or name some of its files. The exit status is the worst.
    """
    named = [argument for argument in arguments if Path(argument.partition("::")[0]).exists()]
    options = [argument for argument in arguments if argument not in named]
    in_guests = [path for path in named if not path.startswith(BOOTS)] if named else ["tests/vm", f"--ignore={BOOTS}"]
    here = [path for path in named if path.startswith(BOOTS)] if named else [BOOTS]
    sys.exit(Suite(options, in_guests, here, timeout).run())


def guest(command: Sequence[str], disk_bytes: Sequence[int], timeout_s: float, memory: int) -> int:
    """Boot a guest with empty disks, pass its output on, and say what the kernel said when the command failed."""
    with tempfile.TemporaryDirectory(prefix="polarkv-vm-disks-") as name:
        disks = [machine.make_disk(Path(name) / str(index), size) for index, size in enumerate(disk_bytes)]
        result = machine.boot(command, disks=disks, timeout_s=timeout_s, memory_bytes=memory, echo=sys.stdout.buffer)
    if result.status:
        click.echo(machine.explain(result, timeout_s), err=True)
    return result.status


if __name__ == "__main__":
    try:
        main()
    except (InstallError, ConfigurationError) as error:
        sys.exit(f"error: {error}")
