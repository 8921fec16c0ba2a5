"""Configuration, declared once: a pydantic model gives flags, the environment's names, the file's names and the docs.

A value comes from, in this order: flag, environment (``POLARKV_<SECTION>_<FIELD>``), file (``[section]`` and
``field = value`` in TOML, or the same as JSON), default. Byte sizes may be written ``4GiB`` everywhere; their flags
drop the ``_bytes``.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import tomllib
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import click
from pydantic import BaseModel, ByteSize, SecretStr, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from polarkv_client.config import ENVIRONMENT_PREFIX
from polarkv_client.errors import ConfigurationError

SECTIONS = ("client", "manager", "slab", "disk", "raid", "up", "operator", "webhook")
Command = TypeVar("Command", bound=Callable[..., Any])
Model = TypeVar("Model", bound=BaseModel)
_size = TypeAdapter(ByteSize)
_SIZE = re.compile(r"\s*(\d+|\d*\.\d+)\s*([A-Za-z]*)\s*", re.ASCII)  # ByteSize reads a beginning and ignores the rest
_SIZE_FIX = "write a size such as 512MiB, 4GiB or a number of bytes"
_MOST_BYTES = 1 << 63
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def parse_size(text: str | float, field: str = "size") -> int:
    """Bytes of ``4GiB``, ``512MiB``, ``1.5 TB`` or a plain number.

    Raises:
        ConfigurationError: it is no size.
    """
    if isinstance(text, str) and not _SIZE.fullmatch(text):
        raise ConfigurationError(field, text, _SIZE_FIX)
    try:
        size_bytes = int(_size.validate_python(text))
    except (ValidationError, OverflowError):
        raise ConfigurationError(field, text, _SIZE_FIX) from None
    if size_bytes > _MOST_BYTES:
        raise ConfigurationError(field, text, f"write a size of at most {show_size(_MOST_BYTES)}")
    return size_bytes


def show_size(size_bytes: float) -> str:
    """A size as people read it, in binary units: ``4GiB``, ``1.5MiB``."""
    value = float(size_bytes)
    for unit in _UNITS:
        if abs(value) < 1024 or unit == _UNITS[-1]:
            break
        value /= 1024
    return f"{value:.0f}{unit}" if value == int(value) or unit == "B" else f"{value:.1f}{unit}"


@dataclass(frozen=True)
class Setting:
    """One field of a section, at ``path`` (more than one name when models are nested)."""

    section: str
    path: tuple[str, ...]
    info: FieldInfo

    @property
    def name(self) -> str:
        """Its name in Python and in click's parameters."""
        return "_".join(self.path)

    @property
    def dotted(self) -> str:
        """Its name in a file and in errors."""
        return ".".join((self.section, *self.path))

    @property
    def flag(self) -> str:
        """Its flag."""
        return "--" + self.name.removesuffix("_bytes" if self.is_size else "").replace("_", "-")

    @property
    def variable(self) -> str:
        """Its name in the environment. Client and connector have no section's part: one process has one."""
        section = "" if self.section in {"client", "connector"} else f"{self.section}_"
        return f"{ENVIRONMENT_PREFIX}{section}{self.name}".upper()

    @property
    def kind(self) -> Any:
        """Its type, without None and annotations."""
        return _bare(self.info.annotation)

    @property
    def is_size(self) -> bool:
        """Whether it is a number of bytes."""
        return self.kind is ByteSize or (self.kind is int and self.name.endswith("_bytes"))

    @property
    def is_secret(self) -> bool:
        """Whether it must not be seen; such a field has no flag, as every user of a machine sees a command's flags."""
        return self.kind is SecretStr

    @property
    def is_list(self) -> bool:
        """Whether it holds several values; its flag may be given several times."""
        return get_origin(self.kind) in {list, tuple, set, frozenset}

    @property
    def is_table(self) -> bool:
        """Whether it holds names and values, written as JSON in a flag or variable."""
        return (
            get_origin(self.kind) is dict or self.kind is dict or (self.is_list and _is_model(get_args(self.kind)[0]))
        )

    @property
    def choices(self) -> tuple[str, ...]:
        """The values that it may have, when they are few."""
        if get_origin(self.kind) is Literal:
            return tuple(str(choice) for choice in get_args(self.kind))
        if isinstance(self.kind, type) and issubclass(self.kind, Enum):
            return tuple(str(member.value) for member in self.kind)
        return ()

    @property
    def shown_default(self) -> str:
        """Its default as the docs show it."""
        default = self.info.get_default(call_default_factory=True, validated_data={})
        if default is PydanticUndefined:
            return "required"
        if self.is_size and isinstance(default, int):
            return show_size(default)
        if isinstance(default, Enum):
            return str(default.value)
        if isinstance(default, bool):
            return str(default).lower()
        if default is None or default in ("", (), [], {}) or self.is_secret:
            return "none"
        return str(default)

    @property
    def limits(self) -> str:
        """What its value may be, in words; empty: anything of its type."""
        return _limits(self)

    def read(self, value: Any, source: str) -> Any:
        """The value as the model takes it, from text where it came as text."""
        field = f"{self.dotted} ({source})"
        if self.is_size and isinstance(value, (str, float)):
            return parse_size(value, field)
        if self.is_table and isinstance(value, str):
            try:
                return json.loads(value)
            except ValueError as error:
                raise ConfigurationError(field, value, f"write it as JSON ({error})") from None
        if self.is_list and isinstance(value, str):
            return [part.strip() for part in value.split(",") if part.strip()]
        return value


