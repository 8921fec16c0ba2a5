"""Every right of the operator and of the webhook, and what it is for. The chart's roles are generated from it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from polarkv_operator.api.cluster import GROUP, PLURAL
from polarkv_operator.resources import render

_READ = ("get", "list", "watch")


class Holder(StrEnum):
    """Who has rights."""

    OPERATOR = "operator"
    WEBHOOK = "webhook"


class Where(StrEnum):
    """How far a right reaches."""

    CLUSTERS = "clusters"  # wherever clusters are looked after: everywhere, or in one namespace
    RELEASE = "release"  # the namespace of the release
    EVERYWHERE = "everywhere"  # things without a namespace
    CLUSTERWIDE = "clusterwide"  # such things, where clusters are looked after in all namespaces


class Named(StrEnum):
    """Objects of the release that a right is narrowed to; the chart knows their names."""

    WEBHOOK_CONFIGURATION = "webhook-configuration"
    WEBHOOK_SECRET = "webhook-secret"


@dataclass(frozen=True)
class Right:
    """Verbs on resources of a group."""

    holder: Holder
    where: Where
    group: str
    resources: tuple[str, ...]
    verbs: tuple[str, ...]
    reason: str
    named: Named | None = None


def plural(kind: str) -> str:
    """The resource of a kind, as Kubernetes names it in its API."""
    low = kind.lower()
    return f"{low[:-1]}ies" if low.endswith("y") else f"{low}s"


def _verbs(kind: str) -> tuple[str, ...]:
    """What is done with a kind of child."""
    # Whether there are PodMonitors is seen at each look; they are not watched.
    read = ("get", "list") if kind == "PodMonitor" else _READ
    return (*read, "create", "patch", *(() if kind in render.KEPT_KINDS else ("delete",)))


def _children() -> tuple[Right, ...]:
    """What clusters consist of, by the builders' own list."""
    found: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for api_version, kind in render.KINDS:
        found.setdefault((api_version.rpartition("/")[0], _verbs(kind)), []).append(plural(kind))
    return tuple(
        Right(Holder.OPERATOR, Where.CLUSTERS, group, tuple(resources), verbs, "what clusters consist of")
        for (group, verbs), resources in found.items()
    )


RIGHTS = (
    Right(Holder.OPERATOR, Where.CLUSTERS, GROUP, (PLURAL,), _READ, "to see what is wanted"),
    Right(Holder.OPERATOR, Where.CLUSTERS, GROUP, (f"{PLURAL}/status",), ("patch",), "to say what is there"),
    Right(Holder.OPERATOR, Where.CLUSTERS, GROUP, (f"{PLURAL}/finalizers",), ("update",),
          "to own children whose deletion a cluster's waits for"),
    *_children(),
    Right(Holder.OPERATOR, Where.CLUSTERS, "", ("pods",), ("list", "watch", "patch", "delete"),
          "to note drains at cache nodes, and to replace them when they are drained"),
    Right(Holder.OPERATOR, Where.CLUSTERS, "", ("events",), ("create",), "to say what it does"),
    Right(Holder.OPERATOR, Where.CLUSTERWIDE, "apiextensions.k8s.io", ("customresourcedefinitions",), ("list", "watch"),
          "kopf looks there for the resources that it is to follow"),
    Right(Holder.OPERATOR, Where.RELEASE, "coordination.k8s.io", ("leases",), ("get", "create", "update"),
          "so that one operator acts at a time"),
    Right(Holder.WEBHOOK, Where.CLUSTERS, GROUP, (PLURAL,), ("get",), "to read what a labelled pod asks for"),
    Right(Holder.WEBHOOK, Where.CLUSTERS, "", ("events",), ("create",), "to say why a pod was left alone"),
    Right(Holder.WEBHOOK, Where.CLUSTERS, "", ("pods",), ("get",), "to tie that to the pod, once it has a uid"),
    Right(Holder.WEBHOOK, Where.RELEASE, "", ("secrets",), ("get", "update"), "to share its certificate",
          Named.WEBHOOK_SECRET),
    # A right to create cannot be narrowed to a name.
    Right(Holder.WEBHOOK, Where.RELEASE, "", ("secrets",), ("create",), "to share its certificate"),
    Right(Holder.WEBHOOK, Where.EVERYWHERE, "admissionregistration.k8s.io", ("mutatingwebhookconfigurations",),
          ("get", "patch"), "to have the API server trust its certificate", Named.WEBHOOK_CONFIGURATION),
)  # fmt: skip


def rights(holder: Holder, where: Where) -> list[Right]:
    """The rights of one holder of one reach."""
    return [right for right in RIGHTS if right.holder is holder and right.where is where]
