"""The pods that the operator would make, made by hand: images, settings, volumes and addresses are right in pods."""

from __future__ import annotations

import json
import secrets as chance
from pathlib import Path
from typing import Any

import pytest

from polarkv_operator.api import parse
from polarkv_operator.resources import names, render, secrets
from polarkv_operator.resources.common import Release
from tests.cluster.support import images
from tests.cluster.support.kubectl import Kubectl

pytestmark = pytest.mark.timeout(900)

CLIENT = Path(__file__).parent / "support" / "cache_client.py"
CHUNKS, CHUNK_BYTES, BATCH = 320, 1 << 20, 16
NODES = 2


def body(namespace: str) -> dict[str, Any]:
    """Two cache nodes with a third of the memory that the client stores, and requests that fit a small machine."""
    small = {"requests": {"cpu": "50m"}}
    return {
        "apiVersion": "polarkv.io/v1alpha1",
        "kind": "PolarKVCluster",
        "metadata": {"name": "demo", "namespace": namespace},
        "spec": {
            "manager": {"resources": small, "metadataStore": {"type": "SQLite", "volumeSize": "64Mi"}},
            "cache": {"maxKeys": 10000},
            "cacheNodes": {
                "replicas": NODES,
                "memory": {"size": "64Mi"},
                "storage": {"layout": "JBOD", "volumesPerNode": 1, "volumeSize": "512Mi"},
                "transport": {"mode": "TCP"},
                "resources": {"slab": small, "disk": small},
            },
        },
    }


def client_pod(name: str, cluster: str, tenant: str) -> dict[str, Any]:
    """A pod of an application: the client library, the endpoint and a token, no rights at all."""
    token = {"secretKeyRef": {"name": f"{cluster}-client", "key": tenant}}
    container = {
        "name": "main",
        "image": images.PROJECT_IMAGE,
        "command": ["python3", "-c", CLIENT.read_text(encoding="utf-8"), *map(str, (CHUNKS, CHUNK_BYTES, BATCH))],
        "env": [{"name": "POLARKV_TOKEN", "valueFrom": token}],
        "envFrom": [{"configMapRef": {"name": f"{cluster}-connection"}}],
        "securityContext": {
            "readOnlyRootFilesystem": True,
            "runAsNonRoot": True,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        },
    }
    spec = {"restartPolicy": "Never", "automountServiceAccountToken": False, "containers": [container]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}


def test_a_client_pod_stores_and_loads_through_pods(kubectl: Kubectl) -> None:
    cluster = parse(body(kubectl.namespace))
    contents = secrets.complete(cluster, {}, lambda: chance.token_urlsafe(32))
    kubectl.apply(*render.children(cluster, Release(images.PROJECT_IMAGE), contents, NODES))
    kubectl.run("rollout", "status", f"deployment/{names.manager(cluster)}", "--timeout=150s")
    ready = f"--for=jsonpath={{.status.readyReplicas}}={NODES}"
    kubectl.run("wait", ready, f"statefulset/{names.cache(cluster)}", "--timeout=150s")
    kubectl.apply(client_pod("client", cluster.name, cluster.spec.security.tenants[0].name))
    kubectl.run("wait", "--for=jsonpath={.status.phase}=Succeeded", "pod/client", "--timeout=150s")
    found = json.loads(kubectl.run("logs", "client"))
    print(found)
    assert found["wrong"] == 0
    assert found["stored"] == CHUNKS
    assert found["hits"] >= CHUNKS * 0.98
    assert found["memory"] > 0 and found["disk"] > 0
    assert found["transports"] == ["tcp"]
    restarts = [
        status["restartCount"] for pod in kubectl.list("pod") for status in pod["status"].get("containerStatuses", ())
    ]
    assert not any(restarts)
