"""Configuration: one declaration gives flags, environment, file and docs; precedence; errors that name the fix."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Literal

import click
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ByteSize, ConfigDict, Field, SecretStr

from polarkv_client.errors import ConfigurationError
from polarkv_client.settings_cli import Section, parse_size, show_size


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


class Inner(BaseModel):
    model_config = ConfigDict(extra="forbid")
    wait_ms: int = Field(10, ge=1, description="Wait.")


class Example(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str = Field(description="Who it is.")
    memory_bytes: int = Field(1 << 30, ge=4096, description="Memory.")
    disk_bytes: ByteSize = Field(ByteSize(1 << 31), description="Disk.")
    colour: Colour = Field(Colour.RED, description="Colour.")
    mode: Literal["auto", "off"] = Field("auto", description="Mode.")
    ahead: bool = Field(True, description="Ahead.")
    folders: list[Path] = Field([], description="Folders.")
    password: SecretStr = Field(SecretStr(""), min_length=0, max_length=8, description="Password.")
    port: int | None = Field(None, le=65535, description="Port.")
    inner: Inner = Field(Inner(), description="More.")


SECTION = Section("manager", Example)


def run(*arguments: str, environment: dict[str, str] | None = None, config: Path | None = None) -> Example:
    """What a command with the section's options makes of its command line."""
    seen: list[Example] = []

    @click.command()
    @SECTION.options()
    def command(**flags: object) -> None:
        seen.append(SECTION.load(flags, config, environment or {}))

    result = CliRunner().invoke(command, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return seen[0]


def toml(folder: Path, text: str) -> Path:
    path = folder / "polarkv.toml"
    path.write_text(text)
    return path


def test_flag_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    config = toml(tmp_path, '[manager]\nname = "file"\nmemory_bytes = "1MiB"\nmode = "off"\n')
    environment = {"POLARKV_MANAGER_NAME": "environment", "POLARKV_MANAGER_MEMORY_BYTES": "2MiB"}
    found = run("--name", "flag", environment=environment, config=config)
    assert (found.name, found.memory_bytes, found.mode, found.colour) == ("flag", 2 << 20, "off", Colour.RED)


def test_every_kind_of_field_has_a_flag() -> None:
    found = run(
        "--name", "n", "--memory", "8KiB", "--disk", "1.5GiB", "--colour", "blue", "--mode", "off", "--no-ahead",
        "--folders", "/a", "--folders", "/b", "--port", "80", "--inner-wait-ms", "7",
    )  # fmt: skip
    assert (found.memory_bytes, found.disk_bytes) == (8192, 3 << 29)
    assert (found.colour, found.mode, found.ahead, found.port) == (Colour.BLUE, "off", False, 80)
    assert (found.folders, found.inner.wait_ms) == ([Path("/a"), Path("/b")], 7)


def test_the_environment_reaches_every_field() -> None:
    values = {
        "NAME": "n", "MEMORY_BYTES": "8KiB", "DISK_BYTES": "9", "COLOUR": "blue", "MODE": "off", "AHEAD": "false",
        "FOLDERS": "/a, /b", "PASSWORD": "geheim", "PORT": "1", "INNER_WAIT_MS": "3",
    }  # fmt: skip
    found = run(environment={f"POLARKV_MANAGER_{name}": value for name, value in values.items()})
    assert (found.memory_bytes, found.ahead, found.folders) == (8192, False, [Path("/a"), Path("/b")])
    assert (found.password.get_secret_value(), found.inner.wait_ms) == ("geheim", 3)


def test_a_file_may_be_json_and_nest(tmp_path: Path) -> None:
    path = tmp_path / "polarkv.json"
    path.write_text('{"manager": {"name": "n", "inner": {"wait_ms": 5}}, "slab": {"anything": 1}}')
    assert run(config=path).inner.wait_ms == 5


def test_a_secret_has_no_flag_and_is_never_shown() -> None:
    with pytest.raises(click.exceptions.NoSuchOption):
        SECTION.options()(click.command()(lambda **_: None)).main(["--password", "x"], standalone_mode=False)
    with pytest.raises(ConfigurationError) as caught:
        run(environment={"POLARKV_MANAGER_NAME": "n", "POLARKV_MANAGER_PASSWORD": "much-too-long"})
    assert "much-too-long" not in str(caught.value)
    assert "POLARKV_MANAGER_PASSWORD" in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["manager.name", "--name", "POLARKV_MANAGER_NAME", "Who it is"]),
        (["--name", "n", "--memory", "lots"], ["manager.memory_bytes", "--memory", "lots", "512MiB"]),
        (["--name", "n", "--memory", "-1"], ["manager.memory_bytes", "-1"]),
        (["--name", "n", "--memory", "1KiB"], ["manager.memory_bytes", "--memory", "4096"]),
        (["--name", "n", "--port", "70000"], ["manager.port", "--port", "70000", "65535"]),
        (["--name", "n", "--inner-wait-ms", "0"], ["manager.inner.wait_ms", "--inner-wait-ms", "greater"]),
    ],
)
def test_a_wrong_flag_is_named_with_its_value_and_the_fix(arguments: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        run(*arguments)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[manager]\nnmae = 1\n", ["manager.nmae", "did you mean name?"]),
        ("[manager]\n[manager.inner]\nwait = 1\n", ["manager.inner.wait", "inner.wait_ms"]),
        ("[manger]\nname = 1\n", ["manger", "did you mean manager?"]),
        ("manager = 3\n", ["manager", "section"]),
        ("[manager\n", ["TOML"]),
        ('[manager]\nname = "n"\nmemory_bytes = "huge"\n', ["manager.memory_bytes", "polarkv.toml", "huge"]),
    ],
)
def test_a_wrong_file_is_named_with_the_place_and_the_fix(tmp_path: Path, text: str, words: list[str]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        run("--port", "1", config=toml(tmp_path, text))
    for word in words:
        assert word in str(caught.value)


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(ConfigurationError, match=r"--config=.*nowhere.*readable file"):
        run(config=Path("/nowhere/polarkv.toml"))


@given(st.integers(0, 1 << 60))
def test_whole_sizes_survive_being_shown(size_bytes: int) -> None:
    assert parse_size(str(size_bytes)) == size_bytes
    shown = parse_size(show_size(size_bytes))
    assert abs(shown - size_bytes) <= size_bytes * 0.05


@pytest.mark.parametrize(
    "text",
    ["", " ", "GiB", "-4GiB", "4 Gigs", "inf", "nan", "0x10", "1.5.5GB", "12GB/m", "4GiB 2", "5.GB", "1_000", "٣GB",
     "1e3", "9" * 400, "9" * 400 + "GB"],
)  # fmt: skip
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ConfigurationError, match="write a size"):
        parse_size(text, "--memory")


def test_the_reference_names_every_field_once() -> None:
    table = SECTION.reference()
    for setting in SECTION.settings():
        assert table.count(f"`{setting.variable}`") == 1
    row = "| `--memory` | `POLARKV_MANAGER_MEMORY_BYTES` | `manager.memory_bytes` | 1GiB | Memory. (at least 4KiB) |"
    assert row in table
    assert "| – | `POLARKV_MANAGER_PASSWORD` |" in table
