"""Compares a connector's methods with those of the engine's interface that they stand for. Standard library only."""

from __future__ import annotations

import inspect
from typing import Any


def parameters(function: Any) -> list[str]:
    """Names, kinds and whether there is a default, as text; annotations are nobody's promise."""
    stars: dict[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    found = []
    for each in inspect.signature(function).parameters.values():
        star = stars.get(each.kind, "")
        only = " (by name)" if each.kind is inspect.Parameter.KEYWORD_ONLY else ""
        default = "" if each.default is inspect.Parameter.empty else f"={each.default!r}"
        found.append(f"{star}{each.name}{default}{only}")
    return found


def differences(ours: type, theirs: type, recorded: dict[str, list[str]] | None = None) -> list[str]:
    """Sentences, one for each difference; none when ``ours`` fits ``theirs``.

    Args:
        recorded: signatures by name that were read when the connector was written; the engine's must still be so.
    """
    found = []
    hooks = {name for name in vars(ours) if not name.startswith("_") and callable(getattr(ours, name))} | {"__init__"}
    for name in sorted(hooks):
        if not hasattr(theirs, name):
            found.append(f"{name}: the engine does not call it any more")
            continue
        own, expected = parameters(getattr(ours, name)), parameters(getattr(theirs, name))
        if own != expected:
            found.append(f"{name}: the engine has ({', '.join(expected)}), the connector ({', '.join(own)})")
    missing = sorted(getattr(ours, "__abstractmethods__", ()))
    found += [f"{name}: the engine wants it, ({', '.join(parameters(getattr(theirs, name)))})" for name in missing]
    for name, expected in sorted((recorded or {}).items()):
        now = parameters(getattr(theirs, name)) if hasattr(theirs, name) else None
        if now != expected:
            shown = "gone" if now is None else f"({', '.join(now)})"
            found.append(f"{name}: was ({', '.join(expected)}) when the connector was written, and is {shown}")
    return found
