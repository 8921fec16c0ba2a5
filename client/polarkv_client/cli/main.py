"""Entry point of `polarkv`: finds subcommands, and turns every error into a message with its fix and an exit code."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from enum import IntEnum
from importlib.metadata import PackageNotFoundError, entry_points, version
from typing import NoReturn

import click

from polarkv_client import errors

DISTRIBUTION = "polarkv-cluster"
ENTRY_POINT_GROUP = "polarkv.commands"
_HERE = "polarkv_client.cli"
# By name, where it is: imported only when it is asked for, as some imports take longer than most subcommands.
BUILT_IN = {
    "status": f"{_HERE}.status:status",
    "top": f"{_HERE}.status:top",
    "ls": f"{_HERE}.entries:ls",
    "get": f"{_HERE}.files:get",
    "put": f"{_HERE}.files:put",
    "pin": f"{_HERE}.entries:pin",
    "evict": f"{_HERE}.entries:evict",
    "drain": f"{_HERE}.drain:drain",
    "doctor": f"{_HERE}.doctor:doctor",
    "bench": f"{_HERE}.bench:bench",
    "replay": f"{_HERE}.replay:command",
}
# What the data plane adds; said here too, so that a client without it can say what to install.
DATA_PLANE = ("up", "down", "manager", "slab", "disk")
PLANNER = ("plan", "simulate", "calibrate")
OPERATOR = ("operator", "webhook")


class ExitCode(IntEnum):
    """What the command's end means to a script."""

    OK = 0
    FAILED = 1
    USAGE = 2
    UNREACHABLE = 3
    INTERRUPTED = 130


class CommandSet(click.Group):
    """Subcommands that are imported when they are needed."""

    def targets(self) -> dict[str, str]:
        """``module:attribute`` of every subcommand, by name."""
        added = {point.name: point.value for point in entry_points(group=ENTRY_POINT_GROUP)}
        return {**dict.fromkeys((*DATA_PLANE, *PLANNER, *OPERATOR), ""), **added, **BUILT_IN}

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in the order in which people need them."""
        names = list(self.targets())
        first = [name for name in (*DATA_PLANE[:2], *BUILT_IN) if name in names]
        return first + sorted(name for name in names if name not in first)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The subcommand; where its package or an extra is missing, one that says what to install."""
        target = self.targets().get(cmd_name)
        if target is None:
            return None
        module, _, attribute = target.partition(":")
        try:
            if not module:
                raise ModuleNotFoundError("polarkv_dataplane is not installed", name="polarkv_dataplane")
            command = getattr(importlib.import_module(module), attribute)
        except ModuleNotFoundError as error:
            if not _is_absent(error):
                raise
            return _missing(cmd_name, error)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click does, with a suggestion for a mistyped name."""
        import difflib

        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            close = difflib.get_close_matches(args[0], self.list_commands(ctx), 1)
            if close and "did you mean" not in error.message.lower():
                raise click.UsageError(f"{error.message} Did you mean {close[0]!r}?", ctx) from None
            raise


def _is_absent(error: ModuleNotFoundError) -> bool:
    """Whether a whole package is not installed; otherwise a module of it is missing, which is a defect."""
    return importlib.util.find_spec((error.name or "").partition(".")[0] or "?") is None


def _missing(name: str, error: ModuleNotFoundError) -> click.Command:
    """A command that is not complete here and says why."""
    extra = "planner" if name in PLANNER else "operator" if name in OPERATOR else "dataplane"
    fix = f"pip install '{DISTRIBUTION}[{extra}]'"

    @click.command(
        name,
        short_help=f"(not installed here: {fix})",
        context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
        add_help_option=False,
    )
    def missing() -> None:
        raise errors.ConfigurationError(f"polarkv {name}", str(error), f"this command needs the extra {extra!r}: {fix}")

    return missing


def _version() -> str:
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return "unknown (not installed as a distribution)"


@click.group(
    cls=CommandSet,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
    epilog="Exit codes: 0 done; 1 failed or not well; 2 wrong usage or configuration; 3 the cache cannot be reached; "
    "130 interrupted. Every subcommand takes --json; errors are then JSON too.",
)
@click.version_option(_version(), prog_name="polarkv")
@click.option(
    "--cluster",
    envvar="POLARKV_CLUSTER",
    metavar="NAMESPACE/NAME",
    help="A PolarKVCluster in Kubernetes: found by its Service from inside, by kubectl port-forward from outside.",
)
def cli(cluster: str | None) -> None:
    """A shared KV cache for LLM inference clusters.

    Start one on this machine with `polarkv up`, look at it with `polarkv status` or `polarkv top`, put a file in with
    `polarkv put FILE` and get it back with `polarkv get NAME`.
    """


def exit_code_of(error: BaseException) -> ExitCode:
    """The exit code for an error."""
    if isinstance(error, (errors.ConfigurationError, errors.Unauthorized, click.UsageError)):
        return ExitCode.USAGE
    if isinstance(error, (errors.Unavailable, errors.DeadlineExceeded)):
        return ExitCode.UNREACHABLE
    if isinstance(error, (KeyboardInterrupt, click.Abort)):
        return ExitCode.INTERRUPTED
    return ExitCode.FAILED


def run(arguments: Sequence[str]) -> int:
    """Run the command; return the exit code."""
    try:
        code = cli.main(args=list(arguments), prog_name="polarkv", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else ExitCode.OK
    except click.exceptions.Exit as error:
        return error.exit_code
    except BrokenPipeError:
        # Who read our output has enough; Python's own flush at the end must not fail on it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return ExitCode.OK
    except (errors.PolarKVError, click.ClickException, click.Abort, KeyboardInterrupt) as error:
        code = exit_code_of(error)
        _show(error, code, as_json="--json" in arguments)
        return code


def _show(error: BaseException, code: ExitCode, *, as_json: bool) -> None:
    if as_json:
        text = error.format_message() if isinstance(error, click.ClickException) else str(error)
        details = {"kind": type(error).__name__, "text": text or type(error).__name__, "exit_code": int(code)}
        if isinstance(error, errors.ConfigurationError):
            details |= {"field": error.field, "value": str(error.value), "fix": error.fix}
        click.echo(json.dumps({"error": details}))
    elif isinstance(error, click.ClickException):
        error.show(sys.stderr)
    elif code is not ExitCode.INTERRUPTED:
        click.secho("error: ", fg="red", bold=True, err=True, nl=False)
        click.echo(str(error), err=True)


def main() -> NoReturn:
    """Run `polarkv` with this process's arguments."""
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
