"""A real API server that calls the webhook: pods are created with kubectl, and what is stored is looked at."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from polarkv_operator.webhooks.settings import WebhookSettings
from tests.cluster.support.api_server import ApiServer
from tests.cluster.support.kubectl import Kubectl, KubectlError
from tests.operator.support.inference_pods import command_line, container, environment, pod, status
from tests.operator.support.webhooks import Running, cluster, running, settings_for_tests
from tests.support.ports import reserved_ports
from tests.support.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
NAMESPACE = "injection"
CONFIGURATION = "injection-under-test"
RESTRICTED = {
    "allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}, "runAsNonRoot": True,
    "seccompProfile": {"type": "RuntimeDefault"},
}  # fmt: skip

pytestmark = pytest.mark.timeout(180)


def configuration(port: int) -> dict[str, Any]:
    """As the chart has it, called by URL. The webhook itself publishes whom to trust."""
    return {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "MutatingWebhookConfiguration",
        "metadata": {"name": CONFIGURATION},
        "webhooks": [
            {
                "name": "inject.polarkv.io",
                "failurePolicy": "Ignore",
                "timeoutSeconds": 5,
                "reinvocationPolicy": "IfNeeded",
                "sideEffects": "NoneOnDryRun",
                "admissionReviewVersions": ["v1"],
                "clientConfig": {"url": f"https://localhost:{port}/mutate"},
                "objectSelector": {"matchExpressions": [{"key": "polarkv.io/inject", "operator": "Exists"}]},
                "rules": [
                    {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"],
                     "scope": "Namespaced"}
                ],
            }
        ],
    }  # fmt: skip


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """The webhook's, which each test starts again."""
    with reserved_ports(1) as (port,):
        yield port


@pytest.fixture(scope="module")
def prepared(api_server_process: ApiServer, port: int) -> Iterator[tuple[Kubectl, WebhookSettings]]:
    kubectl = Kubectl(api_server_process.kubeconfig, NAMESPACE)
    kubectl.run("apply", "--server-side", "-f", str(ROOT / "crds" / "polarkv.io_polarkvclusters.yaml"))
    kubectl.run("wait", "--for=condition=Established", "crd/polarkvclusters.polarkv.io", "--timeout=30s")
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    kubectl.apply(
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE, "labels": labels}},
        configuration(port),
    )
    body = cluster(namespace=NAMESPACE)
    kubectl.apply(body)
    settings = settings_for_tests(
        port=port, namespace=NAMESPACE, configuration=CONFIGURATION, kubeconfig=api_server_process.kubeconfig
    )
    try:
        yield kubectl, settings
    finally:
        kubectl.delete("mutatingwebhookconfiguration", CONFIGURATION)


@pytest.fixture
def webhook(prepared: tuple[Kubectl, WebhookSettings]) -> Iterator[Running]:
    with running(prepared[1]) as one:
        wait_until(lambda: one.health("/readyz").status_code == 200, "a certificate that the API server trusts", 30)
        yield one


@pytest.fixture
def kubectl(prepared: tuple[Kubectl, WebhookSettings]) -> Iterator[Kubectl]:
    yield prepared[0]
    prepared[0].run("delete", "pods", "--all", "--force", "--grace-period=0")


def restricted(name: str, *command: str, annotations: dict[str, str] | None = None, **spec: Any) -> dict[str, Any]:
    """A pod that a namespace of the Pod Security Standard "restricted" takes."""
    document = pod(container(*command, securityContext=RESTRICTED), annotations=annotations, **spec)
    document["metadata"] |= {"name": name, "namespace": NAMESPACE}
    return document


def create(kubectl: Kubectl, document: dict[str, Any], *arguments: str) -> dict[str, Any]:
    shown = kubectl.run("create", "-f", "-", "-o", "json", *arguments, stdin=json.dumps(document))
    stored: dict[str, Any] = json.loads(shown)
    return stored


def admitted(kubectl: Kubectl, document: dict[str, Any]) -> dict[str, Any]:
    """Create a pod until the API server has heard of the webhook's authority, and has called it."""

    def once() -> dict[str, Any] | None:
        stored = create(kubectl, document)
        if "polarkv.io/injection" in stored["metadata"].get("annotations", {}):
            return stored
        kubectl.delete("pod", document["metadata"]["name"], "--force", "--grace-period=0")
        return None

    return wait_until(once, "a pod that the webhook saw", 30, 0.2)


