"""The reference that is generated from commands and settings is what is checked in, and leaves nothing out."""

from __future__ import annotations

import runpy
from pathlib import Path

import click
import pytest

from polarkv_client.cli.main import cli

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["reference_commands", "reference_configuration"])
def test_reference_is_fresh(name: str) -> None:
    generator = runpy.run_path(str(ROOT / "docs" / "generators" / f"{name}.py"))
    assert (ROOT / generator["OUTPUT"]).read_text() == generator["render"](), "run 'make docs' and commit the result"


def test_reference_names_every_option_of_every_command() -> None:
    text = (ROOT / "docs" / "reference" / "commands.md").read_text()
    context = click.Context(cli)
    for name in cli.list_commands(context):
        command = cli.get_command(context, name)
        assert command is not None
        section = text.partition(f"\n## polarkv {name}\n")[2].partition("\n## polarkv ")[0]
        for option in (parameter for parameter in command.params if isinstance(parameter, click.Option)):
            assert option.opts[0] in section, (name, option.opts)


def test_every_setting_is_described() -> None:
    text = (ROOT / "docs" / "reference" / "configuration.md").read_text()
    rows = [row for row in text.splitlines() if "`POLARKV_" in row]
    assert len(rows) > 60
    for row in rows:
        flag, variable, dotted, default, what = (cell.strip() for cell in row.strip("|").split(" | "))
        assert all((flag, variable, dotted, default, what)), row
