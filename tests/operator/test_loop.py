"""The operator's loop against a real API server, with a real manager and cache nodes that are peers of it."""

from __future__ import annotations

import hashlib

import pytest

from polarkv_operator.clients.kube import Kind, kind_of
from polarkv_operator.reconcile.observe import DRAIN_ANNOTATION, STATEFUL_SET
from tests.operator.support.playground import Playground, eventually
from tests.support.managers import Client, Running, admin
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(240)
# Spread over cache nodes as real keys are.
KEYS = [hashlib.sha256(bytes([number])).digest() for number in range(30)]


def test_a_cluster_comes_up_and_says_so(playground: Playground) -> None:
    playground.operate()
    playground.control()
    playground.cluster(cacheNodes={"replicas": 2})
    playground.wait_settled()
    status = playground.get()["status"]
    assert status["nodes"] == "2/2" and status["readyReplicas"] == 2 and status["replicas"] == 2
    assert [node["state"] for node in status["cacheNodes"]] == ["Active", "Active"]
    assert {condition["type"]: condition["status"] for condition in status["conditions"]} == {
        "Ready": "True", "Progressing": "False", "Degraded": "False", "ManagerAvailable": "True", "SpecValid": "True",
        "RDMAReady": "False",
    }  # fmt: skip
    assert status["observedGeneration"] == 1
    for child in playground.children().values():
        assert child["metadata"]["ownerReferences"][0]["uid"] == playground.get()["metadata"]["uid"]
    assert "finalizers" not in playground.get()["metadata"]


def test_a_turn_that_changes_nothing_writes_nothing(playground: Playground, monkeypatch: pytest.MonkeyPatch) -> None:
    # Rates are known from the second sample on: it must not come between two of the turns that are compared.
    monkeypatch.setattr("polarkv_operator.reconcile.reconciler.SAMPLE_S", 0.0)
    operator = playground.operate()
    playground.control()
    playground.cluster(cacheNodes={"replicas": 2})
    playground.wait_settled()
    key = f"{playground.namespace}/demo"

    def taken() -> bool:
        """Whether the cluster is in this test's hands: its operator's own have no turn for it from then on."""
        operator.queue.add(key)
        return operator.queue.take(0) == key

    eventually(taken, "a turn")
    for _ in range(2):
        operator.reconciler.turn(key)
    before = playground.versions()
    for _ in range(3):
        operator.reconciler.turn(key)
    assert playground.versions() == before


def test_what_is_deleted_or_edited_by_hand_comes_back(playground: Playground) -> None:
    playground.operate()
    playground.control()
    playground.cluster(cacheNodes={"replicas": 1})
    playground.wait_settled()
    before = playground.children()
    for (kind, name), child in before.items():
        if kind not in ("StatefulSet", "Secret", "PersistentVolumeClaim"):
            playground.api.delete(kind_of(child), playground.namespace, name, child["metadata"]["uid"])
    eventually(lambda: playground.children().keys() == before.keys(), "every child to be back")

    service = Kind("v1", "Service")
    edited = {"spec": {"ports": [{"name": "rpc", "port": 1234}]}, "metadata": {"labels": {"polarkv.io/cluster": None}}}
    playground.edit(service, "demo-manager", edited)

    def ports() -> list[int]:
        found = playground.api.get(service, playground.namespace, "demo-manager")
        return [port["port"] for port in found["spec"]["ports"]] if found else []

    eventually(lambda: ports() == [7700, 7701], "the edit to be undone")
    playground.edit(STATEFUL_SET, "demo-cache", {"spec": {"replicas": 3}})
    eventually(lambda: playground.replicas() == 1, "the number of replicas to be the spec's")


def test_scaling_down_drains_and_lowers_only_below_drained_nodes(playground: Playground, manager: Running) -> None:
    playground.operate()
    playground.control()
    playground.cluster(cacheNodes={"replicas": 3})
    playground.wait_settled()
    with Client(manager.tcp) as client:
        client.store(KEYS, 200_000)
        held = client.acquire(KEYS)  # a drain waits for its end
        playground.change(cacheNodes={"replicas": 1})
        playground.wait_event("Draining", "demo-cache-2 leaves")
        assert playground.replicas() == 3
        playground.wait_condition("Progressing", "True", "ScalingDown")  # written after the Event
        drains = {
            name: pod["metadata"]["annotations"] for name, pod in playground.pods().items() if name != "demo-cache-0"
        }
        assert all(note[DRAIN_ANNOTATION].startswith("scale-down Flush ") for note in drains.values())
        client.release(held.lease)
    playground.wait_settled()
    assert playground.replicas() == 1 and list(playground.pods()) == ["demo-cache-0"]
    with Client(manager.tcp) as client:
        assert client.exists(*KEYS)


def test_scaling_up_takes_back_what_was_on_its_way_out(playground: Playground, manager: Running) -> None:
    playground.operate()
    playground.control()
    playground.cluster(cacheNodes={"replicas": 2})
    playground.wait_settled()
    uids = {name: pod["metadata"]["uid"] for name, pod in playground.pods().items()}
    with Client(manager.tcp) as client:
        client.store(KEYS, 200_000)
        client.acquire(KEYS)
        playground.change(cacheNodes={"replicas": 1})
        playground.wait_event("Draining", "demo-cache-1 leaves")
        playground.change(cacheNodes={"replicas": 2})
        playground.wait_event("DrainCancelled", "demo-cache-1 stay")
        playground.wait_settled()
    assert {name: pod["metadata"]["uid"] for name, pod in playground.pods().items()} == uids
    assert DRAIN_ANNOTATION not in playground.pods()["demo-cache-1"]["metadata"].get("annotations", {})


