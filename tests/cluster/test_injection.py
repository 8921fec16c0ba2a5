"""Injection on a whole cluster: the chart's webhook, real admission, and pods like the engines' that run.

The engines are stand-ins, as the real ones are too large: they take their arguments and import the client as the real
ones do, in an image that is not ours, within the Pod Security Standard "restricted".
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helm_python import Config

from tests.cluster.support import images
from tests.cluster.support.kubectl import Kubectl
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(900)
ROOT = Path(__file__).parents[2]
NAMESPACE = "polarkv-system"  # as every test that installs the chart: the CRD stays, and belongs to one release
TOKEN = "a-token-of-the-tests"
Object = dict[str, Any]

ENGINE = """
import json, os, sys
import polarkv_client, polarkv_client.client, pydantic
from polarkv_client.config import load_config

config = load_config()
print(json.dumps({
    "arguments": sys.argv[1:],
    "endpoint": config.endpoint,
    "has_token": config.token.get_secret_value() == os.environ["EXPECTED_TOKEN"],
    "client_name": config.client_name,
    "client": polarkv_client.__file__,
    "pydantic": pydantic.__file__,
    "user": os.getuid(),
}))
"""
# Where each module of a stand-in lies in the ConfigMap's volume.
MODULES = {
    "vllm/__init__.py": "empty",
    "vllm/entrypoints/__init__.py": "empty",
    "vllm/entrypoints/openai/__init__.py": "empty",
    "vllm/entrypoints/openai/api_server.py": "engine",
    "sglang/__init__.py": "empty",
    "sglang/launch_server.py": "engine",
}
RESTRICTED = {
    "allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}, "runAsNonRoot": True, "runAsUser": 1000,
    "seccompProfile": {"type": "RuntimeDefault"}, "readOnlyRootFilesystem": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def release(kubeconfig: Path) -> Iterator[Kubectl]:
    """Install the chart for its webhook; yield kubectl in the release's namespace."""
    repository, _, tag = images.PROJECT_IMAGE.rpartition(":")
    values = {
        "image": {"repository": repository, "tag": tag},
        "webhook": {"resources": {"requests": {"cpu": "20m"}}},
        "operator": {"replicas": 0},
    }
    kubectl = Kubectl(kubeconfig, NAMESPACE)
    with Config(kubeconfig_path=kubeconfig, namespace=NAMESPACE) as helm:
        helm.install(str(ROOT / "charts" / "polarkv"), "polarkv", values, namespace=NAMESPACE, create_namespace=True)
        try:
            kubectl.run("rollout", "status", "deployment/polarkv-webhook", "--timeout=150s")
            yield kubectl
        finally:
            helm.uninstall("polarkv")


@pytest.fixture
def pods(release: Kubectl, kubectl: Kubectl) -> Kubectl:
    """Return kubectl in a restricted namespace with a cluster's object and Secret, and the stand-ins' code."""
    kubectl.run("label", "namespace", kubectl.namespace, "pod-security.kubernetes.io/enforce=restricted")
    spec = {"cacheNodes": {"memory": {"size": "64Mi"}, "storage": {"volumeSize": "384Mi"}}}
    token = base64.b64encode(TOKEN.encode()).decode()
    kubectl.apply(
        {"apiVersion": "polarkv.io/v1alpha1", "kind": "PolarKVCluster", "metadata": {"name": "kv"}, "spec": spec},
        {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "kv-client"}, "data": {"default": token}},
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "code"},
            "data": {"engine": ENGINE, "empty": ""},
        },
    )
    return kubectl


def engine(name: str, *command: str) -> Object:
    """A pod with a stand-in for an engine, which asks for injection."""
    items = [{"key": key, "path": path} for path, key in MODULES.items()]
    container = {
        "name": "server",
        "image": images.base_image(),
        "imagePullPolicy": "IfNotPresent",
        "command": list(command),
        "env": [{"name": "PYTHONPATH", "value": "/engine"}, {"name": "EXPECTED_TOKEN", "value": TOKEN}],
        "securityContext": RESTRICTED,
        "volumeMounts": [{"name": "code", "mountPath": "/engine", "readOnly": True}],
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"polarkv.io/inject": "kv"}},
        "spec": {
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "containers": [container],
            "volumes": [{"name": "code", "configMap": {"name": "code", "items": items}}],
        },
    }


