"""The servers' settings: one ConfigMap, a file for the manager and one for the two servers of each cache node."""

from __future__ import annotations

import json
from typing import Any

from polarkv_client.listening import EVERYWHERE
from polarkv_operator.api.cache_nodes import Layout, TransportMode, TransportSpec
from polarkv_operator.api.cluster import PolarKVCluster
from polarkv_operator.api.spec import MetadataStoreType
from polarkv_operator.resources import names
from polarkv_operator.resources.common import Object, build, share

MANAGER_FILE = "manager.json"
CACHE_NODE_FILE = "cache-node.json"

SETTINGS_FOLDER = "/etc/polarkv/settings"
SECRET_FOLDER = "/etc/polarkv/secret"
TOKENS_FOLDER = "/etc/polarkv/tokens"
SECRET_KEY = "secret"
TOKENS_KEY = "tokens.json"
METADATA_FOLDER = "/var/lib/polarkv/metadata"
SOCKET_FOLDER = "/run/polarkv"
MEMORY_FOLDER = "/run/polarkv-memory"
VOLUMES_FOLDER = "/var/lib/polarkv/volumes"
ARRAY_FOLDER = "/var/lib/polarkv/array"
ARRAY_MOUNT = f"{ARRAY_FOLDER}/data"

# The rest is the file system's: inode tables and journal. A disk that fills up early evicts, it does not fail.
USABLE_PERCENT = 94
_RDMA = {TransportMode.AUTO: "auto", TransportMode.RDMA: "only", TransportMode.TCP: "off"}
# Two connections of each cache node, up to eight of each client.
_MANAGER_CONNECTIONS = 16_384


def directories(cluster: PolarKVCluster) -> list[str]:
    """Where the disk server finds its file systems."""
    storage = cluster.spec.cache_nodes.storage
    if storage.layout is Layout.RAID0:
        return [ARRAY_MOUNT]
    return [f"{VOLUMES_FOLDER}/{index}" for index in range(storage.volumes_per_node)]


def manager_settings(cluster: PolarKVCluster) -> dict[str, Any]:
    """What the manager is told."""
    cache = cluster.spec.cache
    settings: dict[str, Any] = {
        "rpc": [f"tcp://[{EVERYWHERE}]:{names.MANAGER_RPC_PORT}"],
        "http_host": EVERYWHERE,
        "http_port": names.MANAGER_HTTP_PORT,
        "secret_file": f"{SECRET_FOLDER}/{SECRET_KEY}",
        "tokens_file": f"{TOKENS_FOLDER}/{TOKENS_KEY}",
        "max_connections": _MANAGER_CONNECTIONS,
        "read_lease_ms": cache.read_lease_seconds * 1000,
        "write_ticket_ms": cache.write_ticket_seconds * 1000,
        "quarantine_ms": cache.quarantine_seconds * 1000,
        "offload_ahead": cache.offload_ahead,
        "memory_high_percent": cache.watermarks_percent.memory,
        "disk_high_percent": cache.watermarks_percent.disk,
        "max_keys": cache.max_keys,
    }
    if cluster.spec.manager.metadata_store.type is MetadataStoreType.SQLITE:
        settings["metadata_url"] = f"sqlite://{METADATA_FOLDER}/metadata.sqlite"
    return {"manager": settings}


def _rdma(transport: TransportSpec) -> dict[str, Any]:
    """How the slab server is to use the device; what is not asked for it chooses by itself."""
    settings: dict[str, Any] = {"rdma": _RDMA[transport.mode]}
    if transport.device_name is not None:
        settings["rdma_devices"] = [transport.device_name]
    if transport.gid_index is not None:
        settings["rdma_gid_index"] = transport.gid_index
    return settings


def cache_node_settings(cluster: PolarKVCluster) -> dict[str, Any]:
    """What the servers of a cache node are told; their name and address come from the pod."""
    nodes = cluster.spec.cache_nodes
    common = {"manager": names.endpoint(cluster), "secret_file": f"{SECRET_FOLDER}/{SECRET_KEY}"}
    volumes_bytes = nodes.storage.volume_size.bytes * nodes.storage.volumes_per_node
    return {
        "slab": {
            **common,
            "memory_bytes": nodes.memory.size.bytes,
            "listen_host": EVERYWHERE,
            "listen_port": names.SLAB_PORT,
            "unix_socket": f"{SOCKET_FOLDER}/slab.sock",
            "pool_path": MEMORY_FOLDER,
            **_rdma(nodes.transport),
            "metrics_host": EVERYWHERE,
            "metrics_port": names.SLAB_METRICS_PORT,
        },
        "disk": {
            **common,
            "slab_socket": f"{SOCKET_FOLDER}/slab.sock",
            "directories": directories(cluster),
            "capacity_bytes": share(volumes_bytes, USABLE_PERCENT),
            "require_mount": True,
            "metrics_host": EVERYWHERE,
            "metrics_port": names.DISK_METRICS_PORT,
        },
    }


def config_map(cluster: PolarKVCluster) -> Object:
    """Both files."""
    data = {MANAGER_FILE: manager_settings(cluster), CACHE_NODE_FILE: cache_node_settings(cluster)}
    texts = {name: json.dumps(content, indent=2) + "\n" for name, content in data.items()}
    return build(cluster, "v1", "ConfigMap", names.settings(cluster), data=texts)
