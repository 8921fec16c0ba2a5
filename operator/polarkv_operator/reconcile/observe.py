"""What is there: children as the API server has them, cache nodes as the manager knows them. It only reads."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from polarkv_client.states import NodeState
from polarkv_operator.api.cluster import GROUP, PolarKVCluster
from polarkv_operator.clients.kube import ApiError, Kind, Object, Reader
from polarkv_operator.clients.manager import Address, ManagerNode, ManagerNodes, Managers, ManagerSilent
from polarkv_operator.reconcile.plan.children import Key, key_of
from polarkv_operator.reconcile.plan.world import CacheNode, World, read_drain
from polarkv_operator.resources import monitoring, names, render, secrets
from polarkv_operator.resources.names import Component

CLUSTER = Kind(f"{GROUP}/v1alpha1", "PolarKVCluster")
POD, CLAIM = Kind("v1", "Pod"), Kind("v1", "PersistentVolumeClaim")
DEPLOYMENT, STATEFUL_SET = Kind("apps/v1", "Deployment"), Kind("apps/v1", "StatefulSet")
SECRET = Kind("v1", "Secret")
POD_MONITOR = Kind(monitoring.POD_MONITOR_API, "PodMonitor")
DRAIN_ANNOTATION = f"{GROUP}/drain"
REVISION_LABEL = "controller-revision-hash"


@dataclass(frozen=True)
class Observed:
    """Everything that decisions are made on. ``manager`` is None while it does not answer; ``silence`` says why."""

    children: Mapping[Key, Object]
    pods: Mapping[int, Object]  # of cache nodes, by ordinal
    claims: Mapping[int, list[Object]] = field(default_factory=dict)  # of cache nodes, by ordinal
    manager_pods: tuple[Object, ...] = ()
    manager: ManagerNodes | None = None
    silence: str = ""

    def child(self, kind: Kind, name: str) -> Object | None:
        """One child."""
        return self.children.get((kind.name, name))


class Observer:
    """Looks at one cluster at a time; threads may share one."""

    def __init__(self, api: Reader, managers: Managers, admin: Callable[[PolarKVCluster], str]) -> None:
        """``admin`` says where a cluster's admin API is."""
        self._api, self._managers, self._admin = api, managers, admin

    def observe(self, cluster: PolarKVCluster, pod_monitors: bool) -> Observed:
        """Raises ApiError when the API server does not tell."""
        selector = f"{names.CLUSTER_LABEL}={cluster.name}"
        kinds = [kind for kind in child_kinds() if pod_monitors or kind != POD_MONITOR]
        everything = [found for kind in kinds for found in self._api.find(kind, cluster.namespace, selector)]
        base = names.cache(cluster)
        claims: dict[int, list[Object]] = {}
        children: dict[Key, Object] = {}
        for found in everything:
            ordinal = ordinal_of(found["metadata"]["name"], base) if found["kind"] == CLAIM.name else None
            if ordinal is None:
                children[key_of(found)] = found
            else:
                claims.setdefault(ordinal, []).append(found)
        pods, manager_pods = {}, []
        for pod in self._api.find(POD, cluster.namespace, selector):
            ordinal = ordinal_of(pod["metadata"]["name"], base)
            if ordinal is not None:
                pods[ordinal] = pod
            elif pod["metadata"]["labels"].get(names.COMPONENT_LABEL) == Component.MANAGER:
                manager_pods.append(pod)
        manager, silence = self._ask(cluster, children)
        return Observed(children, pods, claims, tuple(manager_pods), manager, silence)

    def unlabelled(self, manifest: Object) -> Object | None:
        """An object without our label that has the name of one that is to be made."""
        kind = Kind(manifest["apiVersion"], manifest["kind"])
        return self._api.get(kind, manifest["metadata"]["namespace"], manifest["metadata"]["name"])

    def pod_monitors_exist(self, namespace: str) -> bool:
        """Whether the Prometheus operator's CRD is installed. Rights may end at the namespace."""
        try:
            self._api.call("GET", POD_MONITOR.path(namespace), {"limit": "1"})
        except ApiError as error:
            if error.status in (403, 404):
                return False
            raise
        return True

    def address(self, cluster: PolarKVCluster, children: Mapping[Key, Object]) -> Address | None:
        """Where and with which token to ask a cluster's manager; None: there is no token yet."""
        secret = children.get((SECRET.name, names.admin_secret(cluster)))
        token = admin_token(secret)
        return Address(self._admin(cluster), token) if token else None

    def _ask(self, cluster: PolarKVCluster, children: Mapping[Key, Object]) -> tuple[ManagerNodes | None, str]:
        address = self.address(cluster, children)
        if address is None:
            return None, "it has no token yet"
        if cluster.spec.manager.replicas == 0:
            return None, "manager.replicas is 0"
        try:
            return self._managers.nodes(address), ""
        except ManagerSilent as error:
            return None, str(error)


