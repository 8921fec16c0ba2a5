"""The user's part of a pod's spec, laid over the operator's: a strategic merge, as ``kubectl patch`` does it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from polarkv_operator.api.errors import SpecInvalid

# Lists of things that have a name: merged by it. All others are replaced. Keys as in the Kubernetes API.
_MERGE_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "ephemeralContainers": "name",
    "volumes": "name",
    "env": "name",
    "imagePullSecrets": "name",
    "resourceClaims": "name",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "ports": "containerPort",
    "hostAliases": "ip",
    "topologySpreadConstraints": "topologyKey",
}


def overlay(base: Mapping[str, Any], over: Mapping[str, Any], field: str) -> dict[str, Any]:
    """``base`` with ``over`` laid upon it; neither is changed. A null in ``over`` removes what is there.

    Raises:
        SpecInvalid: ``over`` has something of another shape, or a thing without the name it is merged by.
    """
    result = dict(base)
    for name, value in over.items():
        place = f"{field}.{name}"
        if value is None:
            result.pop(name, None)
        elif name in _MERGE_KEYS:
            result[name] = _merged(result.get(name, []), value, _MERGE_KEYS[name], place)
        elif isinstance(result.get(name), dict):
            result[name] = overlay(result[name], _object(value, place), place)
        elif isinstance(result.get(name), str | int | bool) and isinstance(value, dict | list):
            raise SpecInvalid(place, value, "write a single value, as the pod's own is")
        else:
            result[name] = copy.deepcopy(value)
    return result


def _merged(base: list[dict[str, Any]], over: Any, key: str, field: str) -> list[dict[str, Any]]:
    if not isinstance(over, list):
        raise SpecInvalid(field, over, "write a list")
    result = list(base)
    places = {item[key]: index for index, item in enumerate(base)}
    for index, given in enumerate(over):
        item = _object(given, f"{field}[{index}]")
        name = item.get(key)
        if not isinstance(name, str | int) or isinstance(name, bool):
            raise SpecInvalid(f"{field}[{index}].{key}", name, f"give it a {key}: lists are merged by it")
        if name in places:
            result[places[name]] = overlay(result[places[name]], item, f"{field}[{index}]")
        else:
            places[name] = len(result)
            result.append(copy.deepcopy(item))
    return result


def _object(value: Any, field: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise SpecInvalid(field, value, "write an object, with fields of its own")
    return value
