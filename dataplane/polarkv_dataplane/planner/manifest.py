"""A fleet as Kubernetes objects: the PolarKVCluster, and the StorageClass that its volumes are of."""

from __future__ import annotations

import re

import yaml

from polarkv_client.errors import ConfigurationError
from polarkv_dataplane.planner.search import Fleet

LAYOUTS = ("JBOD", "RAID0")
# What the CRD takes (polarkv_operator.api, which this package must not import; a test holds them to it).
MOST_NAME_CHARACTERS = 40
MOST_VOLUMES = 32
LEAST_MEMORY_MIB = 16
_NAME = r"[a-z]([-a-z0-9]*[a-z0-9])?"
_NAMESPACE = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_RESOURCE = r"[a-z0-9]([-.a-z0-9]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_MIB_PAGE = 2  # memory is rounded down to whole pages of 2 MiB, so that hugePages can be turned on later


def cluster_yaml(
    fleet: Fleet, name: str, namespace: str, layout: str = "JBOD", rdma_resource: str | None = None
) -> str:
    """Documents for ``kubectl apply``: the storage class where the price file knows it, and the cluster.

    Raises:
        ConfigurationError: the fleet has no disks, which a PolarKVCluster always has, or something that the API server
            would refuse.
    """
    if fleet.disk is None:
        raise ConfigurationError("--output", "cr", "a pool of memory alone is no PolarKVCluster; plan with disks")
    _check_names(name, namespace, rdma_resource)
    if fleet.disks > MOST_VOLUMES:
        fix = f"a PolarKVCluster has at most {MOST_VOLUMES} volumes a node: set disk_slots in the price file"
        raise ConfigurationError("volumesPerNode", fleet.disks, fix)
    if fleet.machine.memory_mib < LEAST_MEMORY_MIB:
        fix = f"a cache node serves at least {LEAST_MEMORY_MIB} MiB: say --memory, or a smaller --reserve"
        raise ConfigurationError("memory of a node", f"{fleet.machine.memory_mib} MiB", fix)
    class_name = f"polarkv-{re.sub(r'[^a-z0-9]+', '-', fleet.disk.name.lower()).strip('-')[:200] or 'disk'}"
    documents: list[dict[str, object]] = []
    if fleet.disk.storage_class is not None:
        documents.append(
            {
                "apiVersion": "storage.k8s.io/v1",
                "kind": "StorageClass",
                "metadata": {"name": class_name},
                "provisioner": fleet.disk.storage_class.provisioner,
                "parameters": dict(fleet.disk.storage_class.parameters),
                "volumeBindingMode": "WaitForFirstConsumer",
                "allowVolumeExpansion": layout == "JBOD",
            }
        )
    documents.append(
        {
            "apiVersion": "polarkv.io/v1alpha1",
            "kind": "PolarKVCluster",
            "metadata": {"name": name, "namespace": namespace},
            "spec": {"cacheNodes": _cache_nodes(fleet, layout, class_name, rdma_resource)},
        }
    )
    return _heading(fleet) + yaml.safe_dump_all(documents, sort_keys=False)


def _check_names(name: str, namespace: str, rdma_resource: str | None) -> None:
    for flag, value, pattern, most, fix in (
        ("--name", name, _NAME, MOST_NAME_CHARACTERS, "lower-case letters, digits and '-', beginning with a letter"),
        ("--namespace", namespace, _NAMESPACE, 63, "lower-case letters, digits and '-'"),
        ("--rdma-resource", rdma_resource, _RESOURCE, 317, "a device plugin's DOMAIN/NAME, such as aliyun/erdma"),
    ):
        if value is not None and (len(value) > most or not re.fullmatch(pattern, value)):
            raise ConfigurationError(flag, value, f"use {fix}; at most {most} characters")


def _cache_nodes(fleet: Fleet, layout: str, class_name: str, rdma_resource: str | None) -> dict[str, object]:
    storage: dict[str, object] = {
        "layout": layout,
        "volumesPerNode": fleet.disks,
        "volumeSize": f"{fleet.bought.gib}Gi",
        "storageClassName": class_name,
    }
    nodes: dict[str, object] = {
        "replicas": fleet.nodes,
        "memory": {"size": f"{fleet.machine.memory_mib // _MIB_PAGE * _MIB_PAGE}Mi"},
        "storage": storage,
        "spread": "Required",
        "podTemplate": {"spec": {"nodeSelector": {"node.kubernetes.io/instance-type": fleet.machine.instance.name}}},
    }
    if rdma_resource:
        nodes["transport"] = {"mode": "RDMA", "resourceName": rdma_resource}
    return nodes


def _heading(fleet: Fleet) -> str:
    assert fleet.disk is not None
    lines = [
        f"# {fleet.nodes} × {fleet.machine.instance.name}, {fleet.disks} × {fleet.disk.name} of {fleet.bought.gib} GiB "
        f"each: {fleet.cost:,.2f} {fleet.market.currency} a month",
    ]
    if fleet.disk.storage_class is None:
        lines.append(f"# The price file knows no storage class of {fleet.disk.name}: make the one that is named below.")
    if fleet.bought.extra_bytes_per_s:
        lines.append(
            f"# Each disk needs {fleet.bought.extra_bytes_per_s / 1e6:.1f} MB/s beside what its size brings: "
            "set it in the storage class."
        )
    return "\n".join(lines) + "\n"