@dataclass(frozen=True)
class Section:
    """A part of the configuration: a name and the model that declares its fields."""

    name: str
    model: type[BaseModel]

    def settings(self) -> list[Setting]:
        """All fields, nested ones flattened."""
        return list(_settings(self.name, self.model, ()))

    def options(self, *, leave_out: frozenset[str] = frozenset()) -> Callable[[Command], Command]:
        """A decorator that adds a click option for every field."""

        def decorate(command: Command) -> Command:
            for setting in reversed(self.settings()):
                if setting.name not in leave_out and not setting.is_secret:
                    command = _option(setting)(command)
            return command

        return decorate

    def load(
        self,
        flags: Mapping[str, Any],
        config: Path | None = None,
        environment: Mapping[str, str] | None = None,
        **base: Any,
    ) -> Any:
        """An instance of the model. ``base`` is what holds before file, environment and flags.

        Raises:
            ConfigurationError: names the field, where its value came from, the value and the fix.
        """
        env = os.environ if environment is None else environment
        values: dict[str, Any] = dict(base)
        sources: dict[str, str] = {}
        file_values = read_section(config, self) if config else {}
        for setting in self.settings():
            if setting.name in file_values:
                value, source = file_values[setting.name], str(config)
            else:
                value, source = None, ""
            if setting.variable in env:
                value, source = env[setting.variable], setting.variable
            flag = flags.get(setting.name)
            if flag is not None and flag != ():
                value, source = (list(flag) if isinstance(flag, tuple) else flag), setting.flag
            if source:
                sources[setting.name] = source
                _put(values, setting.path, setting.read(value, source))
        return self._build(values, sources)

    def _build(self, values: dict[str, Any], sources: dict[str, str]) -> BaseModel:
        secret = {setting.name for setting in self.settings() if setting.is_secret}
        try:
            return self.model(**values)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            path, value, text = [str(part) for part in first["loc"]], first.get("input"), first["msg"]
        except ConfigurationError as error:
            path, value, text = error.field.split("."), error.value, error.fix
        setting = next((one for one in self.settings() if list(one.path) == path[: len(one.path)]), None)
        if setting is None:
            raise ConfigurationError(".".join([self.name, *path]), value, text) from None
        source = sources.get(setting.name, "default" if path[-1] not in {"", setting.path[-1]} else "not given")
        if source == "not given":
            ways = f"pass {setting.flag}, set {setting.variable}, or write it in a --config file"
            text = f"{ways}: {setting.info.description}"
        text = text.removeprefix("Value error, ")
        shown = "…" if setting.name in secret else value if source != "not given" else None
        raise ConfigurationError(f"{setting.dotted} ({source})", shown, text) from None

    def reference(self) -> str:
        """A markdown table of all fields."""
        lines = ["| flag | environment | file | default | what it is |", "|---|---|---|---|---|"]
        for setting in self.settings():
            flag = "–" if setting.is_secret else f"`{setting.flag}`"
            what = (setting.info.description or "").replace("|", "\\|")
            if setting.limits:
                what += f" ({setting.limits})"
            cells = (flag, f"`{setting.variable}`", f"`{setting.dotted}`", setting.shown_default, what)
            lines.append("| " + " | ".join(cells) + " |")
        return "\n".join(lines) + "\n"