def told(kubectl: Kubectl, document: Object) -> Object:
    """Run a pod to its end; return what its engine printed."""
    name = document["metadata"]["name"]
    kubectl.apply(document)

    def ended() -> str | None:
        phase: str = kubectl.get("pod", name)["status"]["phase"]
        return phase if phase in {"Succeeded", "Failed"} else None

    phase = wait_until(ended, f"pod {name} to end", 150, 0.3)
    said = kubectl.run("logs", name, "-c", "server")
    assert phase == "Succeeded", said + kubectl.run("describe", "pod", name)
    answer: Object = json.loads(said.splitlines()[-1])
    return answer


COMMANDS = {
    "vllm": ["python3", "-m", "vllm.entrypoints.openai.api_server", "--model", "m"],
    "sglang": ["python3", "-m", "sglang.launch_server", "--model-path", "m"],
    "script": ["sh", "-c", "export HF_HUB_OFFLINE=1\nexec python3 -m vllm.entrypoints.openai.api_server --model m\n"],
}


@pytest.mark.parametrize("kind", COMMANDS)
def test_an_engine_runs_with_the_client_library(pods: Kubectl, kind: str) -> None:
    answer = told(pods, engine(kind, *COMMANDS[kind]))
    assert answer["endpoint"] == f"tcp://kv-manager.{pods.namespace}.svc:7700"
    assert answer["has_token"] and answer["client_name"] == kind and answer["user"] == 1000
    assert answer["client"].startswith("/polarkv-client/python/")
    assert answer["pydantic"].startswith("/polarkv-client/libraries/common/")
    arguments = answer["arguments"]
    if kind == "sglang":
        assert arguments[2:5] == ["--enable-hierarchical-cache", "--hicache-storage-backend", "dynamic"]
        extra = arguments[arguments.index("--hicache-storage-backend-extra-config") + 1]
        assert json.loads(extra)["class_name"] == "PolarKVStorage"
    else:
        assert arguments[:3] == ["--model", "m", "--kv-transfer-config"]
        assert json.loads(arguments[-1])["kv_load_failure_policy"] == "recompute"


def test_a_deployment_that_is_skipped_says_why(pods: Kubectl) -> None:
    template = engine("sleeper", "python3", "-c", "import time; time.sleep(3600)")
    template["metadata"] = {"labels": {"polarkv.io/inject": "kv", "app": "sleeper"}}
    template["spec"]["restartPolicy"] = "Always"
    selector = {"matchLabels": {"app": "sleeper"}}
    spec = {"replicas": 1, "selector": selector, "template": {key: template[key] for key in ("metadata", "spec")}}
    pods.apply({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "sleeper"}, "spec": spec})
    pods.run("rollout", "status", "deployment/sleeper", "--timeout=150s")
    (pod,) = pods.list("pods", "app=sleeper")
    assert pod["metadata"]["annotations"]["polarkv.io/injection"].startswith("skipped: EngineNotFound: ")

    def event() -> Object | None:
        return next((each for each in pods.list("events") if each["reason"] == "InjectionSkipped"), None)

    found = wait_until(event, "the Event", 30, 0.3)
    assert found["involvedObject"]["kind"] == "ReplicaSet" and "EngineNotFound" in found["message"]


def test_both_replicas_agree_and_pods_start_without_them(release: Kubectl, pods: Kubectl) -> None:
    webhooks = release.list("pods", "app.kubernetes.io/component=webhook")
    assert len(webhooks) == 2
    assert all(each["status"]["containerStatuses"][0]["restartCount"] == 0 for each in webhooks)
    secret = release.get("secret", "polarkv-webhook-tls")
    configuration = release.get("mutatingwebhookconfiguration", f"{NAMESPACE}-polarkv-webhook")
    assert configuration["webhooks"][0]["clientConfig"]["caBundle"] == secret["data"]["ca.crt"]
    release.run("scale", "deployment/polarkv-webhook", "--replicas=0")
    release.run("wait", "--for=delete", "pods", "-l", "app.kubernetes.io/component=webhook", "--timeout=150s")
    try:
        alone = engine("alone", "python3", "-c", "print('started')")
        pods.apply(alone)
        assert "annotations" not in pods.get("pod", "alone")["metadata"]
    finally:
        release.run("scale", "deployment/polarkv-webhook", "--replicas=2")
        release.run("rollout", "status", "deployment/polarkv-webhook", "--timeout=150s")
