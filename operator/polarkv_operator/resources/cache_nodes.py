"""The cache nodes: a StatefulSet whose pods hold a slab server and a disk server, their Service, their budget."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from polarkv_operator.api.cache_nodes import HugePages, Layout, Spread, StorageSpec, TransportMode
from polarkv_operator.api.cluster import PolarKVCluster
from polarkv_operator.api.quantity import Quantity, of_bytes
from polarkv_operator.resources import names, raid, settings
from polarkv_operator.resources.common import (
    Object,
    Pod,
    Release,
    SecretDigests,
    build,
    container,
    digest,
    from_field,
    larger_volume,
    other_class,
    pod_template,
    probe,
    resources,
)
from polarkv_operator.resources.names import Component

_SLAB_PROCESS_BYTES = 256 << 20
_DISK_PROCESS_BYTES = 512 << 20
# Page tables of small pages: 8 bytes for each 4 KiB, in each of the two processes, and some more for the kernel's own.
_MAPPING_SHARE = 256
_CPU = "500m"
# Servers close their files within a second; the RAID container then unmounts and stops its array.
_GRACE_SECONDS = 60
_MEMORY_MARGIN_BYTES = 4 << 20


def stateful_set(cluster: PolarKVCluster, release: Release, digests: SecretDigests, replicas: int) -> Object:
    """The StatefulSet with so many cache nodes. Its pods change only when they are deleted: they are drained first.

    Raises:
        SpecInvalid: ``cacheNodes.podTemplate`` does not fit.
    """
    nodes = cluster.spec.cache_nodes
    claims = volume_names(cluster)
    striped = raid.is_needed(cluster)
    pod = Pod(
        containers=[_slab(cluster, release), _disk(cluster, release)],
        volumes=_volumes(cluster),
        service_account=names.cache(cluster),
        grace_seconds=_GRACE_SECONDS,
        init_containers=[raid.assembler(cluster, release, claims)] if striped else [],
        affinity=_affinity(cluster),
    )
    annotations = {
        names.SETTINGS_ANNOTATION: digest(settings.cache_node_settings(cluster)),
        names.SECRETS_ANNOTATION: digests.cluster,
    }
    template = pod_template(
        cluster, Component.CACHE_NODE, pod, annotations, nodes.pod_template, "spec.cacheNodes.podTemplate"
    )
    retention = cluster.spec.scale_down.volume_retention.value
    content = {
        "replicas": replicas,
        "serviceName": names.cache(cluster),
        "podManagementPolicy": "Parallel",
        "revisionHistoryLimit": 3,
        "updateStrategy": {"type": "OnDelete"},
        "persistentVolumeClaimRetentionPolicy": {"whenScaled": retention, "whenDeleted": retention},
        "selector": {"matchLabels": names.selector(cluster, Component.CACHE_NODE)},
        "template": template,
        "volumeClaimTemplates": [_claim(cluster, name) for name in claims],
    }
    return build(cluster, "apps/v1", "StatefulSet", names.cache(cluster), Component.CACHE_NODE, spec=content)


def volume_names(cluster: PolarKVCluster) -> list[str]:
    """Names of the volume claims; a pod's own is <name>-<pod>."""
    return [f"data-{index}" for index in range(cluster.spec.cache_nodes.storage.volumes_per_node)]


def _claim(cluster: PolarKVCluster, name: str) -> Object:
    storage = cluster.spec.cache_nodes.storage
    spec: Object = {
        "accessModes": ["ReadWriteOnce"],
        "volumeMode": "Block" if storage.layout is Layout.RAID0 else "Filesystem",
        "resources": {"requests": {"storage": str(storage.volume_size)}},
    }
    if storage.storage_class_name is not None:
        spec["storageClassName"] = storage.storage_class_name
    labels = names.labels(cluster, Component.CACHE_NODE)
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": name, "labels": labels},
        "spec": spec,
    }


