"""What the builders make of a cluster. They are pure: each test is an equality."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from polarkv_client.cli.common import CLIENT
from polarkv_client.config import load_config
from polarkv_client.connectors.settings import load_connector_config
from polarkv_dataplane.cli.servers import DISK, MANAGER, SLAB
from polarkv_dataplane.manager.shell.credentials import load_credentials
from polarkv_dataplane.raid.settings import RAID
from polarkv_dataplane.slab.settings import SlabSettings
from polarkv_operator.api import PolarKVCluster, SpecInvalid, parse
from polarkv_operator.api.schema import open_api_schema
from polarkv_operator.resources import (
    cache_nodes,
    connection,
    manager,
    names,
    network,
    render,
    secrets,
    settings,
)
from polarkv_operator.resources.common import Release, SecretDigests
from polarkv_operator.resources.engine_arguments import SGLANG_EXTRA_CONFIG, Engine, arguments
from polarkv_operator.resources.overlay import overlay
from tests.operator.support import golden
from tests.operator.support.clusters import body, with_field

RELEASE = Release("polarkv:1")
DIGESTS = SecretDigests("a", "b")


def cluster(path: str = "", value: object = None) -> PolarKVCluster:
    return parse(with_field(path, value) if path else body())


def stateful_set(path: str = "", value: object = None, replicas: int = 3) -> dict[str, Any]:
    return cache_nodes.stateful_set(cluster(path, value), RELEASE, DIGESTS, replicas)


def pod(workload: dict[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = workload["spec"]["template"]["spec"]
    return spec


def container(workload: dict[str, Any], name: str) -> dict[str, Any]:
    found = [*pod(workload).get("initContainers", []), *pod(workload)["containers"]]
    return next(each for each in found if each["name"] == name)


@pytest.mark.parametrize("sample", golden.SAMPLES, ids=lambda path: path.stem)
def test_samples_are_rendered_as_reviewed(sample: Path) -> None:
    reviewed = (golden.FOLDER / sample.name).read_text(encoding="utf-8")
    assert golden.rendered(sample) == reviewed, "review `python -m tests.operator.support.golden; git diff`"


@pytest.mark.parametrize("sample", golden.SAMPLES, ids=lambda path: path.stem)
def test_samples_name_only_fields_that_exist(sample: Path) -> None:
    def check(schema: dict[str, Any], value: Any, place: str) -> None:
        if isinstance(value, dict) and "properties" in schema:
            for name, child in value.items():
                assert name in schema["properties"], f"{place}.{name}"
                check(schema["properties"][name], child, f"{place}.{name}")
        elif isinstance(value, list) and "items" in schema:
            for child in value:
                check(schema["items"], child, place)

    check(open_api_schema()["properties"]["spec"], golden.load(sample)["spec"], "spec")


def test_everything_belongs_to_the_cluster_and_goes_with_it() -> None:
    contents = secrets.complete(cluster(), {}, golden.tokens())
    made = render.children(cluster(), Release("polarkv:1", has_pod_monitors=True), contents, 3)
    for each in made:
        assert each["metadata"]["labels"][names.CLUSTER_LABEL] == "demo"
        assert [owner["kind"] for owner in each["metadata"]["ownerReferences"]] == ["PolarKVCluster"]
        assert (each["apiVersion"], each["kind"]) in render.KINDS
    assert len({(each["kind"], each["metadata"]["name"]) for each in made}) == len(made)


def test_the_servers_take_their_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the builders write is what the data plane reads: the same fields, values that pass its checks."""
    data = settings.config_map(cluster())["data"]
    for name, text in data.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    managed = MANAGER.load({}, tmp_path / settings.MANAGER_FILE, {})
    assert managed.max_keys == 1_000_000
    pods_own = {"POLARKV_SLAB_NODE": "demo-cache-0", "POLARKV_DISK_NODE": "demo-cache-0"}
    slab = SLAB.load({}, tmp_path / settings.CACHE_NODE_FILE, pods_own)
    assert slab.pool_bytes == 1 << 30
    disk = DISK.load({}, tmp_path / settings.CACHE_NODE_FILE, pods_own)
    assert disk.node == slab.node
    assert disk.capacity_bytes < 10 << 30


