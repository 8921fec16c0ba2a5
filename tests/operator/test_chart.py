"""The Helm chart: what each value changes, what the schema refuses, and an upgrade before a real API server."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from helm_python import Chart, Config, HelmError, lint

from polarkv_dataplane.manager.shell import metrics
from polarkv_operator import rbac
from polarkv_operator.api.schema import custom_resource_definition
from tests.cluster.support import api_server as api_servers
from tests.cluster.support.kubectl import Kubectl
from tests.operator.support import golden
from tests.operator.support.chart import CHART, NAMESPACE, rendered, table

PREVIOUS = Path(__file__).parent / "fixtures" / "polarkv-0.1.0.tgz"
Object = dict[str, Any]


def one(kind: str, name: str, values: Mapping[str, Any] | None = None) -> Object:
    return next(each for each in rendered(values) if (each["kind"], each["metadata"]["name"]) == (kind, name))


def container(name: str, values: Mapping[str, Any] | None = None) -> Object:
    found: Object = one("Deployment", f"polarkv-{name}", values)["spec"]["template"]["spec"]["containers"][0]
    return found


def environment(name: str, values: Mapping[str, Any] | None = None) -> dict[str, str]:
    return {each["name"]: each["value"] for each in container(name, values)["env"]}


def kinds(values: Mapping[str, Any] | None = None) -> set[str]:
    return {each["kind"] for each in rendered(values)}


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"webhook": {"certManager": {"enabled": True}}, "dashboards": {"enabled": True}, "watchNamespace": "inference"},
    ],
)
def test_lint_finds_nothing(values: Object) -> None:
    report = lint(CHART, values, strict=True, namespace=NAMESPACE)
    assert [message for message in report["messages"] if message["severity"] > 1] == []
    assert report["errors"] == []


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"operator": {"replicas": "two"}}, "replicas"),
        ({"webhook": {"replica": 3}}, "replica"),
        ({"image": {"pullPolicy": "Sometimes"}}, "pullPolicy"),
        ({"watchNamespace": "Not_One"}, "watchNamespace"),
        ({"colour": "blue"}, "colour"),
        ({"webhook": {"timeoutSeconds": 31}}, "timeoutSeconds"),
        ({"dashboards": {"labels": {"a": 1}}}, "labels"),
    ],
)
def test_wrong_values_are_refused_by_their_name(values: Object, field: str) -> None:
    with Chart.load(CHART) as chart, pytest.raises(HelmError, match=field):
        chart.validate_schema(chart.merge_values(values))


def test_names_that_yaml_takes_for_other_than_text_stay_text() -> None:
    """Releases and namespaces may be named by digits alone; a label or namespace that is a number is refused."""

    def texts(value: Any, below: str) -> Iterator[object]:
        for key, child in value.items() if isinstance(value, dict) else enumerate(value):
            if key == "namespace" or below.lower().endswith("labels"):
                yield child
            if isinstance(child, dict | list):
                yield from texts(child, str(key))

    values = {
        "name": "on",
        "watchNamespace": "007",
        "dashboards": {"enabled": True},
        "webhook": {"certManager": {"enabled": True}},
    }
    found = [each for made in rendered(values, name="123", namespace="4567") for each in texts(made, "")
             if made["kind"] != "CustomResourceDefinition"]  # fmt: skip
    assert {"on", "007", "123", "4567"} <= set(found)
    assert [each for each in found if not isinstance(each, str)] == []


def test_a_list_that_is_set_to_null_is_empty() -> None:
    configuration = next(each for each in rendered({"webhook": {"excludedNamespaces": None}})
                         if each["kind"] == "MutatingWebhookConfiguration")  # fmt: skip
    assert configuration["webhooks"][0]["namespaceSelector"]["matchExpressions"][0]["values"] == [NAMESPACE]


def test_every_value_is_in_the_schema() -> None:
    def check(values: Object, schema: Object, place: str) -> None:
        for name, value in values.items():
            assert name in schema["properties"], f"{place}.{name}"
            child = schema["properties"][name]
            if isinstance(value, dict) and isinstance(child, dict) and "properties" in child:
                check(value, child, f"{place}.{name}")

    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    check(yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8")), schema, "values")


def test_the_crd_is_the_operators_and_outlives_the_release() -> None:
    wanted = custom_resource_definition()
    found = one("CustomResourceDefinition", wanted["metadata"]["name"])
    assert found["metadata"].pop("annotations") == {"helm.sh/resource-policy": "keep"}
    assert found == wanted
    assert "CustomResourceDefinition" not in kinds({"crds": {"install": False}})


def granted(roles: list[Object]) -> set[tuple[str, str, str, str]]:
    """(holder, group, resource, verb) of roles that are bound."""
    found = set()
    for role in roles:
        for rule in role["rules"]:
            for group, resource, verb in (
                (g, r, v) for g in rule["apiGroups"] for r in rule["resources"] for v in rule["verbs"]
            ):
                holder = "webhook" if "-webhook-" in role["metadata"]["name"] else "operator"
                found.add((holder, group, resource, verb))
    return found


@pytest.mark.parametrize("values", [{}, {"watchNamespace": "inference"}])
def test_roles_are_those_of_the_table(values: Object) -> None:
    objects = rendered(values)
    roles = [each for each in objects if each["kind"] in ("Role", "ClusterRole")]
    assert granted(roles) == table(clusterwide=not values)
    bindings = {
        (each["roleRef"]["kind"], each["roleRef"]["name"], each["metadata"].get("namespace"))
        for each in objects if each["kind"].endswith("Binding")
    }  # fmt: skip
    assert bindings == {(role["kind"], role["metadata"]["name"], role["metadata"].get("namespace")) for role in roles}


def test_one_namespace_needs_rights_in_one_namespace() -> None:
    roles = [each for each in rendered({"watchNamespace": "inference"}) if each["kind"] == "ClusterRole"]
    resources = {resource for role in roles for rule in role["rules"] for resource in rule["resources"]}
    assert resources == {"mutatingwebhookconfigurations"}
    assert environment("operator", {"watchNamespace": "inference"})["POLARKV_OPERATOR_WATCH_NAMESPACE"] == "inference"


def test_no_verb_is_a_star() -> None:
    assert not any("*" in (*right.verbs, *right.resources, right.group) for right in rbac.RIGHTS)


def test_one_image_serves_all() -> None:
    values = {"image": {"repository": "registry.example.com/kv", "tag": "7", "pullSecrets": [{"name": "s"}]}}
    for name, variable in (("operator", "POLARKV_OPERATOR_IMAGE"), ("webhook", "POLARKV_WEBHOOK_IMAGE")):
        assert container(name, values)["image"] == environment(name, values)[variable] == "registry.example.com/kv:7"
        pod = one("Deployment", f"polarkv-{name}", values)["spec"]["template"]["spec"]
        assert pod["imagePullSecrets"] == [{"name": "s"}]
    version = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))["appVersion"]
    assert container("operator")["image"] == f"polarkv:{version}"


@pytest.mark.parametrize("name", ["operator", "webhook"])
def test_workloads_take_their_values_and_have_no_rights_on_the_machine(name: str) -> None:
    own = {
        "replicas": 3, "nodeSelector": {"a": "b"}, "tolerations": [{"operator": "Exists"}],
        "podAnnotations": {"c": "d"},
        "affinity": {"nodeAffinity": {}}, "resources": {"limits": {"memory": "1Gi"}},
    }  # fmt: skip
    deployment = one("Deployment", f"polarkv-{name}", {name: own})
    template = deployment["spec"]["template"]
    assert deployment["spec"]["replicas"] == 3
    assert template["metadata"]["annotations"] == {"c": "d"}
    assert {key: template["spec"][key] for key in ("nodeSelector", "tolerations", "affinity")} == {
        key: own[key] for key in ("nodeSelector", "tolerations", "affinity")
    }
    assert template["spec"]["containers"][0]["resources"]["limits"]["memory"] == "1Gi"
    assert template["spec"]["securityContext"]["runAsNonRoot"] is True
    assert template["spec"]["containers"][0]["securityContext"] == {
        "allowPrivilegeEscalation": False, "privileged": False, "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }  # fmt: skip


def test_the_operator_is_told_what_the_values_say() -> None:
    values = {"operator": {"workers": 9, "resyncSeconds": 30, "logLevel": "DEBUG"}}
    told = environment("operator", values)
    assert (told["POLARKV_OPERATOR_WORKERS"], told["POLARKV_OPERATOR_RESYNC_SECONDS"]) == ("9", "30")
    assert (told["POLARKV_LOG_LEVEL"], told["POLARKV_OPERATOR_NAMESPACE"]) == ("DEBUG", NAMESPACE)


def test_injection_can_never_hold_up_a_pod() -> None:
    (webhook,) = one("MutatingWebhookConfiguration", f"{NAMESPACE}-polarkv-webhook")["webhooks"]
    assert (webhook["failurePolicy"], webhook["timeoutSeconds"]) == ("Ignore", 5)
    assert webhook["reinvocationPolicy"] == "IfNeeded"
    assert webhook["objectSelector"] == {"matchExpressions": [{"key": "polarkv.io/inject", "operator": "Exists"}]}
    (excluded,) = webhook["namespaceSelector"]["matchExpressions"]
    assert {"kube-system", NAMESPACE} <= set(excluded["values"])
    service = one("Service", "polarkv-webhook")
    assert webhook["clientConfig"]["service"]["name"] == service["metadata"]["name"]
    pod = one("Deployment", "polarkv-webhook")["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= pod.items()
    assert one("PodDisruptionBudget", "polarkv-webhook")["spec"]["maxUnavailable"] == 1


def test_without_the_webhook_nothing_of_it_is_there() -> None:
    names = [each["metadata"]["name"] for each in rendered({"webhook": {"enabled": False}})]
    assert [name for name in names if "webhook" in name] == []


def test_cert_manager_is_used_when_asked() -> None:
    assert not kinds() & {"Certificate", "Issuer"}
    values = {"webhook": {"certManager": {"enabled": True}}}
    certificate = one("Certificate", "polarkv-webhook", values)["spec"]
    assert certificate["issuerRef"] == {"kind": "Issuer", "name": "polarkv-webhook"}
    told = environment("webhook", values)
    assert told["POLARKV_WEBHOOK_CONFIGURATION"] == ""
    mounts = container("webhook", values)["volumeMounts"]
    assert [mount["mountPath"] for mount in mounts] == [told["POLARKV_WEBHOOK_CERTIFICATE_DIRECTORY"]]
    configuration = one("MutatingWebhookConfiguration", f"{NAMESPACE}-polarkv-webhook", values)
    assert configuration["metadata"]["annotations"]["cert-manager.io/inject-ca-from"] == f"{NAMESPACE}/polarkv-webhook"
    issuer = {"kind": "ClusterIssuer", "name": "corporate"}
    theirs = {"webhook": {"certManager": {"enabled": True, "issuerRef": issuer}}}
    assert one("Certificate", "polarkv-webhook", theirs)["spec"]["issuerRef"] == issuer
    assert "Issuer" not in kinds(theirs)


def test_dashboards_show_metrics_that_exist() -> None:
    assert not any("dashboard" in each["metadata"]["name"] for each in rendered())
    shown = one("ConfigMap", "polarkv-dashboard-polarkv", {"dashboards": {"enabled": True, "labels": {"x": "y"}}})
    assert shown["metadata"]["labels"]["x"] == "y"
    dashboard = json.loads(shown["data"]["polarkv.json"])
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    used = set(re.findall(r"\bpolarkv_[a-z_]+(?=\{)", " ".join(expressions)))
    source = Path(metrics.__file__).read_text(encoding="utf-8")
    counters = {f"{name}_total" for name, *_ in metrics._COUNTERS}
    gauges = {name for name in re.findall(r'"(polarkv_[a-z_]+)"', source) if f"{name}_total" not in counters}
    assert len(used) > 20
    assert used - counters - gauges == set()


def test_storage_classes_are_made_when_asked() -> None:
    assert "StorageClass" not in kinds()
    made = one("StorageClass", "polarkv-essd-pl0", {"storageClasses": {"alibabaCloud": True}})
    assert made["volumeBindingMode"] == "WaitForFirstConsumer"
    assert made["parameters"] == {"type": "cloud_essd", "performanceLevel": "PL0"}


def test_the_notes_say_what_to_do_next() -> None:
    with Chart.load(CHART) as chart:
        texts = chart.render({"watchNamespace": "inference"}, name="cache", namespace=NAMESPACE)
    notes = next(text for name, text in texts.items() if name.endswith("NOTES.txt"))
    manifest = yaml.safe_load(notes.partition("<<EOF\n")[2].partition("  EOF")[0])
    assert manifest["kind"] == "PolarKVCluster"
    assert manifest["metadata"]["namespace"] == "inference"


@pytest.fixture
def empty_api_server() -> Iterator[Path]:
    """An API server of the test's own: helm takes over no CRD that somebody else has applied."""
    if not api_servers.is_cached():
        pytest.skip("no Kubernetes API server in the cache: `make test-cluster` builds it")
    with api_servers.running() as server:
        yield server.kubeconfig


