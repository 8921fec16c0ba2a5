"""`polarkv plan` as it is typed."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from polarkv_client.cli.main import run
from polarkv_dataplane.planner import manifest
from polarkv_dataplane.planner.search import Terms
from polarkv_operator.api import parse
from polarkv_operator.api.cache_nodes import MOST_CACHE_NODES
from polarkv_operator.api.cluster import MOST_NAME_CHARACTERS

ROOT = Path(__file__).parents[2]

ARTICLE = ["--bandwidth", "12GB/s", "--capacity", "21440GiB", "--memory", "156GiB", "--nominal", "--disk-path", "burst"]
HERE = ["--market", "alibaba-cn"]


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = run(["plan", *arguments])
    return code, capsys.readouterr().out


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    code, out = plan(capsys, *arguments, "--json")
    assert code == 0, out
    found: list[dict[str, Any]] = json.loads(out)
    return found


def error(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    code, out = plan(capsys, *arguments, "--json")
    assert code != 0
    found: dict[str, Any] = json.loads(out)["error"]
    return found


def test_the_articles_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = answer(capsys, *ARTICLE, *HERE)
    assert (found["fleet"]["nodes"], found["fleet"]["instance"]) == (39, "ecs.c9i.large")
    assert found["fleet"]["cost_month"] == 17_975.49
    assert len(found["runners_up"]) == 4
    assert found["demands"]["disk_capacity"]["binding"]
    assert found["demands"]["network_bandwidth"]["one_more_1_GB_per_s"] > 0
    assert any("needs burst" in caution for caution in found["cautions"])
    assert any("9.75 GB/s" in caution for caution in found["cautions"])


def test_every_market_is_answered_in_its_currency(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "--memory", "100GiB")
    assert [each["fleet"]["currency"] for each in found] == ["CNY", "USD"]


def test_bandwidth_of_both_kinds_is_priced_together(capsys: pytest.CaptureFixture[str]) -> None:
    """Either alone costs nothing, because the other asks for the same machines."""
    (found,) = answer(capsys, "--bandwidth", "12GB/s", *HERE)
    assert found["demands"]["network_and_disk_bandwidth"]["binding"]


def test_text_names_what_binds_and_where_prices_are_from(capsys: pytest.CaptureFixture[str]) -> None:
    code, out = plan(capsys, *ARTICLE, *HERE)
    assert code == 0
    for part in ("39", "ecs.c9i.large", "17,975.49 CNY", "(binding)", "ali-describeprice-2026-10 (2026-10-09)"):
        assert part in out


def test_a_model_and_a_context(capsys: pytest.CaptureFixture[str]) -> None:
    context = ["--model", "qwen3-235b-a22b", "--context", "32Ki"]
    (found,) = answer(capsys, *context, "--sessions", "100", "--load-seconds", "2", *HERE)
    assert found["demands"]["disk_capacity"]["asked"] == -(-32768 * 192_512 * 100 // (1 << 30))
    assert found["demands"]["network_bandwidth"]["asked"] == round(32768 * 192_512 / 2)
    (found,) = answer(capsys, *context, "--sessions", "100", "--pool", "memory", *HERE)
    assert found["demands"]["memory"]["asked"] == -(-32768 * 192_512 * 100 // (1 << 20))
    assert found["fleet"]["disk"] is None


def test_the_most_memory_for_a_budget(capsys: pytest.CaptureFixture[str]) -> None:
    pool = ["--pool", "memory", "--bandwidth", "12GB/s", "--nominal", *HERE]
    (found,) = answer(capsys, *pool, "--budget", "18414", "--maximize", "memory")
    assert (found["fleet"]["instance"], found["fleet"]["memory_gib"]) == ("ecs.r9i.xlarge", 928)


@pytest.mark.parametrize("more", [[], ["--disk-bandwidth", "0"], ["--disk-bandwidth", "2GB/s"]])
def test_the_most_bandwidth_for_a_budget(capsys: pytest.CaptureFixture[str], more: list[str]) -> None:
    """Of the network and, unless something else is said, of disks: bandwidth that only memory has is no answer."""
    capacity = ["--capacity", "10TB", *more, *HERE]
    (found,) = answer(capsys, "--budget", "18414", "--maximize", "bandwidth", *capacity)
    fleet = found["fleet"]
    assert fleet["cost_month"] <= 18_414
    reached = fleet["network_bytes_per_s"]
    if not more:
        assert fleet["disk_bytes_per_s"] > 10**10
        reached = min(reached, fleet["disk_bytes_per_s"])
    (cheapest,) = answer(capsys, "--bandwidth", str(reached), *capacity)
    assert cheapest["fleet"]["cost_month"] == fleet["cost_month"]
    (dearer,) = answer(capsys, "--bandwidth", str(reached + 1_000_000), *capacity)
    assert dearer["fleet"]["cost_month"] > 18_414


def test_a_custom_resource_for_kubectl(capsys: pytest.CaptureFixture[str]) -> None:
    code, out = plan(capsys, *ARTICLE, *HERE, "-o", "cr", "--name", "kv", "--namespace", "llm", "--layout", "RAID0")
    assert code == 0
    storage_class, cluster = yaml.safe_load_all(out)
    assert storage_class["volumeBindingMode"] == "WaitForFirstConsumer"
    assert storage_class["parameters"] == {"type": "cloud_essd", "performanceLevel": "PL0"}
    nodes = cluster["spec"]["cacheNodes"]
    assert cluster["metadata"] == {"name": "kv", "namespace": "llm"}
    assert nodes["replicas"] == 39
    assert nodes["memory"] == {"size": "4096Mi"}
    assert nodes["storage"] == {
        "layout": "RAID0", "volumesPerNode": 2, "volumeSize": "275Gi",
        "storageClassName": storage_class["metadata"]["name"],
    }  # fmt: skip


@pytest.mark.parametrize("layout", ["JBOD", "RAID0"])
def test_the_custom_resource_is_one_that_the_operator_reads(capsys: pytest.CaptureFixture[str], layout: str) -> None:
    rdma = ["--rdma", "--rdma-resource", "aliyun/erdma"]
    _, out = plan(capsys, "--bandwidth", "4GB/s", "--memory", "64GiB", *HERE, *rdma, "--layout", layout, "-o", "cr")
    (planned,) = answer(capsys, "--bandwidth", "4GB/s", "--memory", "64GiB", *HERE, "--rdma")
    nodes = parse(list(yaml.safe_load_all(out))[1]).spec.cache_nodes
    assert nodes.replicas == planned["fleet"]["nodes"]
    assert nodes.memory.size.bytes == planned["fleet"]["memory_gib"] * 2**30 / nodes.replicas
    assert nodes.storage.layout == layout
    assert nodes.storage.volumes_per_node == planned["fleet"]["disks_per_node"]
    assert nodes.storage.volume_size.bytes == planned["fleet"]["disk_gib"] << 30
    assert nodes.transport.resource_name == "aliyun/erdma"
    instance = nodes.pod_template.spec["nodeSelector"]["node.kubernetes.io/instance-type"]
    assert instance == planned["fleet"]["instance"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "say what is needed"),
        (["--bandwidth", "fast"], "--bandwidth='fast'"),
        (["--context", "32k"], "--model"),
        (["--model", "qwen3-8b"], "--context"),
        (["--model", "qwen3-8b", "--context", "-5"], "number of tokens"),
        (["--maximize", "memory"], "--budget"),
        (["--memory", "1TiB", "--budget", "10"], "the cheapest in alibaba-cn costs"),
        (["--memory", "1GiB", "--market", "moon"], "use one of"),
        (["--memory", "1GiB", "--pool", "memory", "--capacity", "1TB"], "has no disks"),
        (["--memory", "1GiB", "-o", "cr"], "leave one of them out"),
        (["--bandwidth", "12GB/m"], "--bandwidth='12GB/m'"),
        (["--bandwidth", "12Gb/s"], "bits or bytes"),
        (["--bandwidth", "12GB/s/s"], "--bandwidth"),
        (["--bandwidth", ""], "--bandwidth=''"),
        (["--memory", "1.5.5GB"], "--memory='1.5.5GB'"),
        (["--memory", "1GiB", "--budget", "nan"], "--budget"),
        (["--maximize", "memory", "--budget", "inf"], "--budget"),
        (["--model", "qwen3-8b", "--context", "32k", "--load-seconds", "nan"], "--load-seconds"),
        (["--model", "qwen3-8b", "--context", "32k", "--load-seconds", "1e-300"], "--load-seconds"),
        (["--model", "qwen3-8b", "--context", "9" * 5000], "number of tokens"),
        (["--model", "qwen3-8b", "--context", "32k", "--kv-bytes-per-token", "7"], "--model says"),
        (["--memory", "1GiB", "--sessions", "5"], "--context too"),
        (["--memory", "1GiB", "--nominal", "--reserve", "2GiB"], "--reserve='2GiB'"),
        (["--memory", "1GiB", "--nominal", "--system-disk"], "--nominal"),
        (["--memory", "1GiB", "--ttft-of", "p90"], "--trace"),
        (["--memory", "1GiB", "--ttft", "2"], "--memory='1GiB'"),
        (["--memory", "1GiB", "--name", "x"], "-o cr"),
        (["--memory", "1GiB", "--pool", "memory", "--disk", "PL0"], "has no disks"),
        (["--pool", "memory", "--maximize", "capacity", "--budget", "9"], "has no disks"),
        (["--list-models", "--memory", "1GiB"], "--list-models"),
        (["--memory", "1GiB", "--nodes", "5", "2"], "--nodes='5 2'"),
        (["--memory", "1GiB", "--instance", "none.*"], "loosen --instance"),
        (["--bandwidth", "1PB/s", *HERE], "no fleet"),
        (["--memory", "1GiB", "--io-size", "1"], "--io-size"),
    ],
)
def test_what_cannot_be_planned_says_why(capsys: pytest.CaptureFixture[str], arguments: list[str], text: str) -> None:
    assert text in error(capsys, *arguments)["text"]


NAMES = [
    (["--name", "Bad_Name"], "--name"), (["--name", "a" * 41], "at most 40"), (["--name", "1a"], "beginning with"),
    (["--name", ""], "--name"), (["--namespace", "X Y"], "--namespace"), (["--namespace", "-a"], "--namespace"),
    (["--rdma-resource", "rdma"], "DOMAIN/NAME"), (["--rdma-resource", "not a resource"], "DOMAIN/NAME"),
    (["--pool", "memory"], "plan with disks"), (["--reserve", "4092MiB", "--instance", "*.c9i.large"], "16 MiB"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "text"), NAMES)
def test_what_the_api_server_would_refuse_is_not_printed(
    capsys: pytest.CaptureFixture[str], arguments: list[str], text: str
) -> None:
    code = run(["plan", "--memory", "1MiB", *HERE, "-o", "cr", *arguments])
    found = capsys.readouterr()
    assert (code, found.out) == (2, "")
    assert text in found.err


def test_a_market_is_named_for_a_custom_resource(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--memory", "1GiB", "-o", "cr"]) == 2
    assert "say which market" in capsys.readouterr().err


def test_limits_of_the_custom_resource_are_the_operators() -> None:
    names = manifest.MOST_NAME_CHARACTERS
    assert names == MOST_NAME_CHARACTERS
    crd = yaml.safe_load((ROOT / "crds" / "polarkv.io_polarkvclusters.yaml").read_text())
    schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
    storage = schema["cacheNodes"]["properties"]["storage"]["properties"]
    assert storage["volumesPerNode"]["maximum"] == manifest.MOST_VOLUMES
    assert Terms().most_nodes == MOST_CACHE_NODES


@pytest.mark.parametrize("seed", range(6))
def test_every_custom_resource_fits_the_crd(capsys: pytest.CaptureFixture[str], seed: int) -> None:
    """Plans of every kind against the schema that the API server has, and the models that the operator reads."""
    dice = random.Random(seed)
    crd = yaml.safe_load((ROOT / "crds" / "polarkv.io_polarkvclusters.yaml").read_text())
    schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    sizes = ["--bandwidth", f"{dice.randint(1, 40)}GB/s", "--capacity", f"{dice.randint(1, 90)}TB"]
    sizes += ["--memory", f"{dice.randint(1, 900)}GiB", "--market", dice.choice(["alibaba-cn", "aws-us-east-1"])]
    more = dice.choice([[], ["--nominal"], ["--full-throughput"], ["--rdma-resource", "rdma/hca_a", "--arch", "any"]])
    code, out = plan(capsys, *sizes, *more, "--layout", dice.choice(["JBOD", "RAID0"]), "-o", "cr", "--name", "a" * 40)
    assert code == 0
    storage_class, cluster = yaml.safe_load_all(out)
    without_rules = json.loads(json.dumps(schema))
    jsonschema.Draft202012Validator(without_rules).validate(cluster)
    nodes = parse(cluster).spec.cache_nodes
    assert nodes.storage.storage_class_name == storage_class["metadata"]["name"]


def test_the_table_of_models(capsys: pytest.CaptureFixture[str]) -> None:
    code, out = plan(capsys, "--list-models", "--json")
    assert code == 0
    assert {"qwen3-235b-a22b": 192_512}.items() <= {m["name"]: m["kv_bytes_per_token"] for m in json.loads(out)}.items()
    code, out = plan(capsys, "--list-models")
    assert "192,512" in out
