"""The CustomResourceDefinition, generated from the models: a structural schema, CEL rules, columns, subresources."""

from __future__ import annotations

import copy
from typing import Any

from pydantic.json_schema import GenerateJsonSchema

from polarkv_operator.api import cluster
from polarkv_operator.api.cluster import PolarKVCluster

_CONDITION = ".status.conditions[?(@.type=='{}')].{}"
# name, type, JSON path, priority (0: always shown; 1: with -o wide), description
_COLUMNS = (
    ("Ready", "string", _CONDITION.format("Ready", "status"), 0, "Whether stores and loads work."),
    ("Nodes", "string", ".status.nodes", 0, "Cache nodes Active of those wanted."),
    ("Served", "string", ".status.served", 0, "Bytes per second that all cache nodes together serve to readers."),
    ("State", "string", _CONDITION.format("Ready", "reason"), 0, "Why it is Ready or not, in one word."),
    ("Age", "date", ".metadata.creationTimestamp", 0, "Time since it was made."),
    ("Memory", "string", ".spec.cacheNodes.memory.size", 1, "Memory tier of each cache node."),
    ("Layout", "string", ".spec.cacheNodes.storage.layout", 1, "How the volumes of a cache node are used together."),
    ("Endpoint", "string", ".status.endpoint", 1, "Where clients find the manager."),
    ("Message", "string", _CONDITION.format("Ready", "message"), 1, "Why it is Ready or not, for people."),
)
# The schema language of Kubernetes has no word for these; what they say is checked by the models.
_LEFT_OUT = ("$defs", "title", "propertyNames")


def custom_resource_definition() -> dict[str, Any]:
    """The whole object, as the API server takes it."""
    version = {
        "name": cluster.VERSION,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": open_api_schema()},
        "subresources": {
            "status": {},
            "scale": {
                "specReplicasPath": ".spec.cacheNodes.replicas",
                "statusReplicasPath": ".status.replicas",
                "labelSelectorPath": ".status.selector",
            },
        },
        "additionalPrinterColumns": [
            {"name": name, "type": kind, "jsonPath": path, "description": text} | ({"priority": rank} if rank else {})
            for name, kind, path, rank, text in _COLUMNS
        ],
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{cluster.PLURAL}.{cluster.GROUP}"},
        "spec": {
            "group": cluster.GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": cluster.KIND,
                "listKind": f"{cluster.KIND}List",
                "plural": cluster.PLURAL,
                "singular": cluster.SINGULAR,
                "shortNames": [cluster.SHORT_NAME],
                "categories": ["polarkv"],
            },
            "versions": [version],
        },
    }


def open_api_schema() -> dict[str, Any]:
    """The structural schema of the object. The metadata is the API server's own."""
    whole = PolarKVCluster.model_json_schema(by_alias=True, schema_generator=_Ordered)
    schema = _structural(whole, whole.get("$defs", {}))
    schema["description"] = (PolarKVCluster.__doc__ or "").strip()
    schema["required"] = ["spec"]
    schema["properties"] = {
        "apiVersion": {"type": "string"},
        "kind": {"type": "string"},
        "metadata": {"type": "object"},
        "spec": schema["properties"]["spec"],
        "status": schema["properties"]["status"],
    }
    return schema


class _Ordered(GenerateJsonSchema):
    """Fields stay in the order in which the models name them."""

    def sort(self, value: Any, parent_key: str | None = None) -> Any:
        return value


def _structural(schema: dict[str, Any], defs: dict[str, Any]) -> dict[str, Any]:
    """The same schema in the form that Kubernetes takes: no references, no unions with null, defaults all the way."""
    schema = _without_null(_resolved(schema, defs), defs)
    result = copy.deepcopy({name: value for name, value in schema.items() if name not in _LEFT_OUT})
    extra = result.pop("additionalProperties", None)
    for keyed in result.pop("patternProperties", {}).values():  # the form of the keys is checked by the models
        extra = keyed
    if isinstance(extra, dict) and extra:
        result["additionalProperties"] = _structural(extra, defs)
    if "items" in result:
        result["items"] = _structural(result["items"], defs)
    if "properties" in result:
        required = result.get("required", [])
        result["properties"] = {
            name: _property(name, _structural(child, defs), required) for name, child in result["properties"].items()
        }
    return result


def _property(name: str, schema: dict[str, Any], required: list[str]) -> dict[str, Any]:
    # An object that is left out gets the defaults of what is in it.
    if schema.get("type") == "object" and "properties" in schema and name not in required:
        if schema.pop("nullable", False):
            return schema
        # The API server holds a default against the object's own rules before it fills in the defaults below it.
        ruled = "x-kubernetes-validations" in schema
        children = schema["properties"] if ruled else {}
        default = {key: child["default"] for key, child in children.items() if "default" in child}
        return {**schema, "default": default}
    schema.pop("nullable", None)
    return schema


def _resolved(schema: dict[str, Any], defs: dict[str, Any]) -> dict[str, Any]:
    """With what it refers to in its place; what stands beside a reference (a description, a default) wins."""
    if "$ref" not in schema:
        return schema
    beside = {name: value for name, value in schema.items() if name != "$ref"}
    return {**_resolved(defs[schema["$ref"].rpartition("/")[2]], defs), **beside}


def _without_null(schema: dict[str, Any], defs: dict[str, Any]) -> dict[str, Any]:
    """A field that may be left out: its schema, marked, without a default."""
    choices = [choice for choice in schema.get("anyOf", ()) if choice != {"type": "null"}]
    if len(choices) != 1 or "x-kubernetes-int-or-string" in schema:
        return schema
    beside = {name: value for name, value in schema.items() if name not in ("anyOf", "default")}
    return {**_resolved(choices[0], defs), **beside, "nullable": True}
