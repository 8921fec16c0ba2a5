"""Names, labels, ports and paths: everything that two builders, or a builder and the operator, must agree on."""

from __future__ import annotations

from enum import StrEnum

from polarkv_operator.api.cluster import GROUP, PolarKVCluster

MANAGED_BY = "polarkv-operator"
CLUSTER_LABEL = f"{GROUP}/cluster"
COMPONENT_LABEL = "app.kubernetes.io/component"
# Of all that a pod was started from and that is not in its template: other content, other pods.
SETTINGS_ANNOTATION = f"{GROUP}/settings"
SECRETS_ANNOTATION = f"{GROUP}/secrets"
SECRETS_GENERATION_ANNOTATION = f"{GROUP}/secrets-generation"

MANAGER_RPC_PORT = 7700
MANAGER_HTTP_PORT = 7701
SLAB_PORT = 7710
SLAB_METRICS_PORT = 7711
DISK_METRICS_PORT = 7712
# Of Services: an address of each family that the Kubernetes cluster has, and no demand for either.
IP_FAMILIES = "PreferDualStack"

# In the images, as the Containerfile makes it.
USER_ID = 65532


class Component(StrEnum):
    """The two kinds of pods."""

    MANAGER = "manager"
    CACHE_NODE = "cache-node"


def manager(cluster: PolarKVCluster) -> str:
    """The manager's Deployment, Service, ServiceAccount and NetworkPolicy."""
    return f"{cluster.name}-manager"


def cache(cluster: PolarKVCluster) -> str:
    """The cache nodes' StatefulSet, headless Service, ServiceAccount, budget and NetworkPolicy."""
    return f"{cluster.name}-cache"


def cache_node(cluster: PolarKVCluster, ordinal: int) -> str:
    """One cache node: its pod, and its name at the manager."""
    return f"{cache(cluster)}-{ordinal}"


def settings(cluster: PolarKVCluster) -> str:
    """ConfigMap of the servers' settings."""
    return f"{cluster.name}-settings"


def connection(cluster: PolarKVCluster) -> str:
    """ConfigMap of what clients need."""
    return f"{cluster.name}-connection"


def metadata_volume(cluster: PolarKVCluster) -> str:
    """Volume claim of the metadata store."""
    return f"{cluster.name}-metadata"


def cluster_secret(cluster: PolarKVCluster) -> str:
    """Secret that manager and cache nodes share; key ``secret``."""
    return f"{cluster.name}-secret"


def manager_tokens(cluster: PolarKVCluster) -> str:
    """Secret with the manager's tokens file; key ``tokens.json``."""
    return f"{cluster.name}-tokens"


def admin_secret(cluster: PolarKVCluster) -> str:
    """Secret with the admin's token; key ``token``."""
    return f"{cluster.name}-admin"


def client_secret(cluster: PolarKVCluster) -> str:
    """Secret with the clients' tokens; a key for each tenant."""
    return f"{cluster.name}-client"


def endpoint(cluster: PolarKVCluster) -> str:
    """Where clients and cache nodes find the manager."""
    return f"tcp://{manager(cluster)}.{cluster.namespace}.svc:{MANAGER_RPC_PORT}"


def admin_endpoint(cluster: PolarKVCluster) -> str:
    """Where the manager's admin API is."""
    return f"http://{manager(cluster)}.{cluster.namespace}.svc:{MANAGER_HTTP_PORT}"


def selector(cluster: PolarKVCluster, component: Component) -> dict[str, str]:
    """Labels that select a component's pods. They can never change."""
    return {CLUSTER_LABEL: cluster.name, COMPONENT_LABEL: component.value}


def selector_text(cluster: PolarKVCluster) -> str:
    """Selects the cache nodes' pods, as the scale subresource shows it."""
    return ",".join(f"{name}={value}" for name, value in selector(cluster, Component.CACHE_NODE).items())


def labels(cluster: PolarKVCluster, component: Component | None = None) -> dict[str, str]:
    """Labels of everything that belongs to a cluster."""
    common = {
        "app.kubernetes.io/name": "polarkv",
        "app.kubernetes.io/instance": cluster.name,
        "app.kubernetes.io/managed-by": MANAGED_BY,
        CLUSTER_LABEL: cluster.name,
    }
    return common if component is None else common | {COMPONENT_LABEL: component.value}
