"""What a cluster's spec may be, and what is said about each that may not be."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polarkv_operator.api import Quantity, SpecInvalid, parse
from polarkv_operator.api.quantity import of_bytes
from tests.operator.support.clusters import body, with_field

SPEC = "spec.cacheNodes"


def test_the_smallest_cluster_gets_every_default() -> None:
    spec = parse(body()).spec
    assert spec.cache_nodes.replicas == 3
    assert spec.cache_nodes.memory.size.bytes == 1 << 30
    assert spec.manager.metadata_store.volume_size.bytes == 2 << 30
    assert [tenant.name for tenant in spec.security.tenants] == ["default"]
    assert spec.autoscaling is None


def test_what_is_read_can_be_written_and_read_again() -> None:
    cluster = parse(body())
    again = parse({**body(), "spec": cluster.spec.to_object()})
    assert again.spec == cluster.spec


@pytest.mark.parametrize(
    ("path", "value", "field", "fix"),
    [
        ("cacheNodes", None, "spec.cacheNodes", "required"),
        ("cacheNodes", 5, "spec.cacheNodes", "write an object"),
        ("cacheNodes.replicas", -1, f"{SPEC}.replicas", "at least 0"),
        ("cacheNodes.replicas", "many", f"{SPEC}.replicas", "whole number"),
        ("cacheNodes.memory.size", "1Q", f"{SPEC}.memory.size", "such as 64Gi"),
        ("cacheNodes.memory.size", "-1Gi", f"{SPEC}.memory.size", "such as 64Gi"),
        ("cacheNodes.memory.size", "1Mi", f"{SPEC}.memory.size", "at least 16Mi"),
        ("cacheNodes.memory.size", "16E", f"{SPEC}.memory.size", "use less"),
        ("cacheNodes.memory", {"size": "33Mi", "hugePages": "2Mi"}, f"{SPEC}.memory.size", "whole pages"),
        ("cacheNodes.storage.layout", "RAID5", f"{SPEC}.storage.layout", "use 'RAID0' or 'JBOD'"),
        ("cacheNodes.storage.volumeSize", "1Mi", f"{SPEC}.storage.volumeSize", "at least 64Mi"),
        ("cacheNodes.transport", {"mode": "RDMA"}, f"{SPEC}.transport.resourceName", "set resourceName"),
        ("cacheNodes.podTemplate.spec", [], f"{SPEC}.podTemplate.spec", "write an object"),
        ("manager.replicas", 2, "spec.manager.replicas", "at most 1"),
        ("manager.metadataStore", {"type": "PostgreSQL"}, "spec.manager.metadataStore.secretRef", "set both"),
        ("manager.metadataStore", {"type": "MySQL"}, "spec.manager.metadataStore.secretRef", "set both"),
        ("manager.metadataStore", {"type": "SQLite", "secretRef": {"name": "a"}},
         "spec.manager.metadataStore.secretRef", "set both"),
        ("manager.resources", {"requests": {"cpu": 2}, "limits": {"cpu": "1500m"}}, "spec.manager.resources.requests",
         "larger than its limit"),
        ("autoscaling", {"maxReplicas": 3, "targetBandwidth": {}}, "spec.autoscaling.targetBandwidth", "set either"),
        ("autoscaling", {"maxReplicas": 3, "targetBandwidth": {"utilizationPercent": 60}},
         "spec.autoscaling.targetBandwidth.nodeBaseline", "set both"),
        ("autoscaling", {"minReplicas": 4, "maxReplicas": 3, "targetBandwidth": {"bytesPerSecond": "1G"}},
         "spec.autoscaling.minReplicas", "swap them"),
        ("security.tenants", [{"name": "default"}, {"name": "default"}], "spec.security.tenants", "one name"),
        ("security.tenants", [{"name": "default"}, {"name": "No"}], "spec.security.tenants[1].name", "use the form"),
        ("security.tenants", [{"name": "other"}], "spec.injection.tenant", "name one of them"),
        ("security.tenants", [{"name": "default", "quota": "0"}], "spec.security.tenants[0].quota", "at least 1"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_with_its_fix(path: str, value: object, field: str, fix: str) -> None:
    with pytest.raises(SpecInvalid) as caught:
        parse(with_field(path, value))
    assert caught.value.field == field
    assert fix in caught.value.fix


@pytest.mark.parametrize("name", ["A", "a.b", "1a", "a" * 41, "a-", ""])
def test_a_name_that_cannot_be_part_of_a_host_name_is_refused(name: str) -> None:
    with pytest.raises(SpecInvalid) as caught:
        parse({**body(), "metadata": {"name": name, "namespace": "n"}})
    assert caught.value.field == "metadata.name"


def test_another_kind_or_version_is_refused() -> None:
    with pytest.raises(SpecInvalid, match="apiVersion"):
        parse({**body(), "apiVersion": "polarkv.io/v1"})
    with pytest.raises(SpecInvalid, match="kind"):
        parse({**body(), "kind": "Pod"})


@pytest.mark.parametrize(
    ("text", "value"),
    [("1", 1), (7, 7), ("1Ki", 1024), ("1k", 1000), ("500m", Decimal("0.5")), ("1.5Gi", 1536 << 20), ("1e3", 1000),
     ("1E", 10**18), ("1E2", 100), ("1Ei", 1 << 60), (".5", Decimal("0.5")), ("3u", Decimal("0.000003"))],
)  # fmt: skip
def test_quantities_read_as_kubernetes_reads_them(text: object, value: Decimal) -> None:
    assert Quantity.parse(text).value == value


@pytest.mark.parametrize(
    "text", ["", "Gi", "1 Gi", "1KI", "1g", "+1", "0x1", "1e", "1e999", "9" * 33, "1Gi\n", True, 1.5, None]
)
def test_what_is_no_quantity_is_refused(text: object) -> None:
    with pytest.raises(ValueError, match="quantity"):
        Quantity.parse(text)


@given(st.integers(0, 2**63 - 1))
def test_bytes_survive_being_written_as_a_quantity(size_bytes: int) -> None:
    assert Quantity.parse(of_bytes(size_bytes)).bytes == size_bytes
