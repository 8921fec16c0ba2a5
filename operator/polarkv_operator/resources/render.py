"""Everything that a cluster consists of, in the order in which it is best applied."""

from __future__ import annotations

from collections.abc import Iterator

from polarkv_operator.api.cluster import PolarKVCluster
from polarkv_operator.resources import (
    access,
    cache_nodes,
    connection,
    manager,
    monitoring,
    network,
    secrets,
    settings,
)
from polarkv_operator.resources.common import Object, Release

# (apiVersion, kind) of all that is ever made. What carries the cluster's label and is wanted no longer is removed,
# apart from volume claims: they hold data.
KINDS = (
    ("v1", "ServiceAccount"),
    ("v1", "Secret"),
    ("v1", "ConfigMap"),
    ("v1", "PersistentVolumeClaim"),
    ("networking.k8s.io/v1", "NetworkPolicy"),
    ("v1", "Service"),
    ("policy/v1", "PodDisruptionBudget"),
    ("apps/v1", "Deployment"),
    ("apps/v1", "StatefulSet"),
    (monitoring.POD_MONITOR_API, "PodMonitor"),
)
KEPT_KINDS = frozenset({"PersistentVolumeClaim"})
# An API server (1.36) writes a volume claim anew at every apply, whether or not anything differs: apply it only
# while it is not there, or when it should grow.
ONCE_KINDS = frozenset({"PersistentVolumeClaim"})


def children(cluster: PolarKVCluster, release: Release, contents: secrets.Contents, replicas: int) -> list[Object]:
    """All objects of a cluster with so many cache nodes.

    Raises:
        SpecInvalid: a ``podTemplate`` does not fit over a pod; nothing else can be wrong in a cluster that was parsed.
    """
    return list(_children(cluster, release, contents, replicas))


def _children(cluster: PolarKVCluster, release: Release, contents: secrets.Contents, replicas: int) -> Iterator[Object]:
    digests = contents.digests()
    yield from access.service_accounts(cluster)
    yield from secrets.objects(cluster, contents)
    yield settings.config_map(cluster)
    yield connection.config_map(cluster)
    if (volume := manager.metadata_volume(cluster)) is not None:
        yield volume
    yield from network.policies(cluster, release)
    yield manager.service(cluster)
    yield cache_nodes.service(cluster)
    yield cache_nodes.disruption_budget(cluster)
    yield manager.deployment(cluster, release, digests)
    yield cache_nodes.stateful_set(cluster, release, digests, replicas)
    if (monitor := monitoring.pod_monitor(cluster, release)) is not None:
        yield monitor