def test_a_drain_that_takes_too_long_is_said_and_still_has_to_end(playground: Playground, manager: Running) -> None:
    playground.operate()
    playground.control()
    playground.cluster(cacheNodes={"replicas": 2}, scaleDown={"drainTimeoutSeconds": 1})
    playground.wait_settled()
    with Client(manager.tcp) as client:
        client.store(KEYS, 200_000)
        client.acquire(KEYS)
        playground.change(cacheNodes={"replicas": 1})
        playground.wait_event("DrainTimedOut", "demo-cache-1 was not drained after 1 s")
        eventually(lambda: "Discard" in str(playground.pods().get("demo-cache-1", "Discard")), "the note to say so")


def test_an_image_rolls_one_node_at_a_time_and_drains_each(playground: Playground, manager: Running) -> None:
    playground.operate()
    controllers = playground.control()
    playground.cluster(cacheNodes={"replicas": 3})
    playground.wait_settled()
    before = {name: pod["metadata"]["uid"] for name, pod in playground.pods().items()}
    away: list[set[str]] = []

    def watch_nodes() -> bool:
        with admin(manager) as http:
            nodes = http.get("/v1/nodes").json()["nodes"]
        away.append({node["name"] for node in nodes if node["state"] != "Active"})
        pods = playground.pods()
        return all(name in pods and pods[name]["metadata"]["uid"] != uid for name, uid in before.items())

    playground.change(image="polarkv:2")
    wait_until(watch_nodes, "every pod to be another one", 60, 0.02)
    playground.wait_settled()
    assert max(map(len, away)) == 1
    drained = [message.split()[0] for reason, message in playground.events() if reason == "Replacing"]
    assert drained == ["demo-cache-2", "demo-cache-1", "demo-cache-0"]
    assert all("is drained" in message for reason, message in playground.events() if reason == "Replacing")
    assert playground.get()["status"]["image"] == "polarkv:2"
    assert not controllers.broken


def test_a_rollout_that_is_paused_or_taken_back_leaves_nodes_serving(playground: Playground, manager: Running) -> None:
    playground.operate()
    playground.control()
    playground.cluster(cacheNodes={"replicas": 2}, rollout={"paused": True})
    playground.wait_settled()
    uids = {pod["metadata"]["uid"] for pod in playground.pods().values()}
    playground.change(image="polarkv:2")
    playground.wait_condition("Progressing", "False", "Paused")
    with Client(manager.tcp) as client:
        client.store(KEYS, 200_000)
        client.acquire(KEYS)
        playground.change(rollout={"paused": False})
        playground.wait_event("Draining", "has to change")
        playground.change(image=None)
        playground.wait_event("DrainCancelled", "does not have to change")
        playground.wait_settled()
    assert {pod["metadata"]["uid"] for pod in playground.pods().values()} == uids


def test_settings_and_secrets_roll_too(playground: Playground) -> None:
    playground.operate()
    playground.control()
    playground.cluster(cacheNodes={"replicas": 1})
    playground.wait_settled()
    first = playground.pods()["demo-cache-0"]["metadata"]["uid"]
    playground.change(cacheNodes={"memory": {"size": "2Gi"}})
    eventually(lambda: playground.pods().get("demo-cache-0", {}).get("metadata", {}).get("uid") != first, "a new pod")
    playground.wait_settled()
    secret = playground.children()["Secret", "demo-secret"]["data"]["secret"]
    playground.change(security={"secretsGeneration": 2})
    eventually(lambda: playground.children()["Secret", "demo-secret"]["data"]["secret"] != secret, "another secret")
    # The manager of this test keeps its token; the operator is told that it no longer knows it.
    playground.wait_condition("ManagerAvailable", "False", "Silent", text="401")


def test_autoscaling_adds_and_removes_by_what_is_served(playground: Playground, manager: Running) -> None:
    playground.operate()
    playground.control()
    down = {"stabilizationWindowSeconds": 5, "periodSeconds": 1}
    playground.cluster(
        cacheNodes={"replicas": 1},
        autoscaling={
            "minReplicas": 1, "maxReplicas": 2, "targetBandwidth": {"bytesPerSecond": "1k"},
            "behavior": {"scaleDown": down, "scaleUp": {"periodSeconds": 0}},
        },
    )  # fmt: skip
    playground.wait_settled()
    keys = KEYS[:20]
    with Client(manager.tcp) as client:
        client.store(keys)

        def read_and_look() -> bool:
            client.release(client.acquire(keys).lease)
            return playground.replicas() == 2

        wait_until(read_and_look, "a second cache node", 60, 0.2)
    assert "needed; up from 1 to 2" in playground.wait_event("ScaledUp")
    playground.wait_event("ScaledDown", "down from 2 to 1", 60)
    eventually(lambda: playground.replicas() == 1, "one cache node")
    assert playground.get()["spec"]["cacheNodes"]["replicas"] == 1
    # An HPA that writes the scale has no say while autoscaling is in the spec.
    playground.change(cacheNodes={"replicas": 2})
    playground.wait_settled()
    assert playground.replicas() == 1
