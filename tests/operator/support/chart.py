"""The Helm chart, as Helm renders it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml
from helm_python import Chart

from polarkv_operator import rbac
from polarkv_operator.rbac import Where
from tests.operator.support import golden

CHART = golden.ROOT / "charts" / "polarkv"
NAMESPACE = "polarkv-system"
Object = dict[str, Any]


def rendered(values: Mapping[str, Any] | None = None, name: str = "cache", namespace: str = NAMESPACE) -> list[Object]:
    """Every object of a release with these values."""
    with Chart.load(CHART) as chart:
        texts = chart.render(dict(values or {}), name=name, namespace=namespace)
    documents = [each for name, text in texts.items() if name.endswith(".yaml") for each in yaml.safe_load_all(text)]
    return [each for each in documents if each]


def table(*, clusterwide: bool) -> set[tuple[str, str, str, str]]:
    """(holder, group, resource, verb) of every right, where all namespaces are looked after or one."""
    return {
        (right.holder.value, right.group, resource, verb)
        for right in rbac.RIGHTS if clusterwide or right.where is not Where.CLUSTERWIDE
        for resource in right.resources for verb in right.verbs
    }  # fmt: skip
