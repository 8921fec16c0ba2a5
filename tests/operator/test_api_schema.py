"""The CustomResourceDefinition: a structural schema that says what the models say."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from polarkv_operator.api import parse
from polarkv_operator.api.schema import custom_resource_definition, open_api_schema
from tests.operator.support.clusters import body

SCHEMA = open_api_schema()
# What a structural schema may not have, anywhere: https://kubernetes.io/docs/tasks/extend-kubernetes (structural).
FORBIDDEN = {
    "$ref", "$defs", "definitions", "oneOf", "allOf", "not", "const", "propertyNames", "patternProperties",
    "exclusiveMinimum", "exclusiveMaximum", "uniqueItems", "title", "nullable",
}  # fmt: skip


def nodes(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every schema in a schema, with its path."""
    yield path, schema
    for name, child in schema.get("properties", {}).items():
        yield from nodes(child, f"{path}.{name}")
    for inner in ("items", "additionalProperties"):
        if isinstance(schema.get(inner), dict):
            yield from nodes(schema[inner], f"{path}[]")


def test_the_schema_is_structural() -> None:
    for path, schema in nodes(SCHEMA):
        assert not FORBIDDEN & set(schema), path
        if schema.get("x-kubernetes-int-or-string"):
            assert schema["anyOf"] == [{"type": "integer"}, {"type": "string"}], path
            assert "type" not in schema, path
        else:
            assert schema.get("type") in {"object", "array", "string", "integer", "boolean"}, path
            assert "anyOf" not in schema, path
        assert not ("properties" in schema and "additionalProperties" in schema), path


def test_every_field_says_what_it_is() -> None:
    for path, schema in nodes(SCHEMA["properties"]["spec"], "spec"):
        if path.endswith("[]"):
            continue
        assert schema["description"].endswith("."), path


def test_rules_point_to_fields_that_exist() -> None:
    for path, schema in nodes(SCHEMA):
        for rule in schema.get("x-kubernetes-validations", ()):
            place = schema
            for name in rule.get("fieldPath", "").split(".")[1:]:
                place = place["properties"][name]
            assert rule["message"], path


def test_defaults_of_the_schema_are_those_of_the_models() -> None:
    def filled(schema: dict[str, Any], value: Any) -> Any:
        """What the API server makes of a value."""
        if not isinstance(value, dict):
            return value
        result = dict(value)
        for name, child in schema.get("properties", {}).items():
            if name not in result and "default" in child:
                result[name] = child["default"]
            if name in result:
                result[name] = filled(child, result[name])
        return result

    stored = {**body(), "spec": filled(SCHEMA["properties"]["spec"], body()["spec"])}
    assert stored["spec"]["cacheNodes"]["replicas"] == 3
    assert parse(stored).spec == parse(body()).spec


def test_the_scale_subresource_reaches_fields_that_exist() -> None:
    (version,) = custom_resource_definition()["spec"]["versions"]
    for path in version["subresources"]["scale"].values():
        place = SCHEMA
        for name in path.split(".")[1:]:
            place = place["properties"][name]


def test_pods_are_not_inlined() -> None:
    assert sum(1 for _ in nodes(SCHEMA)) < 400
