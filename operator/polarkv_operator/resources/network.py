"""Who may reach the pods: NetworkPolicies, for networks that enforce them."""

from __future__ import annotations

from typing import Any

from polarkv_operator.api.cluster import PolarKVCluster
from polarkv_operator.resources import names
from polarkv_operator.resources.common import Object, Release, build
from polarkv_operator.resources.names import Component


def policies(cluster: PolarKVCluster, release: Release) -> list[Object]:
    """One policy for the manager and one for the cache nodes; none when they are turned off."""
    wanted = cluster.spec.security.network_policy
    if not wanted.enabled:
        return []
    own = {"podSelector": {"matchLabels": names.selector(cluster, Component.CACHE_NODE)}}
    operator = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": release.operator_namespace}}}
    return [
        _policy(
            cluster,
            Component.MANAGER,
            names.manager(cluster),
            _rule(wanted.clients, [own], names.MANAGER_RPC_PORT),
            _rule(wanted.monitoring, [operator], names.MANAGER_HTTP_PORT),
        ),
        _policy(
            cluster,
            Component.CACHE_NODE,
            names.cache(cluster),
            _rule(wanted.clients, [], names.SLAB_PORT),
            _rule(wanted.monitoring, [operator], names.SLAB_METRICS_PORT, names.DISK_METRICS_PORT),
        ),
    ]


def _rule(named: list[dict[str, Any]], always: list[Object], *ports: int) -> Object:
    """Without anybody named, everybody: a rule without ``from``."""
    rule: Object = {"ports": [{"port": port, "protocol": "TCP"} for port in ports]}
    return {**rule, "from": [*always, *named]} if named else rule


def _policy(cluster: PolarKVCluster, component: Component, name: str, *ingress: Object) -> Object:
    content = {
        "podSelector": {"matchLabels": names.selector(cluster, component)},
        "policyTypes": ["Ingress"],
        "ingress": list(ingress),
    }
    return build(cluster, "networking.k8s.io/v1", "NetworkPolicy", name, component, spec=content)
