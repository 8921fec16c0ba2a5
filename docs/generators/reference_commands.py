"""Render docs/reference/commands.md from the commands themselves."""

from __future__ import annotations

import click

from polarkv_client.cli.main import CommandSet, ExitCode, cli

OUTPUT = "docs/reference/commands.md"
_MEANINGS = {
    ExitCode.OK: "done",
    ExitCode.FAILED: "it failed, or what was looked at is not well (`doctor`, `status`), or is not there (`get`)",
    ExitCode.USAGE: "wrong usage or configuration: the message names the field, the value and the fix",
    ExitCode.UNREACHABLE: "the cache cannot be reached",
    ExitCode.INTERRUPTED: "interrupted",
}


def render() -> str:
    """The whole text."""
    assert isinstance(cli, CommandSet)
    context = click.Context(cli, info_name="polarkv")
    lines = ["# The `polarkv` command", "", "Generated from the code by `make docs`; do not edit.", ""]
    lines += ["Settings of `up`, `manager`, `slab` and `disk` are in [configuration](configuration.md).", ""]
    lines += ["Every command takes `--json`; its answer is then one JSON value on standard output, also when it fails:"]
    lines += ['`{"error": {"kind", "text", "exit_code"}}`, with `field`, `value` and `fix` for wrong configuration.']
    lines += ["Progress goes to standard error.", "", "| exit code | means |", "|---|---|"]
    lines += [f"| {code.value} | {meaning} |" for code, meaning in _MEANINGS.items()]
    for name in cli.list_commands(context):
        command = cli.get_command(context, name)
        assert command is not None
        lines += ["", *_command(name, command, context)]
    return "\n".join(lines) + "\n"


def _command(name: str, command: click.Command, above: click.Context) -> list[str]:
    context = click.Context(command, info_name=name, parent=above)
    usage = command.get_usage(context).removeprefix("Usage: ")
    lines = [f"## polarkv {name}", "", " ".join((command.help or "").split()), "", f"`{' '.join(usage.split())}`", ""]
    lines += ["| option | what it does |", "|---|---|"]
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context) if "--help" not in parameter.opts else None
        if isinstance(parameter, click.Option) and record is not None:
            option, text = (" ".join(part.split()).replace("|", "\\|") for part in record)
            lines.append(f"| `{option}` | {text} |")
    return lines