def _slab(cluster: PolarKVCluster, release: Release) -> Object:
    nodes = cluster.spec.cache_nodes
    tier_bytes = nodes.memory.size.bytes
    huge = nodes.memory.huge_pages is not HugePages.NONE
    process_bytes = _SLAB_PROCESS_BYTES + (0 if huge else tier_bytes // _MAPPING_SHARE)
    tier = {f"hugepages-{nodes.memory.huge_pages.value}" if huge else "memory": tier_bytes}
    built = container(
        cluster,
        release,
        "slab",
        ["polarkv", "slab", "--config", f"{settings.SETTINGS_FOLDER}/{settings.CACHE_NODE_FILE}"],
        env=[
            *_environment(cluster, "SLAB"),
            from_field("POLARKV_SLAB_ADVERTISE_HOST", "status.podIP"),
        ],
        ports=[
            {"name": "slab", "containerPort": names.SLAB_PORT, "protocol": "TCP"},
            {"name": "slab-metrics", "containerPort": names.SLAB_METRICS_PORT, "protocol": "TCP"},
        ],
        resources=resources(nodes.resources.slab, {"cpu": _CPU, "memory": process_bytes}, tier),
        volumeMounts=[*_mounts(), {"name": "memory", "mountPath": settings.MEMORY_FOLDER}],
        **_probes("slab-metrics"),
    )
    _give_rdma(cluster, built)
    return built


def _give_rdma(cluster: PolarKVCluster, slab: Object) -> None:
    """The device and the right to lock memory, where there is a device to have."""
    transport = cluster.spec.cache_nodes.transport
    if transport.resource_name is None or transport.mode is TransportMode.TCP:
        return
    for group in ("requests", "limits"):
        slab["resources"][group][transport.resource_name] = str(transport.resource_count)
    # Kubernetes gives added capabilities to root alone; all others are dropped, so that it is root by name only.
    slab["securityContext"] |= {"runAsNonRoot": False, "runAsUser": 0}
    slab["securityContext"]["capabilities"] = {"drop": ["ALL"], "add": ["IPC_LOCK"]}


def _disk(cluster: PolarKVCluster, release: Release) -> Object:
    nodes = cluster.spec.cache_nodes
    mapping_bytes = 0 if nodes.memory.huge_pages is not HugePages.NONE else nodes.memory.size.bytes // _MAPPING_SHARE
    if raid.is_needed(cluster):
        mounts: list[Object] = [
            {"name": raid.ARRAY_VOLUME, "mountPath": settings.ARRAY_FOLDER, "mountPropagation": "HostToContainer"}
        ]
    else:
        folders = settings.directories(cluster)
        mounts = [{"name": name, "mountPath": path} for name, path in zip(volume_names(cluster), folders, strict=True)]
    return container(
        cluster,
        release,
        "disk",
        ["polarkv", "disk", "--config", f"{settings.SETTINGS_FOLDER}/{settings.CACHE_NODE_FILE}"],
        env=_environment(cluster, "DISK"),
        ports=[{"name": "disk-metrics", "containerPort": names.DISK_METRICS_PORT, "protocol": "TCP"}],
        resources=resources(nodes.resources.disk, {"cpu": _CPU, "memory": _DISK_PROCESS_BYTES + mapping_bytes}),
        volumeMounts=[*_mounts(), *mounts],
        **_probes("disk-metrics"),
    )


def _environment(cluster: PolarKVCluster, server: str) -> list[Object]:
    return [
        {"name": "POLARKV_LOG_LEVEL", "value": cluster.spec.monitoring.log_level.upper()},
        from_field(f"POLARKV_{server}_NODE", "metadata.name"),
    ]


def _mounts() -> list[Object]:
    return [
        {"name": "settings", "mountPath": settings.SETTINGS_FOLDER, "readOnly": True},
        {"name": "secret", "mountPath": settings.SECRET_FOLDER, "readOnly": True},
        {"name": "socket", "mountPath": settings.SOCKET_FOLDER},
    ]


def _probes(port: str) -> dict[str, Any]:
    """Ready once the manager has taken the server, and from then on: a manager that restarts unreadies nobody."""
    return {
        # The disk server waits for its slab server, and both for the manager: ten minutes for volumes and images.
        "startupProbe": probe("/healthz", port, 1, 600),
        "readinessProbe": probe("/readyz", port, 2, 3),
        "livenessProbe": probe("/healthz", port, 10, 6),
    }


def _volumes(cluster: PolarKVCluster) -> list[Object]:
    memory = cluster.spec.cache_nodes.memory
    if memory.huge_pages is HugePages.NONE:
        pool = {"medium": "Memory", "sizeLimit": of_bytes(memory.size.bytes + _MEMORY_MARGIN_BYTES)}
    else:
        pool = {"medium": f"HugePages-{memory.huge_pages.value}"}
    volumes: list[Object] = [
        {"name": "settings", "configMap": {
            "name": names.settings(cluster), "defaultMode": 0o444,
            "items": [{"key": settings.CACHE_NODE_FILE, "path": settings.CACHE_NODE_FILE}],
        }},
        {"name": "secret", "secret": {"secretName": names.cluster_secret(cluster), "defaultMode": 0o440}},
        {"name": "socket", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}},
        {"name": "memory", "emptyDir": pool},
    ]  # fmt: skip
    return [*volumes, raid.array_volume()] if raid.is_needed(cluster) else volumes


def _affinity(cluster: PolarKVCluster) -> Object:
    """Each on a machine of its own: two on one would share its network, and be lost together."""
    term = {
        "topologyKey": "kubernetes.io/hostname",
        "labelSelector": {"matchLabels": names.selector(cluster, Component.CACHE_NODE)},
    }
    if cluster.spec.cache_nodes.spread is Spread.REQUIRED:
        return {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
    weighted = {"weight": 100, "podAffinityTerm": term}
    return {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [weighted]}}


