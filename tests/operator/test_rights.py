"""The rights of operator and webhook: what a real API server lets them do, against what they were seen to do.

Both run as the chart's service accounts, with its roles; the audit log says which rights a busy life took.
"""

from __future__ import annotations

import base64
import contextlib
import copy
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from polarkv_operator.clients.kube import Kind, Object, kind_of
from polarkv_operator.rbac import Holder
from polarkv_operator.reconcile.observe import POD_MONITOR
from polarkv_operator.resources.render import KEPT_KINDS, KINDS
from polarkv_operator.webhooks.certificates import AUTHORITY_KEY
from polarkv_operator.webhooks.keeper import SECRET
from tests.cluster.support.api_server import ApiServer
from tests.operator.support.chart import rendered, table
from tests.operator.support.inference_pods import container, pod
from tests.operator.support.playground import EVENT, IMAGE, Playground, eventually
from tests.operator.support.webhooks import review, running, settings_for_tests
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(240)
CRD = Kind("apiextensions.k8s.io/v1", "CustomResourceDefinition")
# Asked by an admission plugin (OwnerReferencesPermissionEnforcement, as OpenShift has it), not by a call.
UNSEEN = {("operator", "polarkv.io", "polarkvclusters/finalizers", "update")}
_SERVERS_OWN = ("uid", "resourceVersion", "creationTimestamp", "generation", "managedFields", "annotations")


def calls(server: ApiServer, namespace: str, *, refused: bool = False) -> set[tuple[str, str, str, str]]:
    """What the two service accounts of a namespace asked for, from the audit log."""
    found = set()
    for line in server.audit_log.read_text(encoding="utf-8").splitlines():
        event = json.loads(line)
        user, what = event["user"]["username"], event.get("objectRef") or {}
        code = event.get("responseStatus", {}).get("code", 0)
        if not user.startswith(f"system:serviceaccount:{namespace}:") or "resource" not in what:
            continue
        if (code == 403) is not refused:
            continue
        holder = user.rpartition("-")[2]
        resource = "/".join(filter(None, (what["resource"], what.get("subresource"))))
        verbs = {event["verb"], "create"} if (event["verb"], code) == ("patch", 201) else {event["verb"]}
        found |= {(holder, what.get("apiGroup", ""), resource, verb) for verb in verbs}
    return found


def account(server: ApiServer, namespace: str, holder: Holder) -> Path:
    """The kubeconfig of one of the chart's service accounts."""
    groups = ("system:serviceaccounts", f"system:serviceaccounts:{namespace}")
    return server.kubeconfig_of(f"system:serviceaccount:{namespace}:polarkv-{holder}", *groups)


@contextlib.contextmanager
def installed(playground: Playground, watched: str) -> Iterator[None]:
    """A namespace with the chart's roles, the webhook's configuration, and the kind that PodMonitors are of."""
    parts = ("Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding", "MutatingWebhookConfiguration")
    monitors = {
        "apiVersion": CRD.api_version,
        "kind": CRD.name,
        "metadata": {"name": "podmonitors.monitoring.coreos.com"},
        "spec": {
            "group": "monitoring.coreos.com", "scope": "Namespaced",
            "names": {"kind": "PodMonitor", "plural": "podmonitors"},
            "versions": [{
                "name": "v1", "served": True, "storage": True,
                "schema": {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}},
            }],
        },
    }  # fmt: skip
    values = {"watchNamespace": watched} if watched else {}
    objects = [each for each in rendered(values, namespace=playground.namespace) if each["kind"] in parts]
    made = [playground.api.create(each) for each in (monitors, *objects)]
    try:
        eventually(lambda: playground.api.find(POD_MONITOR, playground.namespace) == [], "PodMonitors to be served")
        yield
    finally:
        for each in reversed(made):
            meta = each["metadata"]
            playground.api.delete(kind_of(each), meta.get("namespace"), meta["name"], meta["uid"])


def outlived(child: Object) -> Object:
    """As an earlier version of the operator might have made it beside this version's."""
    copied = copy.deepcopy(child)
    copied["metadata"] = {name: value for name, value in child["metadata"].items() if name not in _SERVERS_OWN}
    copied["metadata"]["name"] += "-former"
    copied.pop("status", None)
    if "replicas" in copied.get("spec", {}):
        copied["spec"]["replicas"] = 0
    if child["kind"] == "Service":
        copied["spec"] = {"ports": child["spec"]["ports"], "clusterIP": "None"}
    return copied


