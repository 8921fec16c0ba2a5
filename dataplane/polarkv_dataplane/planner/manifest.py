"""A fleet as Kubernetes objects: the PolarKVCluster, and the StorageClass that its volumes are of."""

from __future__ import annotations

import re

import yaml

from polarkv_client.errors import ConfigurationError
from polarkv_dataplane.planner.search import Fleet

LAYOUTS = ("JBOD", "RAID0")
_MIB_PAGE = 2  # memory is rounded down to whole pages of 2 MiB, so that hugePages can be turned on later


def cluster_yaml(
    fleet: Fleet, name: str, namespace: str, layout: str = "JBOD", rdma_resource: str | None = None
) -> str:
    """Documents for ``kubectl apply``: the storage class where the price file knows it, and the cluster.

    Raises:
        ConfigurationError: the fleet has no disks; a PolarKVCluster always has.
    """
    if fleet.disk is None:
        raise ConfigurationError("--output", "cr", "a pool of memory alone is no PolarKVCluster; plan with disks")
    class_name = f"polarkv-{re.sub(r'[^a-z0-9]+', '-', fleet.disk.name.lower())}"
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
    if fleet.bought.extra_bytes_per_s:
        lines.append(
            f"# Each disk needs {fleet.bought.extra_bytes_per_s / 1e6:.1f} MB/s beside what its size brings: "
            "set it in the storage class."
        )
    return "\n".join(lines) + "\n"
