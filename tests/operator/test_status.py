"""Conditions and what is said of them; children compared; pods' troubles. All pure."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest

from polarkv_client.states import DrainMode, NodeState
from polarkv_operator.api import parse
from polarkv_operator.reconcile.autoscale import Decision, Memory
from polarkv_operator.reconcile.plan.children import covers, differs, in_place, plan_children, stamp
from polarkv_operator.reconcile.plan.rollout import Rollout
from polarkv_operator.reconcile.plan.scale import Scaling
from polarkv_operator.reconcile.plan.trouble import Trouble, find_trouble
from polarkv_operator.reconcile.plan.world import CacheNode, Drain, Purpose, World, read_drain
from polarkv_operator.reconcile.status import Facts, make_status, read_memory, refused_status
from tests.operator.support.clusters import body, with_field

CLUSTER = parse(body())
FINE = Facts(
    wanted=2,
    world=World(tuple(
        CacheNode(at, f"demo-cache-{at}", f"u{at}", ready=True, state=NodeState.ACTIVE, proved=True) for at in range(2)
    ), current=2, now_s=0),
    scaling=Scaling(2), rollout=Rollout(0), image="polarkv:1",
)  # fmt: skip


def conditions(facts: Facts, old: dict[str, Any] | None = None, now_s: int = 100) -> dict[str, Any]:
    status = make_status(CLUSTER, facts, old or {}, now_s)
    return {each["type"]: each for each in status["conditions"]}


def said(facts: Facts) -> dict[str, tuple[str, str]]:
    return {name: (each["status"], each["reason"]) for name, each in conditions(facts).items()}


def test_a_cluster_that_is_as_it_should_be() -> None:
    assert said(FINE) == {
        "Ready": ("True", "AllActive"), "Progressing": ("False", "Settled"), "Degraded": ("False", "AsExpected"),
        "ManagerAvailable": ("True", "Answers"), "SpecValid": ("True", "Valid"), "RDMAReady": ("False", "NoDevice"),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("facts", "kind", "status", "reason", "text"),
    [
        (replace(FINE, silence="nobody is at home"), "Ready", "False", "ManagerUnavailable", "nobody is at home"),
        (replace(FINE, silence="nobody"), "ManagerAvailable", "False", "Silent", "nobody"),
        (replace(FINE, wanted=3, rollout=Rollout(2)), "Ready", "True", "RollingOut", "2 of 3"),
        (replace(FINE, wanted=4, rollout=Rollout(2)), "Ready", "False", "CacheNodesMissing", "2 of 4"),
        (replace(FINE, wanted=1), "Progressing", "True", "ScalingDown", "to 1"),
        (replace(FINE, wanted=5), "Progressing", "True", "ScalingUp", "from 2 to 5"),
        (replace(FINE, rollout=Rollout(2, waits_for="x is late")), "Progressing", "True", "RollingOut", "x is late"),
        (replace(FINE, rollout=Rollout(2), paused=True), "Progressing", "False", "Paused", ""),
        (replace(FINE, manager_current=False), "Progressing", "True", "RollingOut", "the manager"),
        (replace(FINE, problems=(("NameTaken", "a b"),)), "Degraded", "True", "NameTaken", "a b"),
        (replace(FINE, troubles=(Trouble("p is lost", True, 0),)), "Degraded", "True", "PodFailing", "p is lost"),
        (replace(FINE, troubles=(Trouble("p is late", False, 0),)), "Degraded", "False", "AsExpected", ""),
    ],
)
def test_what_else_there_is_to_say(facts: Facts, kind: str, status: str, reason: str, text: str) -> None:
    found = conditions(facts)[kind]
    assert (found["status"], found["reason"]) == (status, reason)
    assert text in found["message"]


def test_rdma() -> None:
    spec = with_field("cacheNodes.transport", {"mode": "Auto", "resourceName": "rdma/hca"})
    cluster = parse(spec)

    def rdma(facts: Facts) -> tuple[str, str]:
        status = make_status(cluster, facts, {}, 0)
        return next((c["status"], c["reason"]) for c in status["conditions"] if c["type"] == "RDMAReady")

    assert rdma(FINE) == ("False", "NotOffered")
    assert rdma(replace(FINE, rdma={"demo-cache-0": "x", "demo-cache-1": "y"})) == ("True", "Offered")
    assert rdma(replace(FINE, world=World((), 0, 0), wanted=0)) == ("Unknown", "NoCacheNodes")


def test_times_change_with_the_status_alone() -> None:
    first = make_status(CLUSTER, FINE, {}, 100)
    assert make_status(CLUSTER, FINE, first, 200) == first
    later = conditions(replace(FINE, silence="x"), first, 200)
    assert later["Ready"]["lastTransitionTime"].endswith("00:03:20Z")
    assert later["SpecValid"]["lastTransitionTime"].endswith("00:01:40Z")


def test_a_refusal_keeps_what_was_said_before() -> None:
    first = make_status(CLUSTER, FINE, {}, 100)
    refused = refused_status("spec.image: wrong", 7, first, 200)
    found = {each["type"]: each for each in refused["conditions"]}
    assert refused["observedGeneration"] == 7 and refused["nodes"] == "2/2"
    assert found["SpecValid"]["status"] == "False" and "spec.image" in found["SpecValid"]["message"]
    assert found["Ready"]["status"] == "True"
    assert refused_status("spec.image: wrong", 7, refused, 300) == refused


def test_autoscaling_is_remembered_by_the_status() -> None:
    decision = Decision(Memory(3, 1000, 2, 2000, 3000), "ScaleDownPending", "so much")
    status = make_status(CLUSTER, replace(FINE, decision=decision), {}, 100)
    assert read_memory(status, 9) == decision.memory
    again = replace(FINE, decision=replace(decision, message="a bit less"))
    assert make_status(CLUSTER, again, status, 200) == status
    for nothing in ({}, {"autoscaling": {"desiredReplicas": "?"}}, {"autoscaling": {"desiredReplicas": 1, "reason": "",
                    "message": "", "lastScaleTime": "yesterday"}}):  # fmt: skip
        assert read_memory(nothing, 9) == Memory(9)


def test_drains_are_written_and_read() -> None:
    drain = Drain(Purpose.ROLLOUT, DrainMode.FLUSH, 3600)
    assert drain.written() == "rollout Flush 1970-01-01T01:00:00Z"
    assert read_drain(drain.written()) == drain
    for text in ("", "rollout", "rollout Flush", "rollout Flush yesterday", "x Flush 1970-01-01T01:00:00Z"):
        assert read_drain(text) is None


def config_map(name: str = "a", **data: str) -> dict[str, Any]:
    metadata: dict[str, Any] = {"name": name, "namespace": "ns", "labels": {"cluster": "demo"}}
    metadata["ownerReferences"] = [{"uid": "u", "controller": True}]
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}


def test_children_are_written_when_they_differ_and_removed_when_they_are_not_wanted() -> None:
    wanted, there = config_map(x="1"), stamp(config_map(x="1"))
    there["metadata"]["resourceVersion"] = "7"
    key, other = ("ConfigMap", "a"), ("ConfigMap", "b")
    assert plan_children([wanted], {key: there}, "u", "cluster").write == ()
    edited = copy.deepcopy(there)
    edited["data"]["x"] = "2"
    assert plan_children([wanted], {key: edited}, "u", "cluster").write == (stamp(wanted),)
    less = plan_children([config_map()], {key: there}, "u", "cluster")
    assert less.write == (stamp(config_map()),)  # a key that is no longer wanted, too
    left = plan_children([wanted], {key: there, other: config_map("b")}, "u", "cluster")
    assert [found["metadata"]["name"] for found in left.remove] == ["b"]
    foreign = {**there, "metadata": {"name": "a", "namespace": "ns"}}
    taken = plan_children([wanted], {key: foreign}, "u", "cluster")
    assert taken.taken == (key,) and taken.write == ()


def test_what_the_api_server_adds_or_writes_another_way_is_no_difference() -> None:
    assert covers({"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"b": 1}})
    assert covers({"cpu": "1500m"}, {"cpu": "1.5"}) and covers({"memory": "1Gi"}, {"memory": 1 << 30})
    assert not covers({"x": [1, 2]}, {"x": [1]}) and not covers({"x": True}, {"x": "true"})
    assert covers({}, {"x": {}, "y": []}) and not covers({}, {"x": {"y": 1}})


def test_what_cannot_be_changed_is_left() -> None:
    def stateful_set(size: str, image: str) -> dict[str, Any]:
        return {"kind": "StatefulSet", "metadata": {"name": "x"}, "spec": {
            "template": image, "volumeClaimTemplates": [{"spec": {"resources": size}}]}}  # fmt: skip

    merged = in_place(stateful_set("2Gi", "new"), stateful_set("1Gi", "old"))
    assert merged == stateful_set("1Gi", "new")
    assert differs(stateful_set("2Gi", "new"), stateful_set("1Gi", "new"))


def test_why_a_pod_does_not_run() -> None:
    pod: dict[str, Any] = {"metadata": {"name": "p", "creationTimestamp": "1970-01-01T00:01:00Z"}, "status": {}}
    claim = {"metadata": {"name": "data-0-p"}, "status": {"phase": "Pending"}}
    assert find_trouble(pod, []) == Trouble("p is not ready (no state yet)", False, 60)
    assert "data-0-p is not bound" in str(find_trouble(pod, [claim]))
    pod["status"] = {"conditions": [{"type": "PodScheduled", "status": "False", "message": "0/3 nodes"}]}
    assert "0/3 nodes" in str(find_trouble(pod, []))
    pod["status"]["containerStatuses"] = [{"name": "slab", "state": {"waiting": {"reason": "CrashLoopBackOff"}}}]
    assert find_trouble(pod, [claim]) == Trouble("p, container slab: CrashLoopBackOff", True, 60)
    pod["status"]["conditions"] = [{"type": "Ready", "status": "True"}]
    assert find_trouble(pod, []) is None


def test_a_nodes_trouble_is_not_said_of_another_whose_name_begins_alike() -> None:
    nodes = tuple(CacheNode(at, f"demo-cache-{at}", f"u{at}") for at in (1, 10))
    troubles = tuple(
        Trouble(f"demo-cache-10{text}", False, 0) for text in (" is not ready (Pending)", ", container slab")
    )
    for trouble in troubles:
        facts = replace(FINE, wanted=11, world=World(nodes, current=11, now_s=0), troubles=(trouble,))
        shown = {each["name"]: each.get("message") for each in make_status(CLUSTER, facts, {}, 100)["cacheNodes"]}
        assert shown == {"demo-cache-1": None, "demo-cache-10": trouble.text}