def service(cluster: PolarKVCluster) -> Object:
    """The headless Service that gives each cache node a name."""
    content = {
        "clusterIP": "None",
        "ipFamilyPolicy": names.IP_FAMILIES,
        "publishNotReadyAddresses": True,
        "selector": names.selector(cluster, Component.CACHE_NODE),
        "ports": [{"name": "slab", "port": names.SLAB_PORT, "targetPort": "slab", "protocol": "TCP"}],
    }
    return build(cluster, "v1", "Service", names.cache(cluster), Component.CACHE_NODE, spec=content)


def disruption_budget(cluster: PolarKVCluster) -> Object:
    """At most one cache node may be evicted at a time, and any that is not ready: it has nothing to lose.

    Without that, two that cannot run would keep their machines from being drained for ever.
    """
    content = {
        "maxUnavailable": 1,
        "selector": {"matchLabels": names.selector(cluster, Component.CACHE_NODE)},
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
    }
    name = names.cache(cluster)
    return build(cluster, "policy/v1", "PodDisruptionBudget", name, Component.CACHE_NODE, spec=content)


def differences_in_volumes(cluster: PolarKVCluster, live: Mapping[str, Any]) -> list[str]:
    """What of the volumes of a StatefulSet that is there cannot become what the spec wants; a sentence for each.

    The API server refuses such changes of the spec. This is for those that passed it: a cluster that was deleted and
    made anew under the same name, or a CRD without its rules. Volumes that should only be larger are not among them
    under JBOD: see :func:`grown_claims`.
    """
    found: dict[str, Any] = {
        claim["metadata"]["name"]: claim["spec"] for claim in live.get("spec", {}).get("volumeClaimTemplates", ())
    }
    storage = cluster.spec.cache_nodes.storage
    if sorted(found) != sorted(volume_names(cluster)):
        return [
            f"volumesPerNode is {storage.volumes_per_node}, but the cache nodes have {len(found)}: "
            "set it back, or make a new cluster"
        ]
    wanted = (_claim(cluster, name) for name in volume_names(cluster))
    return [text for claim in wanted for text in _differences(claim, found[claim["metadata"]["name"]], storage)]


def _differences(wanted: Object, found: Mapping[str, Any], storage: StorageSpec) -> Iterator[str]:
    name, spec = wanted["metadata"]["name"], wanted["spec"]
    if found.get("volumeMode", "Filesystem") != spec["volumeMode"]:
        yield f"layout is {storage.layout}, but volume {name} was made for the other one: set it back"
    if text := other_class("storageClassName", storage.storage_class_name, f"volume {name}", found, "set it back"):
        yield text
    size = Quantity.parse(found["resources"]["requests"]["storage"])
    if text := larger_volume("volumeSize", storage.volume_size, f"volume {name}", found, "set it back"):
        yield text
    elif size.value < storage.volume_size.value and storage.layout is Layout.RAID0:
        yield (
            f"volumeSize is {storage.volume_size}, but an array uses no more of volume {name} than the {size} it was "
            "made with: set it back, or make a new cluster"
        )


def difference_in_claim(cluster: PolarKVCluster, claim: Mapping[str, Any]) -> str:
    """Why a claim that is there cannot become what the spec wants, in a sentence; empty: it is, or it may grow.

    Claims outlive their cluster where ``volumeRetention`` is Retain: one of the same name finds them.
    """
    storage, spec, name = cluster.spec.cache_nodes.storage, claim["spec"], claim["metadata"]["name"]
    way_out = "set it back, or delete the claim of the earlier cluster"
    mode = "Block" if storage.layout is Layout.RAID0 else "Filesystem"
    if spec.get("volumeMode", "Filesystem") != mode:
        return f"layout is {storage.layout}, but {name} was made for the other one: {way_out}"
    if text := other_class("storageClassName", storage.storage_class_name, name, spec, way_out):
        return text
    size = Quantity.parse(spec["resources"]["requests"]["storage"])
    if storage.layout is Layout.RAID0 and size.value < storage.volume_size.value:
        return f"volumeSize is {storage.volume_size}, but {name} has {size}, and an array's cannot grow: {way_out}"
    return ""


def grown_claims(cluster: PolarKVCluster, live: Mapping[str, Any]) -> bool:
    """Whether the volumes of a StatefulSet that is there are smaller than wanted, and may grow (JBOD only)."""
    storage = cluster.spec.cache_nodes.storage
    return storage.layout is Layout.JBOD and any(
        Quantity.parse(claim["spec"]["resources"]["requests"]["storage"]).value < storage.volume_size.value
        for claim in live.get("spec", {}).get("volumeClaimTemplates", ())
    )
