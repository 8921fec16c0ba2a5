"""Whole turns before an API server that is a dictionary: what a real one seldom does, and what rights do not reach."""

from __future__ import annotations

import base64
import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from polarkv_client.states import DrainMode, NodeState
from polarkv_operator.api import parse
from polarkv_operator.clients.kube import ApiError, Conflict, Kind, Object, Writer
from polarkv_operator.clients.manager import Address, ManagerNode, ManagerNodes, Managers
from polarkv_operator.reconcile.execute import Executor
from polarkv_operator.reconcile.observe import CLAIM, POD, STATEFUL_SET, Observed, Observer, make_world
from polarkv_operator.reconcile.plan.rollout import RolloutRules, plan_rollout
from polarkv_operator.reconcile.plan.world import Drain, Purpose, StartDrain
from polarkv_operator.reconcile.reconciler import Reconciler
from polarkv_operator.resources.common import Release
from polarkv_operator.resources.monitoring import POD_MONITOR_API
from polarkv_operator.resources.names import CLUSTER_LABEL
from tests.operator.support.clusters import body

KEY, NAMESPACE = "inference/demo", "inference"


class Kept(Writer):
    """Objects by kind and name. ``refuse`` may raise before something is applied; ``asked`` has the paths of calls."""

    def __init__(self, *objects: Object) -> None:
        self.objects = {(each["kind"], each["metadata"]["name"]): each for each in objects}
        self.refuse: Callable[[Object], None] = lambda manifest: None
        self.asked: list[str] = []
        self.applied: list[tuple[str, str]] = []
        self.merged: list[tuple[str, str]] = []
        self.status: Object = {}

    def get(self, kind: Kind, namespace: str | None, name: str) -> Object | None:
        return copy.deepcopy(self.objects.get((kind.name, name)))

    def find(self, kind: Kind, namespace: str | None, selector: str = "") -> list[Object]:
        label, _, value = selector.partition("=")
        found = [each for (name, _), each in self.objects.items() if name == kind.name]
        return copy.deepcopy([each for each in found if each["metadata"].get("labels", {}).get(label) == value])

    def call(
        self, method: str, path: str, query: Mapping[str, str] | None = None, body: object = None,
        headers: Mapping[str, str] | None = None,
    ) -> Any:  # fmt: skip
        self.asked.append(path)
        raise ApiError(404, "there is no such thing")

    def apply(self, manifest: Object, *below: str) -> Object:
        if below:
            self.status = manifest["status"]
            return manifest
        self.refuse(manifest)
        key = manifest["kind"], manifest["metadata"]["name"]
        self.applied.append(key)
        kept = copy.deepcopy(manifest)
        former = self.objects.get(key, {})
        uid = former.get("metadata", {}).get("uid", f"uid-{len(self.applied)}")
        kept["metadata"] |= {"generation": 1, "uid": uid}
        self.objects[key] = kept
        return kept

    def merge(self, kind: Kind, namespace: str, name: str, change: Object) -> Object:
        found = self.objects[kind.name, name]
        if found["metadata"]["uid"] != change["metadata"]["uid"]:
            raise Conflict(409, "it is another one")
        self.merged.append((kind.name, name))
        return found

    def create(self, manifest: Object) -> Object:
        return manifest

    def condition(self, kind: str) -> tuple[str, str, str]:
        found = next(each for each in self.status["conditions"] if each["type"] == kind)
        return found["status"], found["reason"], found["message"]


class Deaf(Managers):
    """No manager answers; what is asked of one is remembered."""

    def __init__(self) -> None:
        super().__init__()
        self.drained: list[str] = []

    def drain(self, manager: Address, node: str, mode: DrainMode) -> str:
        self.drained.append(node)
        return ""


def cluster(**spec: Any) -> Object:
    made = body()
    made["metadata"]["generation"] = 1
    made["spec"]["manager"] = {"replicas": 0}  # nobody is asked
    made["spec"] |= spec
    return made


def reconciler(api: Kept) -> Reconciler:
    managers = Deaf()
    executor = Executor(api, managers, lambda: True, lambda: 100.0)
    observer = Observer(api, managers, lambda _: "http://127.0.0.1:9")
    return Reconciler(api, observer, executor, Release("polarkv:1"), lambda: 100.0, lambda: 100.0)


