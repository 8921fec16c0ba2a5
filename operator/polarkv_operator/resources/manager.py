"""The manager: a Deployment of one pod, the Service that everybody finds it by, its metadata store's volume."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polarkv_operator.api.cluster import PolarKVCluster
from polarkv_operator.api.spec import MetadataStoreType
from polarkv_operator.resources import names, settings
from polarkv_operator.resources.common import (
    Object,
    Pod,
    Release,
    SecretDigests,
    build,
    container,
    digest,
    larger_volume,
    other_class,
    pod_template,
    probe,
    resources,
)
from polarkv_operator.resources.names import Component

# Measured: at most 400 bytes a key; the rest is the process itself and what is under way.
_KEY_BYTES = 400
_PROCESS_BYTES = 256 << 20
_CPU = "500m"
_GRACE_SECONDS = 30
METADATA_URL_VARIABLE = "POLARKV_MANAGER_METADATA_URL"


def deployment(cluster: PolarKVCluster, release: Release, digests: SecretDigests) -> Object:
    """The manager's Deployment.

    Raises:
        SpecInvalid: ``manager.podTemplate`` does not fit.
    """
    spec = cluster.spec.manager
    pod = Pod(
        containers=[_container(cluster, release)],
        volumes=_volumes(cluster),
        service_account=names.manager(cluster),
        grace_seconds=_GRACE_SECONDS,
    )
    annotations = {
        names.SETTINGS_ANNOTATION: digest(settings.manager_settings(cluster)),
        names.SECRETS_ANNOTATION: digest(digests.cluster, digests.tokens),
    }
    template = pod_template(cluster, Component.MANAGER, pod, annotations, spec.pod_template, "spec.manager.podTemplate")
    content = {
        "replicas": spec.replicas,
        "revisionHistoryLimit": 3,
        # Two managers at a time would grant the same memory twice, and SQLite's volume has one user.
        "strategy": {"type": "Recreate"},
        "selector": {"matchLabels": names.selector(cluster, Component.MANAGER)},
        "template": template,
    }
    return build(cluster, "apps/v1", "Deployment", names.manager(cluster), Component.MANAGER, spec=content)


def _container(cluster: PolarKVCluster, release: Release) -> Object:
    spec = cluster.spec.manager
    environment: list[Object] = [{"name": "POLARKV_LOG_LEVEL", "value": cluster.spec.monitoring.log_level.upper()}]
    if spec.metadata_store.secret_ref is not None:
        reference = {"name": spec.metadata_store.secret_ref.name, "key": spec.metadata_store.secret_ref.key}
        environment.append({"name": METADATA_URL_VARIABLE, "valueFrom": {"secretKeyRef": reference}})
    mounts: list[Object] = [
        {"name": "settings", "mountPath": settings.SETTINGS_FOLDER, "readOnly": True},
        {"name": "secret", "mountPath": settings.SECRET_FOLDER, "readOnly": True},
        {"name": "tokens", "mountPath": settings.TOKENS_FOLDER, "readOnly": True},
    ]
    if spec.metadata_store.type is MetadataStoreType.SQLITE:
        mounts.append({"name": "metadata", "mountPath": settings.METADATA_FOLDER})
    memory_bytes = _PROCESS_BYTES + _KEY_BYTES * cluster.spec.cache.max_keys
    return container(
        cluster,
        release,
        "manager",
        ["polarkv", "manager", "--config", f"{settings.SETTINGS_FOLDER}/{settings.MANAGER_FILE}"],
        env=environment,
        ports=[
            {"name": "rpc", "containerPort": names.MANAGER_RPC_PORT, "protocol": "TCP"},
            {"name": "http", "containerPort": names.MANAGER_HTTP_PORT, "protocol": "TCP"},
        ],
        resources=resources(spec.resources, {"cpu": _CPU, "memory": memory_bytes}),
        volumeMounts=mounts,
        # Not /readyz: that waits for a cache node, and cache nodes come through the Service, which needs a ready pod.
        startupProbe=probe("/healthz", "http", 1, 60),
        readinessProbe=probe("/healthz", "http", 5, 3),
        # Every restart forgets grants: only a manager that is truly stuck deserves one.
        livenessProbe=probe("/healthz", "http", 10, 6),
    )


def _volumes(cluster: PolarKVCluster) -> list[Object]:
    volumes = [
        {"name": "settings", "configMap": {
            "name": names.settings(cluster), "defaultMode": 0o444,
            "items": [{"key": settings.MANAGER_FILE, "path": settings.MANAGER_FILE}],
        }},
        {"name": "secret", "secret": {"secretName": names.cluster_secret(cluster), "defaultMode": 0o440}},
        {"name": "tokens", "secret": {"secretName": names.manager_tokens(cluster), "defaultMode": 0o440}},
    ]  # fmt: skip
    if cluster.spec.manager.metadata_store.type is MetadataStoreType.SQLITE:
        volumes.append({"name": "metadata", "persistentVolumeClaim": {"claimName": names.metadata_volume(cluster)}})
    return volumes


def service(cluster: PolarKVCluster) -> Object:
    """The Service by which clients and cache nodes find the manager."""
    content = {
        "type": "ClusterIP",
        "ipFamilyPolicy": names.IP_FAMILIES,
        "selector": names.selector(cluster, Component.MANAGER),
        "ports": [
            {"name": "rpc", "port": names.MANAGER_RPC_PORT, "targetPort": "rpc", "protocol": "TCP"},
            {"name": "http", "port": names.MANAGER_HTTP_PORT, "targetPort": "http", "protocol": "TCP"},
        ],
    }
    return build(cluster, "v1", "Service", names.manager(cluster), Component.MANAGER, spec=content)


def metadata_volume(cluster: PolarKVCluster) -> Object | None:
    """SQLite's volume; None where metadata is elsewhere. It goes with the cluster: what it holds can be proved anew."""
    store = cluster.spec.manager.metadata_store
    if store.type is not MetadataStoreType.SQLITE:
        return None
    content: Object = {
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": str(store.volume_size)}},
    }
    if store.storage_class_name is not None:
        content["storageClassName"] = store.storage_class_name
    name = names.metadata_volume(cluster)
    return build(cluster, "v1", "PersistentVolumeClaim", name, Component.MANAGER, spec=content)


def difference_in_metadata_volume(cluster: PolarKVCluster, claim: Mapping[str, Any]) -> str:
    """Why the claim that is there cannot become what the spec wants, in a sentence; empty: it is, or it may grow.

    The API server refuses such changes of the spec, but claims outlive a change of ``type`` that went back and forth.
    """
    store, spec, name = cluster.spec.manager.metadata_store, claim["spec"], claim["metadata"]["name"]
    field = "manager.metadataStore"
    way_out = "set it back, or set type None, delete the claim, and set type SQLite again"
    return other_class(f"{field}.storageClassName", store.storage_class_name, name, spec, way_out) or larger_volume(
        f"{field}.volumeSize", store.volume_size, name, spec, way_out
    )
