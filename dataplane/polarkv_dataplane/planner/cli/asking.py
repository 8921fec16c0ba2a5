"""Options that `plan` and `simulate` share, and how their values are read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from polarkv_client.errors import ConfigurationError
from polarkv_client.settings_cli import parse_size
from polarkv_dataplane.planner.shapes import DTYPE_BYTES, shape

GIB = 1 << 30
MIB = 1 << 20


def parse_rate(text: str, field: str) -> int:
    """Bytes/s of ``12GB/s`` or ``12GB``.

    Raises:
        ConfigurationError: it is no rate.
    """
    return parse_size(text.strip().removesuffix("/s"), field)


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
        if number.isdecimal() and int(number) > 0:
            return int(number) * factor
    raise ConfigurationError(field, text, "use a number of tokens, such as 32768, 128k or 128Ki")


def prices_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--prices`` and ``--market``."""
    command = click.option("--market", metavar="NAME", help="Plan with one market of the price file only.")(command)
    return click.option(
        "--prices", type=click.Path(path_type=Path), metavar="FILE", help="Price file. Default: the shipped one."
    )(command)


def model_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--model`` and what its KV depends on."""
    for option in (
        click.option("--kv-bytes-per-token", type=click.IntRange(1), metavar="N", help="Instead of --model."),
        click.option("--tensor-parallel", default=1, show_default=True, type=click.IntRange(1), help="Ranks."),
        click.option("--dtype", default="bf16", show_default=True, type=click.Choice(list(DTYPE_BYTES)), help="Of KV."),
        click.option("--model", metavar="NAME", help="A public model; 'polarkv plan --list-models' shows them."),
    ):
        command = option(command)
    return command