def read_section(path: Path, section: Section) -> dict[str, Any]:
    """What a configuration file says for a section, by flattened name.

    Raises:
        ConfigurationError: the file cannot be read or parsed, or names a section or field that does not exist.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ConfigurationError("--config", str(path), f"name a readable file ({error.strerror})") from error
    try:
        content = json.loads(raw) if path.suffix == ".json" else tomllib.loads(raw.decode())
    except ValueError as error:
        kind = "JSON" if path.suffix == ".json" else "TOML"
        raise ConfigurationError("--config", str(path), f"is not {kind}: {error}") from error
    if not isinstance(content, dict):
        raise ConfigurationError("--config", str(path), "must hold one object of sections")
    for name in content:
        if name not in SECTIONS:
            raise ConfigurationError(f"{path}: [{name}]", name, f"no such section; {_nearest(name, SECTIONS)}")
    values = content.get(section.name, {})
    if not isinstance(values, dict):
        raise ConfigurationError(f"{path}: {section.name}", values, "write it as a section with fields")
    return dict(_flat(values, section, path, ()))


def _flat(values: dict[str, Any], section: Section, file: Path, above: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    settings = section.settings()
    for name, value in values.items():
        path = (*above, name)
        if any(setting.path == path for setting in settings):
            yield "_".join(path), value
        elif isinstance(value, dict) and any(setting.path[: len(path)] == path for setting in settings):
            yield from _flat(value, section, file, path)
        else:
            near = _nearest(".".join(path), [".".join(setting.path) for setting in settings])
            raise ConfigurationError(f"{file}: {'.'.join((section.name, *path))}", value, f"no such setting; {near}")


def _nearest(name: str, names: Any) -> str:
    close = difflib.get_close_matches(name, names, 1)
    return f"did you mean {close[0]}?" if close else f"there are {', '.join(names)}"


def _put(values: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    for name in path[:-1]:
        values = values.setdefault(name, {})
    values[path[-1]] = value


def _settings(section: str, model: type[BaseModel], above: tuple[str, ...]) -> Iterator[Setting]:
    for name, info in model.model_fields.items():
        kind = _bare(info.annotation)
        if _is_model(kind):
            yield from _settings(section, kind, (*above, name))
        else:
            yield Setting(section, (*above, name), info)


def _bare(annotation: Any) -> Any:
    if get_origin(annotation) is Annotated:
        return _bare(get_args(annotation)[0])
    if get_origin(annotation) in {Union, types.UnionType}:
        some = [part for part in get_args(annotation) if part is not type(None)]
        return _bare(some[0]) if len(some) == 1 else annotation
    return annotation


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _option(setting: Setting) -> Callable[[Command], Command]:
    """The click option of a field. The model alone judges values, so that each source is judged alike."""
    default = setting.shown_default
    if default != "required":
        default = f"default {default}"
    help_text = f"{setting.info.description or ''}  [env {setting.variable}; {default}]"
    if setting.kind is bool:
        off = re.sub("^--", "--no-", setting.flag)
        return click.option(f"{setting.flag}/{off}", setting.name, default=None, help=help_text)
    if setting.choices:
        return click.option(
            setting.flag, setting.name, type=click.Choice(setting.choices), default=None, help=help_text
        )
    metavar = "SIZE" if setting.is_size else "JSON" if setting.is_table else _metavar(setting.kind)
    multiple = setting.is_list and not setting.is_table
    default_value = () if multiple else None
    return click.option(
        setting.flag, setting.name, type=str, metavar=metavar, multiple=multiple, default=default_value, help=help_text
    )


def _metavar(kind: Any) -> str:
    if get_origin(kind) in {list, tuple, set, frozenset}:
        return _metavar(_bare(get_args(kind)[0]))
    if kind is int:
        return "INTEGER"
    if kind is float:
        return "NUMBER"
    return "PATH" if isinstance(kind, type) and issubclass(kind, Path) else "TEXT"


def _limits(setting: Setting) -> str:
    if setting.choices:
        return "one of " + ", ".join(f"`{choice}`" for choice in setting.choices)
    words = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
    found = []
    for part in setting.info.metadata:
        for name, word in words.items():
            if (limit := getattr(part, name, None)) is not None:
                found.append(f"{word} {show_size(limit) if setting.is_size else limit}")
    return ", ".join(found)