def test_an_upgrade_from_the_first_version_keeps_clusters_and_what_the_webhook_wrote(empty_api_server: Path) -> None:
    kubectl = Kubectl(empty_api_server, NAMESPACE)
    bundle = base64.b64encode(b"an authority").decode()
    name = f"{NAMESPACE}-polarkv-webhook"
    with Config(kubeconfig_path=empty_api_server, namespace=NAMESPACE) as helm:
        helm.install(str(PREVIOUS), "cache", {}, namespace=NAMESPACE, create_namespace=True)
        kubectl.run("wait", "--for=condition=Established", "crd/polarkvclusters.polarkv.io", "--timeout=30s")
        kubectl.apply({**golden.load(golden.SAMPLES[0]), "metadata": {"name": "kept", "namespace": NAMESPACE}})
        patch = [{"op": "add", "path": "/webhooks/0/clientConfig/caBundle", "value": bundle}]
        kubectl.run("patch", "mutatingwebhookconfiguration", name, "--type=json", "-p", json.dumps(patch))
        helm.upgrade(str(CHART), "cache", {"operator": {"replicas": 2}}, namespace=NAMESPACE)
        deployment = kubectl.get("deployment", "polarkv-operator")
        assert deployment["spec"]["replicas"] == 2
        assert deployment["metadata"]["labels"]["helm.sh/chart"].endswith(Chart.load(CHART).version)
        webhook = kubectl.get("mutatingwebhookconfiguration", name)["webhooks"][0]
        assert webhook["clientConfig"]["caBundle"] == bundle
        helm.uninstall("cache")
    assert kubectl.find("deployment", "polarkv-operator") is None
    assert kubectl.get("pkv", "kept")["spec"]["cacheNodes"]["replicas"] == 3