@pytest.mark.parametrize("name", ["demo-secret", "demo-admin", "demo-client"])
def test_a_secret_whose_name_is_taken_does_not_restart_pods_again_and_again(name: str) -> None:
    data = {"mine": base64.b64encode(b"not the operator's").decode()}
    metadata = {"name": name, "namespace": NAMESPACE, "uid": "f"}
    foreign = {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": data}
    api = Kept(cluster(), foreign)
    turns = reconciler(api)
    turns.turn(KEY)
    assert api.condition("Degraded")[:2] == ("True", "NameTaken")
    api.applied.clear()
    turns.turn(KEY)
    assert api.applied == []
    assert api.objects["Secret", name] == foreign


@pytest.mark.parametrize("kind", ["Service", "StatefulSet", "PersistentVolumeClaim"])
def test_what_a_quota_or_a_policy_forbids_is_said_in_the_status(kind: str) -> None:
    def refuse(manifest: Object) -> None:
        if manifest["kind"] == kind:
            raise ApiError(403, "exceeded quota: small")

    api = Kept(cluster())
    api.refuse = refuse
    assert reconciler(api).turn(KEY) is not None
    status, reason, message = api.condition("SpecValid")
    assert (status, reason) == ("False", "Invalid") and "exceeded quota: small" in message and kind in message


def test_monitors_are_looked_for_where_rights_reach() -> None:
    api = Kept(cluster())
    reconciler(api).turn(KEY)
    assert api.asked == [Kind(POD_MONITOR_API, "PodMonitor").path(NAMESPACE)]


def claim(size: str, mode: str, **spec: Any) -> Object:
    metadata = {"name": "data-0-demo-cache-0", "namespace": NAMESPACE, "uid": "c", "labels": {CLUSTER_LABEL: "demo"}}
    content = {"volumeMode": mode, "resources": {"requests": {"storage": size}}, **spec}
    return {"apiVersion": "v1", "kind": CLAIM.name, "metadata": metadata, "spec": content, "status": {"phase": "Bound"}}


def pod(ordinal: int, uid: str = "p", revision: str = "new") -> Object:
    name = f"demo-cache-{ordinal}"
    labels = {CLUSTER_LABEL: "demo", "controller-revision-hash": revision}
    status = {"conditions": [{"type": "Ready", "status": "True"}]}
    metadata = {"name": name, "namespace": NAMESPACE, "uid": uid, "labels": labels}
    return {"apiVersion": "v1", "kind": POD.name, "metadata": metadata, "status": status}


@pytest.mark.parametrize(
    ("storage", "found", "text"),
    [
        ({"layout": "RAID0", "volumeSize": "20Gi"}, claim("10Gi", "Block"), "has 10Gi, and an array's cannot grow"),
        ({"layout": "RAID0", "volumeSize": "10Gi"}, claim("10Gi", "Filesystem"), "was made for the other one"),
        ({"volumeSize": "10Gi", "storageClassName": "fast"}, claim("10Gi", "Filesystem", storageClassName="slow"),
         "is of slow"),
        ({"volumeSize": "20Gi"}, claim("10Gi", "Filesystem"), ""),
        ({"volumeSize": "10Gi"}, claim("20Gi", "Filesystem"), None),
    ],
)  # fmt: skip
def test_volumes_of_an_earlier_cluster_of_that_name(storage: Object, found: Object, text: str | None) -> None:
    """Kept ones are found again: they grow where that is of use, and are said to differ elsewhere."""
    api = Kept(cluster(cacheNodes={"memory": {"size": "1Gi"}, "storage": storage}), found, pod(0))
    reconciler(api).turn(KEY)
    status, reason, message = api.condition("Degraded")
    assert api.merged == ([(CLAIM.name, "data-0-demo-cache-0")] if text == "" else [])
    assert (status, reason) == (("True", "VolumesDiffer") if text else ("False", "AsExpected"))
    assert (text or "") in message


@pytest.mark.parametrize(
    ("store", "found", "text"),
    [
        ({"storageClassName": "fast"}, {"storageClassName": "slow"}, "manager.metadataStore.storageClassName is fast"),
        ({"volumeSize": "1Gi"}, {}, "manager.metadataStore.volumeSize is 1Gi, but demo-metadata has 2Gi"),
        ({"volumeSize": "3Gi"}, {}, ""),
        ({"type": "None", "storageClassName": "fast"}, {"storageClassName": "slow"}, None),
        ({}, {"storageClassName": "slow"}, None),
    ],
)
def test_a_metadata_volume_grows_or_is_said_to_differ(store: Object, found: Object, text: str | None) -> None:
    there = claim("2Gi", "Filesystem", **found)
    there["metadata"]["name"] = "demo-metadata"
    api = Kept(cluster(manager={"replicas": 0, "metadataStore": store}), there)
    reconciler(api).turn(KEY)
    status, reason, message = api.condition("Degraded")
    assert api.merged == ([(CLAIM.name, "demo-metadata")] if text == "" else [])
    assert (status, reason) == (("True", "VolumesDiffer") if text else ("False", "AsExpected"))
    assert (text or "") in message


def test_a_drain_is_not_asked_for_when_its_pod_is_another_one() -> None:
    """Without a note nobody would ever take it back."""
    api, managers = Kept(pod(0, uid="second")), Deaf()
    executor = Executor(api, managers, lambda: True, lambda: 100.0)
    manager = Address("http://127.0.0.1:9", "t")
    drain = Drain(Purpose.ROLLOUT, DrainMode.FLUSH, 100)
    assert executor.step(NAMESPACE, manager, StartDrain("demo-cache-0", "first", drain)) != ""
    assert managers.drained == []
    assert executor.step(NAMESPACE, manager, StartDrain("demo-cache-0", "second", drain)) == ""
    assert managers.drained == ["demo-cache-0"]


def test_a_place_without_a_pod_stops_a_rollout_also_when_the_manager_has_forgotten_it() -> None:
    """A quota or a policy keeps a pod from coming back, and the manager restarts: the next node must stay."""
    stateful_set = {
        "apiVersion": "apps/v1", "kind": STATEFUL_SET.name, "spec": {"replicas": 2},
        "metadata": {"name": "demo-cache", "generation": 2},
        "status": {"updateRevision": "new", "observedGeneration": 2},
    }  # fmt: skip
    known = ManagerNode(name="demo-cache-0", incarnation=1, state=NodeState.ACTIVE)
    observed = Observed(
        {(STATEFUL_SET.name, "demo-cache"): stateful_set}, {0: pod(0, revision="old")},
        manager=ManagerNodes(uptime_s=300, nodes=[known]),
    )  # fmt: skip
    planned = plan_rollout(make_world(parse(body()), observed, 100), 2, RolloutRules())
    assert planned.steps == () and "demo-cache-1 has no pod yet" in planned.waits_for
