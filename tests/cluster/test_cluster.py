"""The test cluster itself: it must behave like a cluster before anything is concluded from tests on it."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import psutil
import pytest

from tests.cluster.support import cgroups, images
from tests.cluster.support.cluster import ROOT, Cluster, find, sweep
from tests.cluster.support.kubectl import Kubectl, KubectlError
from tests.cluster.support.layout import folder_of
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(600)

SERVE = "import http.server as h; h.test(h.SimpleHTTPRequestHandler, port=8080)"
ASK = """
import urllib.request
print([urllib.request.urlopen(url, timeout=5).status for url in ("http://web", "http://one.webs:8080")])
"""
UP_AND_DIE = """
import os, signal
from tests.cluster.support import cluster, images
print(cluster.up(images.archives()).layout.number, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def pod(name: str, script: str, **spec: Any) -> dict[str, Any]:
    container = {
        "name": "main",
        "image": images.base_image(),
        "imagePullPolicy": "IfNotPresent",
        "command": ["python3", "-c", script],
        **spec.pop("container", {}),
    }
    frame = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": {"app": name}}}
    return {**frame, "spec": {"terminationGracePeriodSeconds": 1, "containers": [container], **spec}}


def finish(kubectl: Kubectl, name: str) -> str:
    """Wait for a pod to end well; return what it said."""
    kubectl.run("wait", "--for=jsonpath={.status.phase}=Succeeded", f"pod/{name}", "--timeout=150s")
    return kubectl.run("logs", name)


def test_pods_find_each_other_by_name(kubectl: Kubectl) -> None:
    ready = {"readinessProbe": {"httpGet": {"path": "/", "port": 8080}, "periodSeconds": 1}}
    service = {"selector": {"app": "web"}, "ports": [{"port": 80, "targetPort": 8080}]}
    headless = {**service, "clusterIP": "None", "ports": [{"port": 8080}]}
    frame = {"apiVersion": "v1", "kind": "Service"}
    kubectl.apply(
        pod("web", SERVE, hostname="one", subdomain="webs", container=ready),
        {**frame, "metadata": {"name": "web"}, "spec": service},
        {**frame, "metadata": {"name": "webs"}, "spec": headless},
    )
    kubectl.run("wait", "--for=condition=Ready", "pod/web", "--timeout=150s")
    kubectl.apply(pod("asker", ASK, restartPolicy="OnFailure"))
    assert finish(kubectl, "asker").strip() == "[200, 200]"


@pytest.mark.parametrize("mode", ["Filesystem", "Block"])
def test_volumes_have_the_size_and_outlive_pods(own_cluster: Cluster, kubectl: Kubectl, mode: str) -> None:
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "data"},
        "spec": {"accessModes": ["ReadWriteOnce"], "volumeMode": mode, "resources": {"requests": {"storage": "64Mi"}}},
    }
    place = {"volumeMounts": [{"name": "data", "mountPath": "/data"}]}
    target = "/data/file"
    if mode == "Block":
        place, target = {"volumeDevices": [{"name": "data", "devicePath": "/dev/data"}]}, "/dev/data"
    volumes = [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}]
    write = f"import os; f = open('{target}', 'wb'); f.write(b'kept'); f.flush(); os.fsync(f.fileno())"
    size = "import os; s = os.statvfs('/data'); print(s.f_blocks * s.f_frsize >> 20)"
    if mode == "Block":
        size = f"f = open('{target}', 'rb'); print(f.seek(0, 2) >> 20)"
    kubectl.apply(claim, pod("writer", f"{write}; {size}", restartPolicy="Never", volumes=volumes, container=place))
    assert 50 < int(finish(kubectl, "writer")) <= 64
    kubectl.delete("pod", "writer")
    read = f"print(open('{target}', 'rb').read(4))"
    kubectl.apply(pod("reader", read, restartPolicy="Never", volumes=volumes, container=place))
    assert finish(kubectl, "reader").strip() == "b'kept'"
    kubectl.delete("pod", "reader")
    kubectl.delete("pvc", "data")
    left = own_cluster.layout.folder / "volumes"
    wait_until(lambda: not any(left.iterdir()), "the volume to go with its claim", 90)


