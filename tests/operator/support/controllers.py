"""What controllers and kubelets would do beside an API server alone, in one thread: pods for sets, and their status.

A pod's cache node is a real peer of a real manager, where a test has one.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Mapping
from typing import Any

from polarkv_client.errors import PolarKVError
from polarkv_operator.clients.kube import Kind, Object, Writer
from polarkv_operator.reconcile.observe import DEPLOYMENT, POD, REVISION_LABEL, STATEFUL_SET
from polarkv_operator.resources.names import CLUSTER_LABEL
from tests.support.managers import FakeNode, Running

PERIOD_S = 0.05


class Controllers(threading.Thread):
    """Plays the controllers for one namespace until :meth:`stop`."""

    def __init__(self, api: Writer, namespace: str, manager: Running | None = None) -> None:
        super().__init__(name="controllers", daemon=True)
        self.api, self.namespace, self.manager = api, namespace, manager
        self.nodes: dict[str, FakeNode] = {}  # by the pod's uid
        self.broken: set[str] = set()  # names of pods that never become ready
        self.most_missing = 0  # pods that a set wanted and did not have ready, at most
        self.deleted: list[str] = []
        self._known: set[str] = set()
        self._stopping = threading.Event()
        self.failure: BaseException | None = None

    def run(self) -> None:
        while not self._stopping.wait(PERIOD_S):
            try:
                self._turn()
            except PolarKVError:
                continue  # the API server is away, or somebody was faster
            except BaseException as error:
                self.failure = error
                raise

    def stop(self) -> None:
        self._stopping.set()
        self.join(30)
        for node in self.nodes.values():
            node.close()
        assert self.failure is None, self.failure

    def _turn(self) -> None:
        pods = {pod["metadata"]["uid"]: pod for pod in self.api.find(POD, self.namespace)}
        for uid in [uid for uid in self.nodes if uid not in pods]:
            self.nodes.pop(uid).close()
        for found in self.api.find(DEPLOYMENT, self.namespace):
            wanted = found["spec"]["replicas"]
            self._status(found, {"replicas": wanted, "updatedReplicas": wanted, "readyReplicas": wanted})
        for found in self.api.find(STATEFUL_SET, self.namespace):
            self._serve(found, [pod for pod in pods.values() if _owner(pod) == found["metadata"]["uid"]])

    def _serve(self, found: Object, pods: list[Object]) -> None:
        name, wanted = found["metadata"]["name"], found["spec"]["replicas"]
        revision = hashlib.sha256(json.dumps(found["spec"]["template"], sort_keys=True).encode()).hexdigest()[:8]
        self._status(found, {"replicas": len(pods), "updateRevision": f"{name}-{revision}"})
        by_name = {pod["metadata"]["name"]: pod for pod in pods}
        for pod_name in self._known - by_name.keys():
            self.deleted.append(pod_name)
        self._known = set(by_name)
        if len(by_name) == wanted:
            self.most_missing = 0 if self.most_missing < 0 else self.most_missing
        for ordinal in range(wanted):
            if f"{name}-{ordinal}" not in by_name:
                self._make(found, f"{name}-{ordinal}", f"{name}-{revision}")
        for pod_name, pod in by_name.items():
            if int(pod_name.rsplit("-", 1)[1]) >= wanted:
                self.api.delete(POD, self.namespace, pod_name, pod["metadata"]["uid"])
            elif not pod.get("status", {}).get("conditions") and pod_name not in self.broken:
                self._begin(pod)

    def _make(self, found: Object, name: str, revision: str) -> None:
        labels = {**found["spec"]["template"]["metadata"]["labels"], REVISION_LABEL: revision}
        owner = {
            "apiVersion": "apps/v1", "kind": "StatefulSet", "name": found["metadata"]["name"],
            "uid": found["metadata"]["uid"], "controller": True,
        }  # fmt: skip
        self.api.create({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": name, "namespace": self.namespace, "labels": labels, "ownerReferences": [owner]},
            "spec": {"containers": [{"name": "slab", "image": "none"}]},
        })  # fmt: skip

    def _begin(self, pod: Object) -> None:
        name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]
        if self.manager is not None and uid not in self.nodes:
            self.nodes[uid] = FakeNode(self.manager.unix, name)
        since = "2026-01-01T00:00:00Z"
        ready = {"type": "Ready", "status": "True", "lastTransitionTime": since}
        self._put(POD, name, {"phase": "Running", "conditions": [ready]})

    def _status(self, found: Object, status: Mapping[str, Any]) -> None:
        status = {**status, "observedGeneration": found["metadata"]["generation"]}
        there = found.get("status") or {}
        if any(there.get(name, 0) != value for name, value in status.items()):
            self._put(Kind(found["apiVersion"], found["kind"]), found["metadata"]["name"], status)

    def _put(self, kind: Kind, name: str, status: Mapping[str, Any]) -> None:
        headers = {"Content-Type": "application/merge-patch+json"}
        path = kind.path(self.namespace, name, "status")
        self.api.call("PATCH", path, {"fieldManager": "controllers"}, {"status": status}, headers)


def _owner(pod: Object) -> str:
    return str((pod["metadata"].get("ownerReferences") or [{}])[0].get("uid", ""))


def cluster_of(found: Object) -> str:
    """The cluster that an object belongs to."""
    return str((found["metadata"].get("labels") or {}).get(CLUSTER_LABEL, ""))