def test_the_manager_takes_its_tokens_file(tmp_path: Path) -> None:
    with_tenants = cluster("security.tenants", [{"name": "default"}, {"name": "b", "quota": "1Gi"}])
    contents = secrets.complete(with_tenants, {}, golden.tokens())
    made = {each["metadata"]["name"]: each for each in secrets.objects(with_tenants, contents)}
    (tmp_path / "tokens.json").write_bytes(base64.b64decode(made["demo-tokens"]["data"]["tokens.json"]))
    credentials = load_credentials(tmp_path / "tokens.json", "node")
    assert credentials.quotas == {"default": 0, "b": 1 << 30}
    assert credentials.tenant(contents.client_tokens["b"]) == "b"
    assert credentials.is_admin(contents.admin_token)
    assert sorted(made["demo-client"]["data"]) == ["b", "default"]


def test_a_client_takes_the_connection(tmp_path: Path) -> None:
    data = connection.config_map(cluster())["data"]
    (tmp_path / "connection.json").write_text(data[connection.CONNECTION_KEY], encoding="utf-8")
    config = load_config(tmp_path, environment={})
    assert config.endpoint == data[connection.ENDPOINT_KEY] == "tcp://demo-manager.inference.svc:7700"
    assert next(one for one in CLIENT.settings() if one.name == "endpoint").variable in data
    assert json.loads(data[connection.VLLM_KEY])["kv_load_failure_policy"] == "recompute"
    assert json.loads(data[connection.SGLANG_KEY])["endpoint"] == config.endpoint


def test_connectors_take_the_connection_by_each_way(tmp_path: Path) -> None:
    """The flag, the file and the variables say the same to a connector, and nothing that it does not know."""
    data = connection.config_map(cluster("cache.chunkTokens", 128))["data"]
    (tmp_path / "connection.json").write_text(data[connection.CONNECTION_KEY], encoding="utf-8")
    flag = json.loads(data[connection.VLLM_KEY])["kv_connector_extra_config"]
    variables = {name: value for name, value in data.items() if name.startswith("POLARKV_")}
    injected = json.loads(arguments(Engine.VLLM, 128)[1])["kv_connector_extra_config"]
    sglang = json.loads(data[connection.SGLANG_KEY])
    ways = (
        load_connector_config(flag, {}),
        load_connector_config({}, {"POLARKV_CONNECTION": str(tmp_path)}),
        load_connector_config({}, variables),
        load_connector_config(injected, {connection.ENDPOINT_VARIABLE: data[connection.ENDPOINT_VARIABLE]}),
    )
    assert {(one.endpoint, one.chunk_tokens) for one in ways if one} == {(data[connection.ENDPOINT_KEY], 128)}
    assert all(ways)
    assert load_connector_config({name: sglang[name] for name in sglang if name not in SGLANG_EXTRA_CONFIG}, {})