def test_containers_of_a_pod_share_memory(kubectl: Kubectl) -> None:
    mount = {"volumeMounts": [{"name": "memory", "mountPath": "/memory"}]}
    read = """
import os, time
while not os.path.exists('/memory/done'): time.sleep(0.1)
print(open('/memory/done').read(), open('/proc/mounts').read().count('tmpfs /memory tmpfs'))
"""
    both = pod("both", "open('/memory/new', 'w').write('shared'); import os; os.rename('/memory/new', '/memory/done')")
    other = {**both["spec"]["containers"][0], "name": "other", "command": ["python3", "-c", read]}
    containers = [{**each, **mount} for each in (both["spec"]["containers"][0], other)]
    volumes = [{"name": "memory", "emptyDir": {"medium": "Memory", "sizeLimit": "16Mi"}}]
    both["spec"] |= {"containers": containers, "volumes": volumes, "restartPolicy": "Never"}
    kubectl.apply(both)
    kubectl.run("wait", "--for=jsonpath={.status.phase}=Succeeded", "pod/both", "--timeout=150s")
    assert kubectl.run("logs", "both", "-c", "other").strip() == "shared 1"


def test_programs_that_end_come_back(own_cluster: Cluster) -> None:
    kubectl = Kubectl(own_cluster.kubeconfig)
    own_cluster.hold("kube-apiserver")
    with pytest.raises(KubectlError):
        kubectl.get("node", "node0")
    own_cluster.release("kube-apiserver")
    wait_until(lambda: answers(kubectl), "the API server to come back", 60, 0.2)
    assert kubectl.get("node", "node0")["kind"] == "Node"


def answers(kubectl: Kubectl) -> bool:
    try:
        return kubectl.run("get", "--raw", "/readyz") == "ok"
    except KubectlError:
        return False


def test_a_node_that_is_lost_is_noticed_and_may_return(own_cluster: Cluster) -> None:
    kubectl = Kubectl(own_cluster.kubeconfig)

    def is_ready() -> str:
        conditions = kubectl.get("node", "node1")["status"]["conditions"]
        return next(str(each["status"]) for each in conditions if each["type"] == "Ready")

    own_cluster.add_node(1)
    assert is_ready() == "True"
    own_cluster.kill_node(1)
    wait_until(lambda: is_ready() == "Unknown", "the node to be given up", 60, 0.5)
    own_cluster.add_node(1)
    wait_until(lambda: is_ready() == "True", "the node to return", 60, 0.5)
    own_cluster.kill_node(1)
    kubectl.delete("node", "node1")


def test_a_node_ends_also_when_who_waits_for_it_is_stopped(own_cluster: Cluster) -> None:
    own_cluster.add_node(1)
    waiting = psutil.Process(int((own_cluster.layout.node(1) / "parent").read_text(encoding="ascii")))
    stopped = waiting.children(recursive=True)[0]
    stopped.suspend()
    own_cluster.kill_node(1)
    wait_until(lambda: not stopped.is_running(), "the stopped process to end")
    Kubectl(own_cluster.kubeconfig).delete("node", "node1")


@pytest.mark.usefixtures("own_cluster")
def test_a_cluster_whose_run_was_killed_is_removed() -> None:
    """Its processes end with the run at once; the rest goes when the next cluster is brought up."""
    done = subprocess.run(
        [sys.executable, "-c", UP_AND_DIE], cwd=ROOT, capture_output=True, text=True, timeout=200, check=False
    )
    number = int(done.stdout)
    wait_until(lambda: number not in {each.layout.number for each in find()}, "its processes to end")
    assert folder_of(number).exists(), "its folder is left to be removed"
    sweep()
    assert not folder_of(number).exists()
    assert f"pkv{number}" not in psutil.net_if_addrs()
    assert not any((group / folder_of(number).name).exists() for group in cgroups.own_groups())
    devices = subprocess.run(["losetup", "--list"], capture_output=True, text=True, check=True, timeout=10).stdout
    assert str(folder_of(number)) not in devices
