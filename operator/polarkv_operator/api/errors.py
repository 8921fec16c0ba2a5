"""The one error of the API: a field of an object is wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from polarkv_client.errors import ConfigurationError

_SHOWN_CHARACTERS = 100
_OBJECT, _WHOLE = "write an object, with fields of its own", "write a whole number"
# What pydantic finds, said as what to do; what is not here has a sentence of its own already.
_FIXES = {
    "missing": "it is required: set it",
    "model_type": _OBJECT,
    "dict_type": _OBJECT,
    "list_type": "write a list",
    "string_type": "write text",
    "bool_type": "write true or false",
    "bool_parsing": "write true or false",
    "int_type": _WHOLE,
    "int_parsing": _WHOLE,
    "int_parsing_size": _WHOLE,
    "int_from_float": _WHOLE,
    "enum": "use {expected}",
    "greater_than_equal": "use at least {ge}",
    "less_than_equal": "use at most {le}",
    "string_too_short": "use at least {min_length} characters",
    "string_too_long": "use at most {max_length} characters",
    "string_pattern_mismatch": "use the form {pattern}",
    "too_short": "name at least {min_length}",
    "too_long": "name at most {max_length}",
}


class SpecInvalid(ConfigurationError):
    """A field of an object of ours is wrong; ``field`` is its path from the object's root (``spec.cache.maxKeys``)."""

    def __init__(self, field: str, value: object, fix: str) -> None:
        shown = str(value)
        super().__init__(field, shown if len(shown) <= _SHOWN_CHARACTERS else f"{shown[:_SHOWN_CHARACTERS]}…", fix)


def from_pydantic(error: ValidationError, root: str = "") -> SpecInvalid:
    """The first thing that pydantic found wrong, in our words; ``root`` goes before its place."""
    first = error.errors(include_url=False)[0]
    context: Mapping[str, Any] = first.get("ctx") or {}
    place: Sequence[int | str] = first["loc"]
    form = _FIXES.get(first["type"])
    fix = form.format(**context) if form else first["msg"].removeprefix("Value error, ")
    value = "nothing" if first["type"] == "missing" else context.get("value", first.get("input"))
    return SpecInvalid(dotted(root, [*place, *context.get("below", ())]), value, fix)


def dotted(root: str, place: Sequence[int | str]) -> str:
    """A path as ``kubectl explain`` and the API server write it: ``spec.security.tenants[0].name``."""
    text = root
    for part in place:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{part}" if text else part
    return text
