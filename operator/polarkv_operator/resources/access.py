"""ServiceAccounts of the pods. They have no rights at all, and no token is mounted."""

from __future__ import annotations

from polarkv_operator.api.cluster import PolarKVCluster
from polarkv_operator.resources import names
from polarkv_operator.resources.common import Object, build
from polarkv_operator.resources.names import Component


def service_accounts(cluster: PolarKVCluster) -> list[Object]:
    """One for the manager, one for the cache nodes, so that a policy can tell them apart."""
    return [
        build(cluster, "v1", "ServiceAccount", name, component, automountServiceAccountToken=False)
        for name, component in (
            (names.manager(cluster), Component.MANAGER),
            (names.cache(cluster), Component.CACHE_NODE),
        )
    ]
