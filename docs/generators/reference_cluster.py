"""Render docs/reference/polarkvcluster.md from the schema of the CRD."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from polarkv_operator.api.schema import open_api_schema

OUTPUT = "docs/reference/polarkvcluster.md"
_HEAD = """\
# `PolarKVCluster`

Generated from the code by `make docs`; do not edit. `kubectl explain pkv.spec` shows the same in a terminal. Samples
are in [`crds/samples`](../../crds/samples).

Sizes are Kubernetes quantities (`64Gi`, `500m`, `1G`). A change that cannot be done in place is refused with the
reason. Rules are in italics.
"""


def render() -> str:
    """The whole text."""
    schema = open_api_schema()["properties"]
    parts = [_HEAD]
    for name in ("spec", "status"):
        parts += [f"\n## {name}\n", "| field | type | default | what it is |", "|---|---|---|---|"]
        parts += _rows(schema[name], name)
    return "\n".join(parts) + "\n"


def _rows(schema: dict[str, Any], path: str) -> Iterator[str]:
    required = schema.get("required", ())
    for name, child in schema.get("properties", {}).items():
        place = f"{path}.{name}"
        default = "required" if name in required else _default(child)
        text = child.get("description", "").replace("|", "\\|")
        yield f"| `{place.partition('.')[2]}` | {_kind(child)} | {default} | {text} |"
        inner = child["items"] if child.get("type") == "array" else child
        yield from _rows(inner, f"{place}[]" if inner is not child else place)
        for rule in child.get("x-kubernetes-validations", ()):
            yield f"| | | | *{rule['message'].replace('|', chr(92) + '|')}.* |"


def _kind(schema: dict[str, Any]) -> str:
    if "enum" in schema:
        return ", ".join(f"`{choice}`" for choice in schema["enum"])
    if schema.get("x-kubernetes-int-or-string"):
        return "quantity"
    limits = [f"{word} {schema[key]}" for key, word in (("minimum", "from"), ("maximum", "to")) if key in schema]
    return " ".join([{"array": "list"}.get(schema["type"], schema["type"]), *limits])


def _default(schema: dict[str, Any]) -> str:
    value = schema.get("default")
    if value is None or isinstance(value, dict):
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"
