"""The CRD, its rules and everything that the builders make, before a real API server. Skipped where none is cached."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from polarkv_operator.api import parse
from polarkv_operator.resources import render, secrets
from polarkv_operator.resources.common import Release
from tests.cluster.support.kubectl import Kubectl, KubectlError
from tests.operator.support import golden
from tests.operator.support.clusters import body, with_field
from tests.support.waiting import wait_until

CRD = golden.ROOT / "crds" / "polarkv.io_polarkvclusters.yaml"
NAMESPACE = "inference"


@pytest.fixture(scope="module")
def kubectl(api_server: Path) -> Iterator[Kubectl]:
    tool = Kubectl(api_server, NAMESPACE)
    tool.run("apply", "--server-side", "-f", str(CRD))
    tool.run("wait", "--for=condition=Established", "crd/polarkvclusters.polarkv.io", "--timeout=30s")
    tool.run("create", "namespace", NAMESPACE)
    # Established is not yet published: the server's description of its resources follows within a second or two.
    wait_until(lambda: publishes(tool), "the CRD in the server's OpenAPI", 30)
    yield tool
    tool.run("delete", "namespace", NAMESPACE, "--wait=false")


def publishes(tool: Kubectl) -> bool:
    try:
        return "cacheNodes" in tool.run("explain", "polarkvclusters.spec")
    except KubectlError:
        return False


def create(kubectl: Kubectl, path: str, value: object, name: str = "demo") -> str:
    """Create a cluster with one field set, without keeping it; return what the API server said, '' if it took it."""
    changed = with_field(path, value) if path else body()
    changed["metadata"] = {"name": name}
    try:
        kubectl.run("create", "--dry-run=server", "-f", "-", stdin=json.dumps(changed))
    except KubectlError as error:
        return str(error)
    return ""


def patch(kubectl: Kubectl, name: str, spec: dict[str, Any]) -> str:
    """Change a cluster; return what the API server said, '' if it took it."""
    try:
        kubectl.run("patch", "pkv", name, "--type=merge", "-p", json.dumps({"spec": spec}))
    except KubectlError as error:
        return str(error)
    return ""


def test_explain_reads_well(kubectl: Kubectl) -> None:
    text = kubectl.run("explain", "polarkvclusters.spec.cacheNodes.storage")
    assert "JBOD: a file system on each volume" in text
    assert "enum: RAID0, JBOD" in text
    assert "-required-" in text
    assert "cacheNodes\t<Object> -required-" in kubectl.run("explain", "pkv.spec")


def test_defaults_are_filled_in_by_the_server_as_by_the_models(kubectl: Kubectl) -> None:
    smallest = {**body(), "metadata": {"name": "defaults"}}
    stored = json.loads(kubectl.run("create", "-o", "json", "-f", "-", stdin=json.dumps(smallest)))
    assert parse(stored).spec == parse(body()).spec
    assert stored["spec"]["cacheNodes"]["transport"] == {"mode": "Auto", "resourceCount": 1}
    listed = kubectl.run("get", "pkv", "defaults")
    assert listed.split("\n")[0].split() == ["NAME", "READY", "NODES", "SERVED", "STATE", "AGE"]


@pytest.mark.parametrize("sample", golden.SAMPLES, ids=lambda path: path.stem)
def test_samples_are_taken(kubectl: Kubectl, sample: Path) -> None:
    content = golden.load(sample)
    content["metadata"] = {"name": content["metadata"]["name"]}
    kubectl.run("create", "--dry-run=server", "--validate=strict", "-f", "-", stdin=json.dumps(content))


@pytest.mark.parametrize(
    ("path", "value", "text"),
    [
        ("cacheNodes.memory.size", "1Mi", "use at least 16Mi"),
        ("cacheNodes.memory.size", "1Q", "spec.cacheNodes.memory.size"),
        ("cacheNodes.memory", {"size": "33Mi", "hugePages": "2Mi"}, "use whole pages"),
        ("cacheNodes.replicas", 513, "spec.cacheNodes.replicas"),
        ("cacheNodes.storage.layout", "RAID5", 'supported values: "RAID0", "JBOD"'),
        ("cacheNodes.transport", {"mode": "RDMA"}, "set resourceName"),
        ("cacheNodes.resources.slab", {"requests": {"cpu": 2}, "limits": {"cpu": "1"}}, "lower the request"),
        ("manager.metadataStore", {"type": "PostgreSQL"}, "set both or neither"),
        ("autoscaling", {"maxReplicas": 1, "minReplicas": 2, "targetBandwidth": {"bytesPerSecond": "1M"}}, "swap them"),
        ("autoscaling", {"maxReplicas": 1, "targetBandwidth": {}}, "set either"),
        ("security.tenants", [{"name": "default"}, {"name": "default"}], "Duplicate value"),
        ("security.tenants", [{"name": "other"}], "name one of them"),
    ],
)
def test_what_the_models_refuse_the_server_refuses(kubectl: Kubectl, path: str, value: object, text: str) -> None:
    assert text in create(kubectl, path, value)


@pytest.mark.parametrize("name", ["a.b", "1a", "a" * 41])
def test_a_name_that_cannot_be_part_of_a_host_name_is_refused(kubectl: Kubectl, name: str) -> None:
    assert "becomes part of host names" in create(kubectl, "", None, name)


@pytest.mark.parametrize(
    ("storage", "change", "text"),
    [
        ({}, {"layout": "RAID0"}, "layout cannot be changed"),
        ({}, {"volumesPerNode": 2}, "volumesPerNode cannot be changed"),
        ({}, {"storageClassName": "fast"}, "storageClassName cannot be changed"),
        ({"storageClassName": "fast"}, {"storageClassName": None}, "storageClassName cannot be changed"),
        ({}, {"volumeSize": "5Gi"}, "volumes only grow"),
        ({}, {"volumeSize": "20Gi"}, ""),
        ({"layout": "RAID0"}, {"volumeSize": "20Gi"}, "an array cannot use members that grew"),
        ({"layout": "RAID0"}, {"volumeSize": "10240Mi"}, ""),
    ],
)
def test_what_cannot_be_done_in_place_is_refused_with_the_reason(
    kubectl: Kubectl, storage: dict[str, Any], change: dict[str, Any], text: str
) -> None:
    changed = with_field("cacheNodes.storage", {"volumeSize": "10Gi", **storage})
    changed["metadata"] = {"name": "changing"}
    kubectl.delete("pkv", "changing")
    kubectl.apply(changed)
    said = patch(kubectl, "changing", {"cacheNodes": {"storage": change}})
    assert (text in said) if text else (said == "")


@pytest.mark.parametrize(
    ("store", "change", "text"),
    [
        ({}, {"storageClassName": "fast"}, "storageClassName cannot be changed"),
        ({"storageClassName": "fast"}, {"storageClassName": None}, "storageClassName cannot be changed"),
        ({}, {"volumeSize": "1Gi"}, "volumes only grow; or set type None, delete the claim"),
        ({}, {"volumeSize": "3Gi"}, ""),
        ({}, {"type": "None", "storageClassName": "fast"}, ""),
    ],
)
def test_what_the_metadata_store_cannot_become_is_refused_with_the_way_out(
    kubectl: Kubectl, store: dict[str, Any], change: dict[str, Any], text: str
) -> None:
    kubectl.delete("pkv", "remembering")
    kubectl.apply({**with_field("manager.metadataStore", store), "metadata": {"name": "remembering"}})
    said = patch(kubectl, "remembering", {"manager": {"metadataStore": change}})
    assert (text in said) if text else (said == "")


def test_secrets_are_not_taken_back(kubectl: Kubectl) -> None:
    kubectl.apply({**with_field("security.secretsGeneration", 3), "metadata": {"name": "rotated"}})
    with pytest.raises(KubectlError, match="secretsGeneration cannot be lowered"):
        kubectl.apply({**with_field("security.secretsGeneration", 2), "metadata": {"name": "rotated"}})


def test_scaling_changes_the_number_of_cache_nodes(kubectl: Kubectl) -> None:
    kubectl.apply({**body(), "metadata": {"name": "scaled"}})
    kubectl.run("scale", "pkv/scaled", "--replicas=7")
    assert kubectl.get("pkv", "scaled")["spec"]["cacheNodes"]["replicas"] == 7


@pytest.mark.parametrize("sample", golden.SAMPLES, ids=lambda path: path.stem)
def test_all_that_is_built_is_taken_and_applying_it_again_changes_nothing(kubectl: Kubectl, sample: Path) -> None:
    content = golden.load(sample)
    content["metadata"]["namespace"] = NAMESPACE
    cluster = parse(content)
    contents = secrets.complete(cluster, {}, golden.tokens())
    made = render.children(cluster, Release("polarkv:1"), contents, 2)
    listed = json.dumps({"apiVersion": "v1", "kind": "List", "items": made})

    def apply() -> dict[str, str]:
        text = kubectl.run("apply", "--server-side", "--validate=strict", "-o", "json", "-f", "-", stdin=listed)
        return {
            f"{each['kind']} {each['metadata']['name']}": each["metadata"]["resourceVersion"]
            for each in json.loads(text)["items"]
            if each["kind"] not in render.ONCE_KINDS
        }

    assert apply() == apply()
