"""Bad input and bad luck: what the operator does while things around it fail, and that it does not fight."""

from __future__ import annotations

import base64
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from polarkv_client.listening import EVERYWHERE
from polarkv_operator import handlers
from polarkv_operator.clients.kube import ApiError, Kind
from polarkv_operator.reconcile.observe import CLUSTER, DEPLOYMENT, POD, SECRET
from polarkv_operator.settings import OperatorSettings
from tests.cluster.support.api_server import ApiServer
from tests.operator.support import clusters
from tests.operator.support.playground import IMAGE, Playground, eventually
from tests.support.managers import Running
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(240)
NONSENSE: list[Any] = [
    None, True, -1, 0, 1, 2**31, 1e99, "", "0", "-1", "1Gi", "RAID0", "x" * 300, "Ä", [], [1], {}, {"name": 1},
    {"spec": {"containers": [{"name": "slab", "image": 7}]}}, [{"name": "x"}], {"size": "1Ki"}, "polarkv:1",
]  # fmt: skip


def fields(schema: dict[str, Any], path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    below = [place for name, child in schema.get("properties", {}).items() for place in fields(child, (*path, name))]
    return [path, *below] if path else below


def test_two_hundred_clusters_of_nonsense_are_each_answered(empty_playground: Playground) -> None:
    operator = empty_playground.operate()
    crd = empty_playground.api.get(Kind("apiextensions.k8s.io/v1", "CustomResourceDefinition"), None,
                                   "polarkvclusters.polarkv.io")  # fmt: skip
    assert crd is not None
    schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    places, chance = fields(schema), random.Random(11)
    accepted: list[str] = []
    answers: list[tuple[int, str]] = []
    for number in range(200):
        body = clusters.body()
        body["metadata"] = {"name": f"fuzz-{number}", "namespace": empty_playground.namespace}
        body["spec"]["cacheNodes"]["replicas"] = 0
        changed = chance.choice(places)
        place = body["spec"]
        for name in changed[:-1]:
            place = place.setdefault(name, {}) if isinstance(place.get(name, {}), dict) else {}
        place[changed[-1]] = chance.choice(NONSENSE)
        try:
            accepted.append(empty_playground.api.create(body)["metadata"]["name"])
        except ApiError as error:
            answers.append((error.status, error.message))
    assert len(answers) > 50 and accepted
    assert all(status in (400, 422) and "spec" in message for status, message in answers), answers

    def answered(name: str) -> bool:
        found = empty_playground.condition("SpecValid", name)
        if found.get("status") == "False":
            assert "spec" in found["message"], found
        return bool(found)

    for name in accepted:
        eventually(lambda name=name: answered(name), f"an answer to {name}", 90)  # type: ignore[misc]
    assert operator.alive


def test_what_only_the_operator_can_see_is_a_condition_that_names_the_field(empty_playground: Playground) -> None:
    empty_playground.operate()
    template = {"spec": {"containers": [{"name": "slab", "image": "Not An Image", "volumeMounts": [{"mountPath": 7}]}]}}
    empty_playground.cluster("shape", cacheNodes={"podTemplate": template})
    empty_playground.cluster("child", manager={"podTemplate": {"spec": {"restartPolicy": "Sometimes"}}})
    empty_playground.cluster("merge", cacheNodes={"podTemplate": {"spec": {"volumes": "none"}}})
    for name, field in (
        ("shape", "spec.cacheNodes: StatefulSet shape-cache"), ("child", "spec.manager: Deployment child-manager"),
        ("merge", "spec.cacheNodes.podTemplate.spec.volumes"),
    ):  # fmt: skip
        assert field in empty_playground.wait_condition("SpecValid", "False", name=name)["message"]
    assert "restartPolicy" in empty_playground.wait_event("SpecInvalid", "restartPolicy")
    empty_playground.change("child", manager={"podTemplate": None})
    empty_playground.wait_condition("SpecValid", "True", name="child")


def test_fifty_clusters_in_a_minute_and_three_hundred_megabytes(empty_playground: Playground, tmp_path: Path) -> None:
    for number in range(50):
        empty_playground.cluster(f"c{number}", cacheNodes={"replicas": 2})
    environment = {
        **os.environ, "KUBECONFIG": str(empty_playground.kubeconfig), "POLARKV_OPERATOR_IMAGE": IMAGE,
        "POLARKV_OPERATOR_NAMESPACE": empty_playground.namespace, "POLARKV_OPERATOR_HEALTH_PORT": "0",
        "POLARKV_OPERATOR_WATCH_NAMESPACE": empty_playground.namespace,
    }  # fmt: skip
    command = [sys.executable, "-m", "polarkv_client.cli.main", "operator"]
    began_s = time.monotonic()
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:

            def done() -> bool:
                found = empty_playground.api.find(CLUSTER, empty_playground.namespace)
                return all("observedGeneration" in each.get("status", {}) for each in found)

            wait_until(done, "every cluster to have a status", 60, 0.5)
            taken_s = time.monotonic() - began_s
            resident_mb = psutil.Process(process.pid).memory_info().rss / 1e6
            print(f"50 clusters in {taken_s:.1f} s, {resident_mb:.0f} MB")
            assert resident_mb < 300
            assert len(empty_playground.api.find(DEPLOYMENT, empty_playground.namespace)) == 50
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(40) == 0, (tmp_path / "log").read_text()


def test_two_operators_do_not_fight_and_one_takes_over(playground: Playground) -> None:
    first, second = playground.operate(), playground.operate()
    playground.control()
    playground.cluster(cacheNodes={"replicas": 1})
    playground.wait_settled()
    assert [first.election.leads(), second.election.leads()].count(True) == 1
    leader, follower = (first, second) if first.election.leads() else (second, first)
    before = playground.versions()
    leader.stop()
    eventually(follower.election.leads, "the other one to lead", 60)
    eventually(lambda: follower.queue.ready() == 0, "the queue to be empty")
    follower.reconciler.turn(f"{playground.namespace}/demo")
    after = playground.versions()
    assert {key for key in before if before[key] != after[key]} <= {("PolarKVCluster", "demo")}
    playground.change(cacheNodes={"replicas": 2})
    eventually(lambda: playground.replicas() == 2, "the other one to act")


def test_a_restart_of_the_operator_goes_on_with_a_rollout_where_it_was(playground: Playground) -> None:
    first = playground.operate()
    playground.control()
    playground.cluster(cacheNodes={"replicas": 2})
    playground.wait_settled()
    playground.change(image="polarkv:2")
    playground.wait_event("Draining", "has to change")
    first.stop()
    playground.operate()
    playground.wait_settled()
    assert playground.get()["status"]["image"] == "polarkv:2"


def test_the_api_server_restarts(playground: Playground, api_server_process: ApiServer) -> None:
    operator = playground.operate()
    playground.control()
    playground.cluster(cacheNodes={"replicas": 1})
    playground.wait_settled()
    api_server_process.stop()
    eventually(lambda: not operator.election.leads(), "leadership to end")
    api_server_process.start()
    wait_until(lambda: _answers(playground), "the API server to answer", 60, 0.2)
    playground.change(cacheNodes={"replicas": 2})
    eventually(lambda: playground.replicas() == 2, "the change to be seen", 60)
    playground.wait_settled(timeout_s=60)
    assert operator.alive


def _answers(playground: Playground) -> bool:
    try:
        return bool(playground.get())
    except ApiError:
        return False


def test_a_name_that_somebody_else_has_is_left_alone(empty_playground: Playground) -> None:
    foreign = {
        "apiVersion": "v1", "kind": "ConfigMap", "data": {"mine": "yes"},
        "metadata": {"name": "demo-settings", "namespace": empty_playground.namespace},
    }  # fmt: skip
    empty_playground.api.create(foreign)
    empty_playground.operate()
    empty_playground.cluster()
    found = empty_playground.wait_condition("Degraded", "True", "NameTaken")
    assert "ConfigMap demo-settings" in found["message"]
    kept = empty_playground.api.get(Kind("v1", "ConfigMap"), empty_playground.namespace, "demo-settings")
    assert kept is not None and kept["data"] == {"mine": "yes"}
    empty_playground.api.delete(Kind("v1", "ConfigMap"), empty_playground.namespace, "demo-settings",
                                kept["metadata"]["uid"])  # fmt: skip
    empty_playground.wait_condition("Degraded", "False", timeout_s=60)


def test_secrets_that_are_missing_are_made_and_those_that_are_there_kept(playground: Playground) -> None:
    playground.operate()
    playground.control()
    playground.cluster(cacheNodes={"replicas": 1})
    playground.wait_settled()
    before = {name: found["data"] for (kind, name), found in playground.children().items() if kind == SECRET.name}
    found = playground.children()[SECRET.name, "demo-client"]
    playground.api.delete(SECRET, playground.namespace, "demo-client", found["metadata"]["uid"])
    eventually(lambda: (SECRET.name, "demo-client") in playground.children(), "the Secret to be back")
    after = {name: found["data"] for (kind, name), found in playground.children().items() if kind == SECRET.name}
    assert after["demo-secret"] == before["demo-secret"] and after["demo-admin"] == before["demo-admin"]
    assert after["demo-client"] != before["demo-client"]
    tokens = json.loads(base64.b64decode(after["demo-tokens"]["tokens.json"]))
    eventually(lambda: _client_token(playground) in str(_tokens(playground)), "the manager's tokens to follow")
    assert tokens["admin_token"]


def _client_token(playground: Playground) -> str:
    data = playground.children()[SECRET.name, "demo-client"]["data"]
    return base64.b64decode(data["default"]).decode()


def _tokens(playground: Playground) -> Any:
    return json.loads(base64.b64decode(playground.children()[SECRET.name, "demo-tokens"]["data"]["tokens.json"]))


def test_a_pod_that_cannot_run_is_said_where_people_look(playground: Playground) -> None:
    playground.operate()
    controllers = playground.control()
    controllers.broken.add("demo-cache-1")
    playground.cluster(cacheNodes={"replicas": 2})
    wait_until(lambda: "demo-cache-1" in playground.pods(), "the pod")
    waiting = {"name": "slab", "state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}},
               "image": "x", "imageID": "", "ready": False, "restartCount": 0}  # fmt: skip
    status = {"phase": "Pending", "containerStatuses": [waiting]}
    headers = {"Content-Type": "application/merge-patch+json"}
    path = POD.path(playground.namespace, "demo-cache-1", "status")
    playground.api.call("PATCH", path, {}, {"status": status}, headers)
    found = playground.wait_condition("Degraded", "True", "PodFailing")
    assert "demo-cache-1" in found["message"] and "ImagePullBackOff: no such image" in found["message"]
    playground.wait_condition("Ready", "False", "CacheNodesMissing")
    eventually(lambda: "1 of 2" in playground.condition("Ready")["message"], "the node that runs to be counted")
    # Nothing is taken out of service while a node is missing.
    uid = playground.pods()["demo-cache-0"]["metadata"]["uid"]
    playground.change(image="polarkv:2")
    playground.wait_condition("Progressing", "True", "RollingOut")
    eventually(lambda: playground.pods().get("demo-cache-1", {}).get("metadata", {}).get("labels", {}) != {}, "the pod")
    assert playground.pods()["demo-cache-0"]["metadata"]["uid"] == uid


def test_a_silent_manager_stops_scale_down_and_rollouts_not_the_operator(empty_playground: Playground) -> None:
    empty_playground.operate()
    empty_playground.control()
    empty_playground.cluster(cacheNodes={"replicas": 2})
    empty_playground.wait_condition("ManagerAvailable", "False", "Silent")
    eventually(lambda: len(empty_playground.pods()) == 2, "the pods")
    uids = {pod["metadata"]["uid"] for pod in empty_playground.pods().values()}
    empty_playground.change(cacheNodes={"replicas": 1}, image="polarkv:2")
    found = empty_playground.wait_condition("Progressing", "True", "ScalingDown")
    assert "once the manager answers" in found["message"]
    assert empty_playground.replicas() == 2
    assert {pod["metadata"]["uid"] for pod in empty_playground.pods().values()} == uids
    empty_playground.change(cacheNodes={"replicas": 3})
    eventually(lambda: empty_playground.replicas() == 3, "a scale-up, which needs nobody")


def test_a_manager_that_restarts_loses_no_drain(playground: Playground, manager: Running) -> None:
    """The note at the pod outlives it: what is Active again is drained again."""
    assert manager.epoch
    playground.operate()
    playground.control()
    playground.cluster(cacheNodes={"replicas": 2})
    playground.wait_settled()
    name = "demo-cache-1"
    note = {"metadata": {"annotations": {"polarkv.io/drain": "rollout Flush 2026-01-01T00:00:00Z"}}}
    playground.edit(POD, name, note)  # as if a rollout had been under way, and is no longer needed
    playground.wait_event("DrainCancelled", name)
    eventually(lambda: "polarkv.io/drain" not in playground.pods()[name]["metadata"].get("annotations", {}), "no note")


def test_it_runs_as_a_user_that_has_no_name(
    empty_playground: Playground, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As pods do: user 65532 is in no list of users, and a library that asks for its name fails."""
    given: dict[str, Any] = {}
    bound: list[tuple[str, str, int]] = []
    monkeypatch.setenv("KUBECONFIG", str(empty_playground.kubeconfig))
    monkeypatch.setattr("polarkv_operator.handlers.kopf.run", lambda **arguments: given.update(arguments))
    monkeypatch.setattr("polarkv_operator.handlers.bind_tcp", lambda *address: bound.append(address))
    handlers.run(OperatorSettings(image=IMAGE, identity="me", health_port=8080))
    assert given["identity"] == "me" and given["clusterwide"]
    assert bound == [("health_port", EVERYWHERE, 8080)]