def child_kinds() -> list[Kind]:
    """Of all that the operator makes."""
    return [Kind(*kind) for kind in render.KINDS]


def admin_token(secret: Object | None) -> str:
    """The admin's token from its Secret; empty: there is none."""
    try:
        return b64decode(((secret or {}).get("data") or {}).get(secrets.TOKEN_KEY, ""), validate=True).decode()
    except ValueError:
        return ""


def ordinal_of(name: str, base: str) -> int | None:
    """The ordinal of a pod of a StatefulSet, or of a claim of such a pod (``<template>-<set>-<ordinal>``)."""
    head, _, digits = name.rpartition("-")
    if not digits.isdecimal() or not (head == base or head.endswith(f"-{base}")):
        return None
    return int(digits)


def make_world(cluster: PolarKVCluster, observed: Observed, now_s: int) -> World:
    """Pods and the manager's nodes, put together place by place."""
    base = names.cache(cluster)
    stateful_set = observed.child(STATEFUL_SET, base)
    status: Mapping[str, Any] = (stateful_set or {}).get("status") or {}
    revision = status.get("updateRevision", "")
    current = int((stateful_set or {}).get("spec", {}).get("replicas", 0))
    generation = (stateful_set or {}).get("metadata", {}).get("generation", 0)
    known = {node.name: node for node in observed.manager.nodes} if observed.manager else {}
    uptime_s = int(observed.manager.uptime_s) if observed.manager else 0
    ordinals = {*observed.pods, *range(current)}
    ordinals |= {at for name in known if (at := ordinal_of(name, base)) is not None}
    nodes = []
    for ordinal in sorted(ordinals):
        name = f"{base}-{ordinal}"
        pod, node = observed.pods.get(ordinal), known.get(name)
        # A place without a pod is missing, also when a manager that has restarted knows nothing of it.
        if pod is not None or node is not None or ordinal < current:
            nodes.append(_node(ordinal, name, pod, node, revision, uptime_s))
    seen = bool(revision) and status.get("observedGeneration") == generation
    return World(tuple(nodes), current, now_s, observed.manager is not None, seen)


def _node(
    ordinal: int, name: str, pod: Object | None, node: ManagerNode | None, revision: str, uptime_s: int
) -> CacheNode:
    absent_s = uptime_s
    if node is not None:
        absent_s = node.heard_ms_ago // 1000 if node.state is NodeState.DOWN else 0
    known = CacheNode(
        ordinal,
        name,
        state=node.state if node else None,
        absent_s=absent_s,
        proved=node.inventory_complete if node else False,
    )
    if pod is None:
        return known
    meta = pod["metadata"]
    conditions = (pod.get("status") or {}).get("conditions") or []
    return CacheNode(
        ordinal,
        name,
        uid=meta["uid"],
        ready=any(each["type"] == "Ready" and each["status"] == "True" for each in conditions),
        terminating="deletionTimestamp" in meta,
        outdated=(meta.get("labels") or {}).get(REVISION_LABEL) != revision,
        state=known.state,
        absent_s=known.absent_s,
        proved=known.proved,
        drain=read_drain((meta.get("annotations") or {}).get(DRAIN_ANNOTATION, "")),
    )