@contextlib.contextmanager
def whole_operator(kubeconfig: Path, namespace: str, watched: str, log: Path) -> Iterator[None]:
    """The process that the chart starts, kopf and all; it waits for its turn to lead."""
    environment = {
        **os.environ, "KUBECONFIG": str(kubeconfig), "POLARKV_OPERATOR_IMAGE": IMAGE,
        "POLARKV_OPERATOR_NAMESPACE": namespace, "POLARKV_OPERATOR_HEALTH_PORT": "0",
        "POLARKV_OPERATOR_WATCH_NAMESPACE": watched,
    }  # fmt: skip
    command = [sys.executable, "-m", "polarkv_client.cli.main", "operator"]
    with log.open("w") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        try:
            yield
        finally:
            process.send_signal(signal.SIGTERM)
            code = process.wait(40)
    assert code == 0, log.read_text()


def live_as_operator(playground: Playground) -> None:
    """Create, heal, clear away, roll, with everything that a cluster may consist of."""
    playground.operate()
    playground.control()
    playground.cluster(cacheNodes={"replicas": 1})
    playground.wait_settled()
    children = playground.children()
    monitors = playground.api.find(POD_MONITOR, playground.namespace)
    children |= {(POD_MONITOR.name, each["metadata"]["name"]): each for each in monitors}
    first = {kind: child for (kind, _), child in sorted(children.items(), reverse=True) if kind not in KEPT_KINDS}
    assert len(first) == len(KINDS) - len(KEPT_KINDS)
    former = [playground.api.create({**outlived(child), "apiVersion": child["apiVersion"]}) for child in first.values()]
    for each in former:
        kind, name = kind_of(each), each["metadata"]["name"]
        eventually(
            lambda kind=kind, name=name: playground.api.get(kind, playground.namespace, name) is None,  # type: ignore[misc]
            f"{kind.name} {name} to be cleared away", 60,
        )  # fmt: skip
    playground.change(monitoring={"logLevel": "Debug"})
    playground.wait_event("Replacing", "demo-cache-0")
    playground.wait_settled(timeout_s=60)


def live_as_webhook(playground: Playground, kubeconfig: Path) -> None:
    """Make a certificate, make it anew, decide about a pod, say so."""
    namespace = playground.namespace
    settings = settings_for_tests(
        namespace=namespace, kubeconfig=kubeconfig, secret="polarkv-webhook-tls",
        configuration=f"{namespace}-polarkv-webhook",
    )  # fmt: skip
    with running(settings) as webhook:
        wait_until(lambda: webhook.health("/readyz").status_code == 200, "a certificate", 30)
        secret = playground.api.get(SECRET, namespace, settings.secret)
        assert secret is not None
        damaged = base64.b64encode(b"damaged").decode()
        playground.edit(SECRET, settings.secret, {"data": dict.fromkeys(secret["data"], damaged)})

        def whole() -> str | None:
            found = playground.api.get(SECRET, namespace, settings.secret)
            bundle = found["data"][AUTHORITY_KEY] if found else damaged
            return None if bundle == damaged else str(bundle)

        bundle = wait_until(whole, "a new certificate", 30)
        skipped = pod(container("sleep", "1"))
        skipped["metadata"] |= {"name": "left-alone", "namespace": namespace, "labels": {"polarkv.io/inject": "demo"}}
        playground.api.create(skipped)

        def answered() -> bool:
            with webhook.trusting(base64.b64decode(bundle)) as http, contextlib.suppress(httpx.ConnectError):
                return http.post("/mutate", json=review(skipped, namespace=namespace)).status_code == 200
            return False  # the former one is shown still

        wait_until(answered, "an answer under the new certificate", 30)
        about = "left-alone"
        eventually(
            lambda: any(
                each["involvedObject"].get("uid") and each["involvedObject"]["name"] == about
                for each in playground.api.find(EVENT, namespace)
            ), "the Event of a pod that was left alone, tied to it", 30,
        )  # fmt: skip


@pytest.mark.parametrize("clusterwide", [False, True], ids=["one-namespace", "all-namespaces"])
def test_every_right_is_used_and_none_is_missing(
    playground: Playground, api_server_process: ApiServer, tmp_path: Path, clusterwide: bool
) -> None:
    administrator, namespace = playground.kubeconfig, playground.namespace
    watched = "" if clusterwide else namespace
    rights = table(clusterwide=clusterwide)

    def unused() -> set[tuple[str, str, str, str]]:
        return rights - calls(api_server_process, namespace) - UNSEEN

    with installed(playground, watched):
        playground.kubeconfig = account(api_server_process, namespace, Holder.OPERATOR)
        with whole_operator(playground.kubeconfig, namespace, watched, tmp_path / "log"):
            live_as_operator(playground)
            live_as_webhook(playground, account(api_server_process, namespace, Holder.WEBHOOK))
            with contextlib.suppress(TimeoutError):  # the comparison below says what is missing
                wait_until(lambda: not unused(), "kopf to be under way", 30, 0.5)
        playground.kubeconfig = administrator
    assert unused() == set(), "rights that nobody uses"
    assert calls(api_server_process, namespace) <= rights, "calls by other rights than those of the table"
    assert calls(api_server_process, namespace, refused=True) == set()
