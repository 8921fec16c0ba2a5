"""The PodMonitor, for clusters in which the Prometheus operator's CRD is installed."""

from __future__ import annotations

from polarkv_operator.api.cluster import PolarKVCluster
from polarkv_operator.resources import names
from polarkv_operator.resources.common import Object, Release, build

POD_MONITOR_API = "monitoring.coreos.com/v1"
POD_MONITOR_CRD = "podmonitors.monitoring.coreos.com"


def pod_monitor(cluster: PolarKVCluster, release: Release) -> Object | None:
    """The PodMonitor; None when it is not wanted or would not be understood."""
    wanted = cluster.spec.monitoring.pod_monitor
    if not (wanted.enabled and release.has_pod_monitors):
        return None
    interval = f"{wanted.interval_seconds}s"
    content = {
        "selector": {"matchLabels": {names.CLUSTER_LABEL: cluster.name}},
        # Becomes the label polarkv_io_cluster, by which the dashboards tell clusters apart.
        "podTargetLabels": [names.CLUSTER_LABEL],
        # The manager relays what cache nodes count; their own exporters are there when it is not.
        "podMetricsEndpoints": [
            {"port": port, "path": "/metrics", "interval": interval}
            for port in ("http", "slab-metrics", "disk-metrics")
        ],
    }
    built = build(cluster, POD_MONITOR_API, "PodMonitor", cluster.name, spec=content)
    built["metadata"]["labels"] = {**wanted.labels, **built["metadata"]["labels"]}
    return built