def test_pods_have_no_rights() -> None:
    for workload in (stateful_set(), manager.deployment(cluster(), RELEASE, DIGESTS)):
        spec = pod(workload)
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        for each in spec["containers"]:
            assert each["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "privileged": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }


@pytest.mark.parametrize(
    ("transport", "told"),
    [
        ({"mode": "Auto"}, {"rdma": "auto"}),
        ({"mode": "TCP"}, {"rdma": "off"}),
        (
            {"mode": "RDMA", "resourceName": "rdma/x", "deviceName": "mlx5_1", "gidIndex": 0},
            {"rdma": "only", "rdma_devices": ["mlx5_1"], "rdma_gid_index": 0},
        ),
    ],
)
def test_the_slab_server_is_told_how_to_use_the_device(transport: dict[str, Any], told: dict[str, Any]) -> None:
    slab = settings.cache_node_settings(cluster("cacheNodes.transport", transport))["slab"]
    assert {name: value for name, value in slab.items() if "rdma" in name} == told
    SlabSettings(node="n", **slab)


def test_rdma_takes_a_device_and_locked_memory_and_nothing_else() -> None:
    transport = {"mode": "Auto", "resourceName": "aliyun/erdma"}
    slab = container(stateful_set("cacheNodes.transport", transport), "slab")
    assert slab["resources"]["limits"]["aliyun/erdma"] == slab["resources"]["requests"]["aliyun/erdma"] == "1"
    assert slab["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    assert slab["securityContext"]["privileged"] is False
    for other in ({"mode": "Auto"}, {"mode": "TCP", "resourceName": "aliyun/erdma"}):
        assert container(stateful_set("cacheNodes.transport", other), "slab") == container(stateful_set(), "slab")


def test_only_the_raid_container_is_privileged() -> None:
    striped = stateful_set("cacheNodes.storage", {"layout": "RAID0", "volumesPerNode": 2, "volumeSize": "10Gi"})
    assert [claim["spec"]["volumeMode"] for claim in striped["spec"]["volumeClaimTemplates"]] == ["Block", "Block"]
    raid = container(striped, "raid")
    assert raid["securityContext"]["privileged"] is True
    assert raid["restartPolicy"] == "Always"
    assert [device["devicePath"] for device in raid["volumeDevices"]] == ["/dev/polarkv/0", "/dev/polarkv/1"]
    environment = {each["name"]: each.get("value") for each in raid["env"]}
    assert environment["POLARKV_RAID_DEVICES"] == "/dev/polarkv/0,/dev/polarkv/1"
    assert all(not each["securityContext"]["privileged"] for each in pod(striped)["containers"])
    assert pod(stateful_set()).get("initContainers") is None


def test_disks_are_mounted_where_the_disk_server_looks() -> None:
    three = cluster("cacheNodes.storage", {"volumesPerNode": 3, "volumeSize": "10Gi"})
    mounts = container(cache_nodes.stateful_set(three, RELEASE, DIGESTS, 1), "disk")["volumeMounts"]
    assert [mount["mountPath"] for mount in mounts if mount["name"].startswith("data-")] == settings.directories(three)


def test_the_memory_tier_is_added_to_what_the_slab_server_needs() -> None:
    plain = container(stateful_set(), "slab")["resources"]
    assert int(plain["limits"]["memory"]) == int(plain["requests"]["memory"]) == (1 << 30) + (256 << 20) + (1 << 22)
    given = {"slab": {"requests": {"memory": "1Gi", "cpu": "2"}, "limits": {"cpu": "3"}}}
    own = container(stateful_set("cacheNodes.resources", given), "slab")["resources"]
    assert own == {
        "requests": {"memory": str(2 << 30), "cpu": "2"}, "limits": {"memory": str(2 << 30), "cpu": "3"}
    }  # fmt: skip
    huge = container(stateful_set("cacheNodes.memory", {"size": "1Gi", "hugePages": "2Mi"}), "slab")["resources"]
    assert huge["limits"] == {"memory": str(256 << 20), "hugepages-2Mi": str(1 << 30)}


def test_other_settings_or_secrets_make_other_pods() -> None:
    def revision(workload: dict[str, Any]) -> dict[str, str]:
        found: dict[str, str] = workload["spec"]["template"]["metadata"]["annotations"]
        return found

    before = revision(stateful_set())
    assert revision(stateful_set("manager.replicas", 0)) == before
    assert revision(stateful_set("cache.readLeaseSeconds", 9)) == before
    assert revision(stateful_set("cacheNodes.memory.size", "2Gi")) != before
    assert revision(cache_nodes.stateful_set(cluster(), RELEASE, SecretDigests("c", "b"), 3)) != before
    assert revision(cache_nodes.stateful_set(cluster(), RELEASE, SecretDigests("a", "c"), 3)) == before
    managed = revision(manager.deployment(cluster(), RELEASE, DIGESTS))
    assert revision(manager.deployment(cluster("cache.readLeaseSeconds", 9), RELEASE, DIGESTS)) != managed
    assert revision(manager.deployment(cluster(), RELEASE, SecretDigests("a", "c"))) != managed


def test_secrets_are_made_once_and_anew_on_request() -> None:
    one = cluster()
    first = secrets.complete(one, {}, golden.tokens())
    kept = {each["metadata"]["name"]: each for each in secrets.objects(one, first)}
    never = iter(()).__next__
    assert secrets.complete(one, kept, never) == first
    raised = cluster("security.secretsGeneration", 2)
    second = secrets.complete(raised, kept, iter(["x" * 16, "y" * 16, "z" * 16]).__next__)
    assert (second.cluster_secret, second.admin_token, second.client_tokens) == (
        "x" * 16, "y" * 16, {"default": "z" * 16},
    )  # fmt: skip
    assert second.digests() != first.digests()


@pytest.mark.parametrize("damage", [{"data": None}, {"data": {}}, {"data": {"secret": "%%%"}}, {"metadata": {}}])
def test_a_secret_that_cannot_be_read_is_made_anew(damage: dict[str, Any]) -> None:
    one = cluster()
    kept = {each["metadata"]["name"]: each for each in secrets.objects(one, secrets.complete(one, {}, golden.tokens()))}
    kept["demo-secret"] = {**kept["demo-secret"], **damage}
    assert secrets.complete(one, kept, lambda: "n" * 16).cluster_secret == "n" * 16


def test_secrets_are_not_shown() -> None:
    assert "token-for-tests" not in repr(secrets.complete(cluster(), {}, golden.tokens()))


def test_the_users_pod_template_is_laid_over() -> None:
    over = {
        "metadata": {"labels": {"team": "a", names.CLUSTER_LABEL: "another"}},
        "spec": {
            "nodeSelector": {"pool": "cache"},
            "containers": [{"name": "slab", "env": [{"name": "X", "value": "1"}]}, {"name": "sidecar", "image": "s"}],
            "securityContext": {"fsGroup": 7},
            "terminationGracePeriodSeconds": None,
        },
    }
    changed = stateful_set("cacheNodes.podTemplate", over)
    assert pod(changed)["nodeSelector"] == {"pool": "cache"}
    assert [each["name"] for each in pod(changed)["containers"]] == ["slab", "disk", "sidecar"]
    assert [each["name"] for each in container(changed, "slab")["env"]][-1] == "X"
    assert pod(changed)["securityContext"]["fsGroup"] == 7
    assert pod(changed)["securityContext"]["runAsNonRoot"] is True
    assert "terminationGracePeriodSeconds" not in pod(changed)
    labels = changed["spec"]["template"]["metadata"]["labels"]
    assert labels["team"] == "a"
    assert changed["spec"]["selector"]["matchLabels"].items() <= labels.items()


@pytest.mark.parametrize(
    ("over", "field"),
    [
        ({"containers": 5}, "spec.containers"),
        ({"containers": [5]}, "spec.containers[0]"),
        ({"containers": [{"image": "x"}]}, "spec.containers[0].name"),
        ({"containers": [{"name": "slab", "env": {"a": 1}}]}, "spec.containers[0].env"),
        ({"securityContext": "none"}, "spec.securityContext"),
        ({"serviceAccountName": ["a"]}, "spec.serviceAccountName"),
    ],
)
def test_an_overlay_that_does_not_fit_names_its_place(over: dict[str, Any], field: str) -> None:
    with pytest.raises(SpecInvalid) as caught:
        stateful_set("cacheNodes.podTemplate.spec", over)
    assert caught.value.field == f"spec.cacheNodes.podTemplate.{field}"


def test_an_overlay_changes_neither_side() -> None:
    base, over = {"env": [{"name": "a", "value": "1"}]}, {"env": [{"name": "a", "value": "2"}, {"name": "b"}]}
    copies = yaml.safe_load(yaml.safe_dump([base, over]))
    assert overlay(base, over, "x") == over
    assert [base, over] == copies


@pytest.mark.parametrize(
    ("storage", "text"),
    [
        ({"volumesPerNode": 1, "volumeSize": "10Gi"}, None),
        ({"volumesPerNode": 1, "volumeSize": "20Gi"}, None),
        ({"volumesPerNode": 2, "volumeSize": "10Gi"}, "volumesPerNode is 2"),
        ({"volumesPerNode": 1, "volumeSize": "5Gi"}, "volumes only grow"),
        ({"layout": "RAID0", "volumesPerNode": 1, "volumeSize": "10Gi"}, "the other one"),
        ({"volumesPerNode": 1, "volumeSize": "10Gi", "storageClassName": "fast"}, "is of None"),
    ],
)
def test_volumes_that_are_there_limit_what_they_can_become(storage: dict[str, Any], text: str | None) -> None:
    found = cache_nodes.differences_in_volumes(cluster("cacheNodes.storage", storage), stateful_set())
    assert (text is None) == (found == [])
    assert text is None or text in found[0]


def test_an_array_cannot_use_members_that_grew() -> None:
    small = {"layout": "RAID0", "volumesPerNode": 1, "volumeSize": "10Gi"}
    grown = cluster("cacheNodes.storage", {**small, "volumeSize": "20Gi"})
    live = stateful_set("cacheNodes.storage", small)
    assert "an array uses no more" in cache_nodes.differences_in_volumes(grown, live)[0]
    assert not cache_nodes.grown_claims(grown, live)
    assert cache_nodes.grown_claims(cluster("cacheNodes.storage.volumeSize", "20Gi"), stateful_set())


def test_a_cache_node_that_is_not_ready_keeps_no_machine_from_being_drained() -> None:
    """With two of them the budget is spent, and by default neither could be evicted."""
    spec = cache_nodes.disruption_budget(cluster())["spec"]
    assert (spec["maxUnavailable"], spec["unhealthyPodEvictionPolicy"]) == (1, "AlwaysAllow")


def test_the_raid_container_is_told_what_its_program_reads() -> None:
    striped = {"layout": "RAID0", "volumeSize": "10Gi"}
    raid = container(stateful_set("cacheNodes.storage", {**striped, "volumesPerNode": 2}), "raid")
    told = {each["name"]: each.get("value", "") for each in raid["env"]}
    settings = RAID.load({}, environment=told)
    assert settings.devices == ["/dev/polarkv/0", "/dev/polarkv/1"]
    assert str(settings.mount) == "/var/lib/polarkv/array/data"
    assert settings.owner == 65532
    known = {setting.variable for setting in RAID.settings()}
    assert {name for name in told if name.startswith("POLARKV_RAID_")} <= known


def test_nobody_named_is_everybody_and_named_is_only_those() -> None:
    def sources(value: object) -> list[Any]:
        policies = network.policies(cluster("security.networkPolicy", value), RELEASE)
        return [rule.get("from") for policy in policies for rule in policy["spec"]["ingress"]]

    assert sources({}) == [None] * 4
    assert sources({"enabled": False}) == []
    peer: dict[str, Any] = {"podSelector": {}}
    own = {"podSelector": {"matchLabels": names.selector(cluster(), names.Component.CACHE_NODE)}}
    operator = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "polarkv-system"}}}
    assert sources({"clients": [peer], "monitoring": [peer]}) == [
        [own, peer],
        [operator, peer],
        [peer],
        [operator, peer],
    ]