@pytest.mark.usefixtures("webhook")
def test_pods_are_stored_injected_and_stay_within_the_strictest_standard(kubectl: Kubectl) -> None:
    vllm = admitted(kubectl, restricted("vllm", "vllm", "serve", "m"))
    assert status(vllm) == "injected: container=server engine=vllm argument=polarkv"
    assert command_line(vllm)[:4] == ["vllm", "serve", "m", "--kv-transfer-config"]
    assert environment(vllm)["POLARKV_ENDPOINT"] == f"tcp://kv-manager.{NAMESPACE}.svc:7700"
    assert [one["name"] for one in vllm["spec"]["initContainers"]] == ["polarkv-client"]
    sglang = admitted(kubectl, restricted("sglang", "sh", "-c", "python3 -m sglang.launch_server --model-path m"))
    assert "--hicache-storage-backend dynamic" in command_line(sglang)[2]
    # Copied from the API server and created again, as people do: as it was, once.
    again = {**vllm, "metadata": {key: vllm["metadata"][key] for key in ("labels", "annotations", "namespace")}}
    again["metadata"]["name"] = "copy"
    del again["status"]
    assert create(kubectl, again)["spec"] == vllm["spec"]


@pytest.mark.usefixtures("webhook")
def test_a_guaranteed_pod_stays_guaranteed(kubectl: Kubectl) -> None:
    document = restricted("guaranteed", "vllm", "serve", "m")
    amount = {"cpu": "2", "memory": "4Gi"}
    document["spec"]["containers"][0]["resources"] = {"requests": amount, "limits": amount}
    assert admitted(kubectl, document)["status"]["qosClass"] == "Guaranteed"


@pytest.mark.usefixtures("webhook")
def test_a_skipped_pod_says_why_in_an_annotation_and_an_event(kubectl: Kubectl) -> None:
    stored = admitted(kubectl, restricted("sleeper", "sleep", "infinity"))
    assert status(stored).startswith("skipped: EngineNotFound: ")
    assert "initContainers" not in stored["spec"]

    def described() -> str | None:
        shown = kubectl.run("describe", "pod", "sleeper")
        return shown if "InjectionSkipped" in shown else None

    assert "EngineNotFound" in wait_until(described, "the Event in kubectl describe", 30, 0.3)
    other = restricted("lost", "vllm", "serve", "m")
    other["metadata"]["labels"]["polarkv.io/inject"] = "nowhere"
    assert status(admitted(kubectl, other)).startswith("skipped: ClusterNotFound: there is no PolarKVCluster 'nowhere'")


@pytest.mark.usefixtures("webhook")
def test_a_dry_run_shows_what_would_be_and_leaves_nothing(kubectl: Kubectl) -> None:
    admitted(kubectl, restricted("before", "vllm", "serve", "m"))
    shown = create(kubectl, restricted("dry", "vllm", "serve", "m"), "--dry-run=server")
    assert status(shown).startswith("injected: ")
    with pytest.raises(KubectlError, match="not found"):
        kubectl.get("pod", "dry")


def test_with_the_webhook_down_pods_are_created_as_they_are(kubectl: Kubectl) -> None:
    stored = create(kubectl, restricted("alone", "vllm", "serve", "m"))
    assert "annotations" not in stored["metadata"]
    assert command_line(stored) == ["vllm", "serve", "m"]


def test_a_replica_that_starts_later_shows_the_same_certificate(
    kubectl: Kubectl, prepared: tuple[Kubectl, WebhookSettings], webhook: Running
) -> None:
    admitted(kubectl, restricted("first", "vllm", "serve", "m"))
    before = kubectl.get("secret", "polarkv-webhook-tls")
    second = prepared[1].model_copy(update={"port": 0})
    with running(second) as other:
        wait_until(lambda: other.health("/readyz").status_code == 200, "a certificate", 30)
        assert kubectl.get("secret", "polarkv-webhook-tls")["metadata"] == before["metadata"]
