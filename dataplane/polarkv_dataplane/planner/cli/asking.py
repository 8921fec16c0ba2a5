"""Options that `plan` and `simulate` share, and how their values are read."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import click
from click.core import ParameterSource

from polarkv_client.cli.common import console
from polarkv_client.errors import ConfigurationError
from polarkv_client.settings_cli import parse_size
from polarkv_dataplane.planner.shapes import DTYPE_BYTES, shape

GIB = 1 << 30
MIB = 1 << 20


_RATE_FIX = "write a rate such as 12GB/s, or 96Gbit/s in bits"
_MOST_DIGITS = 12


def parse_rate(text: str, field: str) -> int:
    """Bytes/s of ``12GB/s``, ``12GB`` or ``96Gbit/s``.

    Raises:
        ConfigurationError: it is no rate, or ends in a small b: who writes that may mean bits.
    """
    amount = text.strip().removesuffix("/s")
    if re.search(r"[A-Za-z]b$", amount):
        raise ConfigurationError(field, text, f"is it bits or bytes? {_RATE_FIX}")
    try:
        return parse_size(amount, field)
    except ConfigurationError:
        raise ConfigurationError(field, text, _RATE_FIX) from None


def given() -> dict[str, object]:
    """The flags that are on the command line, by their long names, and their values."""
    context = click.get_current_context()
    return {
        param.opts[0]: context.params[param.name]
        for param in context.command.params
        if param.name in context.params and context.get_parameter_source(param.name) is ParameterSource.COMMANDLINE
    }


def refuse(others: str, because: str) -> None:
    """Refuse flags (names, separated by spaces) that would have no effect beside another: nobody means that.

    Raises:
        ConfigurationError: one of them is given.
    """
    found = given()
    for flag in others.split():
        if flag in found:
            raise ConfigurationError(flag, found[flag], because)


def whole(size_bytes: int, unit: int) -> int:
    """A size in whole units, rounded up."""
    return -(-size_bytes // unit)


def kv_bytes(model: str | None, dtype: str, tensor_parallel: int, given: int | None) -> int | None:
    """KV bytes of a token: as given, or by the model's shape; None when neither is said.

    Raises:
        ConfigurationError: the model is not known, or cannot be split so.
    """
    if given is not None:
        return given
    return shape(model).kv_bytes_per_token(dtype, tensor_parallel) if model else None


def parse_tokens(text: str, field: str) -> int:
    """Tokens of ``32768``, ``128k`` (1,000) or ``128Ki`` (1,024).

    Raises:
        ConfigurationError: it is no number of tokens.
    """
    digits = text.strip()
    for suffix, factor in (("Ki", 1024), ("k", 1000), ("K", 1000), ("", 1)):
        number = digits.removesuffix(suffix) if suffix and digits.endswith(suffix) else digits if not suffix else ""
        if number.isdecimal() and len(number) <= _MOST_DIGITS and int(number) > 0:
            return int(number) * factor
    raise ConfigurationError(field, text, "use a number of tokens, such as 32768, 128k or 128Ki")


def check_folder(name: str) -> Path:
    """Make a folder and see whether it can be written to, before hours of work end there.

    Raises:
        ConfigurationError: it cannot, or has no name: a variable that is not set must not mean the present folder.
    """
    folder = Path(name)
    if not name.strip():
        raise ConfigurationError("--output", name, "name a folder to write to")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigurationError("--output", str(folder), f"name a folder to write to ({error.strerror})") from error
    return folder


@contextmanager
def progress_bar(of_what: str, total: int, shown: bool | None = None) -> Iterator[Callable[[int], None]]:
    """A progress bar on standard error, where that is a terminal; yields what is to be told how many have ended."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    out = console(stderr=True)
    columns = (TextColumn("simulating"), BarColumn(), MofNCompleteColumn(), TextColumn(of_what), TimeElapsedColumn())
    with Progress(*columns, console=out, disable=not (out.is_terminal if shown is None else shown)) as bar:
        task = bar.add_task("simulate", total=total)
        yield lambda done: bar.update(task, completed=done)


def prices_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--prices`` and ``--market``."""
    command = click.option("--market", metavar="NAME", help="Plan with one market of the price file only.")(command)
    return click.option(
        "--prices", type=click.Path(path_type=Path), metavar="FILE", help="Price file. Default: the shipped one."
    )(command)


def model_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--model`` and what its KV depends on."""
    for option in (
        click.option("--kv-bytes-per-token", type=click.IntRange(1, 1 << 40), metavar="N", help="Instead of --model."),
        click.option("--tensor-parallel", default=1, show_default=True, type=click.IntRange(1), help="Ranks."),
        click.option("--dtype", default="bf16", show_default=True, type=click.Choice(list(DTYPE_BYTES)), help="Of KV."),
        click.option("--model", metavar="NAME", help="A public model; 'polarkv plan --list-models' shows them."),
    ):
        command = option(command)
    return command
