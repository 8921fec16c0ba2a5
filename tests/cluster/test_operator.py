"""The operator on a whole cluster: every change of a spec, with real pods, real volumes and the bytes to prove it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helm_python import Config

from tests.cluster.support import images
from tests.cluster.support.kubectl import Kubectl, KubectlError
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(900)
ROOT = Path(__file__).parents[2]
CHART, TRAFFIC = ROOT / "charts" / "polarkv", Path(__file__).parent / "support" / "traffic.py"
NAMESPACE = "polarkv-system"
CHUNKS, CHUNK_BYTES = 96, 1 << 20
SMALL = {"requests": {"cpu": "20m"}}
Object = dict[str, Any]


@pytest.fixture(scope="module")
def operator(kubeconfig: Path) -> Iterator[Kubectl]:
    """Install the chart without the webhook; yield kubectl in the operator's namespace."""
    repository, _, tag = images.PROJECT_IMAGE.rpartition(":")
    values = {
        "image": {"repository": repository, "tag": tag},
        "webhook": {"enabled": False},
        "operator": {"resources": SMALL},
    }
    kubectl = Kubectl(kubeconfig, NAMESPACE)
    with Config(kubeconfig_path=kubeconfig, namespace=NAMESPACE) as helm:
        helm.install(str(CHART), "polarkv", values, namespace=NAMESPACE, create_namespace=True)
        try:
            try:
                kubectl.run("rollout", "status", "deployment/polarkv-operator", "--timeout=150s")
            except KubectlError as error:
                told = kubectl.run("describe", "pods"), kubectl.run("logs", "deployment/polarkv-operator")
                raise KubectlError("\n".join([str(error), *told])) from None
            yield kubectl
        finally:
            helm.uninstall("polarkv")


def cluster(replicas: int, **spec: Any) -> Object:
    """A small cluster; ``spec`` replaces whole parts of its spec."""
    return {
        "apiVersion": "polarkv.io/v1alpha1",
        "kind": "PolarKVCluster",
        "metadata": {"name": "demo"},
        "spec": {
            "manager": {"resources": SMALL, "metadataStore": {"type": "None"}},
            "cache": {"maxKeys": 10000},
            "cacheNodes": {
                "replicas": replicas,
                "memory": {"size": "64Mi"},
                "storage": {"volumeSize": "384Mi"},
                "transport": {"mode": "TCP"},
                "resources": {"slab": SMALL, "disk": SMALL},
            },
            **spec,
        },
    }


def change(kubectl: Kubectl, **spec: Any) -> None:
    """Change fields of the cluster's spec, as a person does."""
    kubectl.run("patch", "pkv", "demo", "--type=merge", "-p", json.dumps({"spec": spec}))


def wait_settled(kubectl: Kubectl, nodes: int, timeout_s: float = 150) -> Object:
    """Wait until everything is as the present spec says, with so many cache nodes."""

    def probe() -> Object | None:
        found = kubectl.get("pkv", "demo")
        generation, status = found["metadata"]["generation"], found.get("status", {})
        said = {each["type"]: each for each in status.get("conditions", [])}
        right = said and said["Ready"]["status"] == "True" and said["Progressing"]["reason"] == "Settled"
        current = right and said["Ready"]["observedGeneration"] == generation
        return found if current and status.get("nodes") == f"{nodes}/{nodes}" else None

    try:
        return wait_until(probe, f"{nodes} cache nodes", timeout_s, 0.5)
    except TimeoutError as error:
        raise TimeoutError(f"{error}; {kubectl.get('pkv', 'demo').get('status')}; {events(kubectl)}") from None


def traffic(kubectl: Kubectl, name: str, what: str, seconds: int = 0) -> None:
    """Start a pod that stores or loads all chunks."""
    container = {
        "name": "main",
        "image": images.PROJECT_IMAGE,
        "command": ["python3", "-c", TRAFFIC.read_text(encoding="utf-8"), what]
        + [str(number) for number in (CHUNKS, CHUNK_BYTES, seconds)],
        "env": [{"name": "POLARKV_TOKEN", "valueFrom": {"secretKeyRef": {"name": "demo-client", "key": "default"}}}],
        "envFrom": [{"configMapRef": {"name": "demo-connection"}}],
    }
    spec = {"restartPolicy": "Never", "automountServiceAccountToken": False, "containers": [container]}
    kubectl.apply({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec})


def outcome(kubectl: Kubectl, name: str, timeout_s: int = 150) -> dict[str, int]:
    """Wait for such a pod to end; return what it counted."""
    done = "--for=jsonpath={.status.phase}=Succeeded"
    kubectl.run("wait", done, f"pod/{name}", f"--timeout={timeout_s}s", timeout_s=timeout_s + 10)
    found: dict[str, int] = json.loads(kubectl.run("logs", name))
    return found


def events(kubectl: Kubectl) -> list[tuple[str, str]]:
    """(reason, message) of the cluster's Events, oldest first."""
    found = [each for each in kubectl.list("events") if each["involvedObject"]["kind"] == "PolarKVCluster"]
    found.sort(key=lambda each: int(each["metadata"]["resourceVersion"]))
    return [(each["reason"], each["message"]) for each in found]


def uids(kubectl: Kubectl) -> dict[str, str]:
    """The uid of each cache node's pod that is not on its way out."""
    pods = [pod["metadata"] for pod in kubectl.list("pod", "app.kubernetes.io/component=cache-node")]
    return {pod["name"]: pod["uid"] for pod in pods if "deletionTimestamp" not in pod}


