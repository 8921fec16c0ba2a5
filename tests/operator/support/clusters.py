"""Clusters to test with: the smallest one, and ways to change a field of it."""

from __future__ import annotations

import copy
from typing import Any

_BODY: dict[str, Any] = {
    "apiVersion": "polarkv.io/v1alpha1",
    "kind": "PolarKVCluster",
    "metadata": {"name": "demo", "namespace": "inference", "uid": "00000000-0000-0000-0000-000000000001"},
    "spec": {"cacheNodes": {"memory": {"size": "1Gi"}, "storage": {"volumeSize": "10Gi"}}},
}


def body() -> dict[str, Any]:
    """The smallest cluster there is, as a user writes it and the API server names it."""
    return copy.deepcopy(_BODY)


def with_field(path: str, value: object) -> dict[str, Any]:
    """The smallest cluster with one field of its spec set; with None: removed."""
    changed = body()
    *parents, last = path.split(".")
    place = changed["spec"]
    for name in parents:
        place = place.setdefault(name, {})
    place[last] = value
    if value is None:
        del place[last]
    return changed