def test_an_upgrade_keeps_what_is_on_disk(operator: Kubectl, kubectl: Kubectl) -> None:
    kubectl.apply(cluster(2))
    wait_settled(kubectl, 2)
    traffic(kubectl, "writer", "store")
    assert outcome(kubectl, "writer")["stored"] == CHUNKS
    before = uids(kubectl)
    change(kubectl, monitoring={"logLevel": "Debug"})
    wait_until(lambda: not set(before.values()) & set(uids(kubectl).values()), "every pod to be another one", 150, 0.5)
    wait_settled(kubectl, 2)
    traffic(kubectl, "reader", "load")
    found = outcome(kubectl, "reader")
    print(f"after the upgrade {found['hits']} of {CHUNKS} chunks are there")
    assert found["wrong"] == 0 and found["hits"] >= 0.9 * CHUNKS
    replaced = [message for reason, message in events(kubectl) if reason == "Replacing"]
    assert [message.split()[0] for message in replaced] == ["demo-cache-1", "demo-cache-0"]
    assert all("is drained" in message for message in replaced)


def test_scaling_up_and_down_drains_from_the_top(operator: Kubectl, kubectl: Kubectl) -> None:
    kubectl.apply(cluster(2))
    wait_settled(kubectl, 2)
    change(kubectl, cacheNodes={"replicas": 4})
    wait_settled(kubectl, 4)
    traffic(kubectl, "writer", "store")
    assert outcome(kubectl, "writer")["stored"] == CHUNKS
    first = uids(kubectl)
    change(kubectl, cacheNodes={"replicas": 2})
    wait_settled(kubectl, 2)
    assert uids(kubectl) == {name: uid for name, uid in first.items() if name[-1] in "01"}
    drained = {message.split()[0] for reason, message in events(kubectl) if reason == "Draining"}
    assert drained == {"demo-cache-2", "demo-cache-3"}
    traffic(kubectl, "reader", "load")
    found = outcome(kubectl, "reader")
    assert found["wrong"] == 0 and found["hits"] > 0
    # Their volumes were kept, and serve again when they come back.
    change(kubectl, cacheNodes={"replicas": 4})
    wait_settled(kubectl, 4)
    traffic(kubectl, "again", "load")
    found = outcome(kubectl, "again")
    print(f"back at four, {found['hits']} of {CHUNKS} chunks are there")
    assert found["wrong"] == 0 and found["hits"] >= 0.9 * CHUNKS


def test_autoscaling_follows_real_traffic(operator: Kubectl, kubectl: Kubectl) -> None:
    scaling = {
        "minReplicas": 1, "maxReplicas": 2, "targetBandwidth": {"bytesPerSecond": "1M"},
        "behavior": {"scaleDown": {"stabilizationWindowSeconds": 10, "periodSeconds": 5}},
    }  # fmt: skip
    kubectl.apply(cluster(1, autoscaling=scaling))
    wait_settled(kubectl, 1)
    traffic(kubectl, "writer", "store")
    outcome(kubectl, "writer")
    traffic(kubectl, "reader", "load", seconds=300)
    wait_settled(kubectl, 2)
    kubectl.run("exec", "reader", "--", "touch", "/tmp/enough")  # not sooner, however long a second node takes
    assert outcome(kubectl, "reader")["wrong"] == 0
    wait_settled(kubectl, 1)
    decided = [message for reason, message in events(kubectl) if reason in ("ScaledUp", "ScaledDown")]
    print(decided)
    assert "up from 1 to 2" in decided[0] and "down from 2 to 1" in decided[-1]
    assert kubectl.get("pkv", "demo")["spec"]["cacheNodes"]["replicas"] == 1


def test_what_is_deleted_comes_back_within_ten_seconds(operator: Kubectl, kubectl: Kubectl) -> None:
    kubectl.apply(cluster(1))
    wait_settled(kubectl, 1)
    for kind, name in (("service", "demo-manager"), ("configmap", "demo-settings"), ("deployment", "demo-manager")):
        old = kubectl.get(kind, name)["metadata"]["uid"]
        began_s = time.monotonic()
        kubectl.delete(kind, name, "--wait=false", "--cascade=orphan")

        def is_back(kind: str = kind, name: str = name, old: str = old) -> bool:
            found = kubectl.find(kind, name)
            return found is not None and found["metadata"]["uid"] != old

        wait_until(is_back, f"{kind} {name}", 10, 0.1)
        print(f"{kind} {name} was back after {time.monotonic() - began_s:.1f} s")
    wait_settled(kubectl, 1)


def test_a_cluster_is_deleted_while_the_operator_is_down(operator: Kubectl, kubectl: Kubectl) -> None:
    kubectl.apply(cluster(1))
    wait_settled(kubectl, 1)
    operator.run("scale", "deployment/polarkv-operator", "--replicas=0")
    try:
        operator.run("wait", "--for=delete", "pod", "-l", "app.kubernetes.io/component=operator", "--timeout=150s")
        kubectl.delete("pkv", "demo", "--timeout=150s")
        label = "polarkv.io/cluster=demo"
        kinds = "deployment,statefulset,pod,service,configmap,secret,serviceaccount,pdb,networkpolicy"
        wait_until(lambda: not kubectl.list(kinds, label), "all that it consisted of to go", 150, 0.5)
        assert kubectl.list("pvc", label)  # volumeRetention is Retain
    finally:
        operator.run("scale", "deployment/polarkv-operator", "--replicas=1")
        operator.run("rollout", "status", "deployment/polarkv-operator", "--timeout=150s")
