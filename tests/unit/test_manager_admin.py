"""The admin API of a manager, its health checks and its metrics."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from polarkv_client.protocol.messages import OperationResult
from polarkv_client.states import Tier
from tests.support.managers import (
    ADMIN_TOKEN,
    LONG_MS,
    MIB,
    OTHER_TOKEN,
    SECRET,
    SECRETS,
    TOKEN,
    Client,
    FakeNode,
    Running,
    admin,
    key,
    make_settings,
    running_manager,
    stats,
)
from tests.support.waiting import wait_until


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Running]:
    with running_manager(make_settings(tmp_path)) as running:
        yield running


@pytest.fixture
def http(manager: Running) -> Iterator[httpx.Client]:
    with admin(manager) as client:
        yield client


def metric(http: httpx.Client, name: str) -> float:
    """The value of one line of /metrics."""
    match = re.search(rf"^{re.escape(name)} (.*)$", http.get("/metrics").raise_for_status().text, re.MULTILINE)
    assert match is not None, f"no metric {name}"
    return float(match[1])


def test_health_is_about_the_process_and_readiness_about_nodes(manager: Running, http: httpx.Client) -> None:
    assert http.get("/healthz").json() == {"status": "ok", "epoch": manager.epoch, "active_nodes": 0}
    assert http.get("/readyz").status_code == 503
    with FakeNode(manager.unix):
        assert http.get("/readyz").json()["active_nodes"] == 1
    assert "swagger" in http.get("/docs").text
    paths = http.get("/openapi.json").json()["paths"]
    wanted = ("nodes", "stats", "entries", "pin", "evict", "tenants", "settings")
    assert {f"/v1/{name}" for name in wanted} <= set(paths)


@pytest.mark.parametrize("path", ["nodes", "stats", "entries", "tenants", "settings", f"entries/{'00' * 32}"])
@pytest.mark.parametrize("token", ["?", TOKEN, SECRETS.node_token, ADMIN_TOKEN + "x"])
def test_everything_under_v1_needs_the_admin_token(manager: Running, path: str, token: str) -> None:
    with admin(manager, token) as http:
        answer = http.get(f"/v1/{path}")
    assert answer.status_code == 401
    assert set(answer.json()) == {"detail", "field", "value", "fix"}
    assert token not in answer.text


def test_secrets_are_in_no_answer(manager: Running, http: httpx.Client) -> None:
    paths = ("/v1/settings", "/v1/stats", "/v1/tenants", "/metrics", "/v1/nodes")
    text = "".join(http.get(path).text for path in paths)
    for secret in (TOKEN, OTHER_TOKEN, ADMIN_TOKEN, SECRET.decode(), SECRETS.node_token, SECRETS.grant_key.hex()):
        assert secret not in text
    assert http.get("/v1/settings").json()["read_lease_ms"] == LONG_MS


def test_entries_are_listed_in_order_page_by_page(manager: Running, http: httpx.Client) -> None:
    with FakeNode(manager.unix), Client(manager.tcp) as client:
        keys = sorted((n * 7919 % 65536).to_bytes(2, "big") + bytes(30) for n in range(300))
        client.store(keys)
        listed: list[str] = []
        after = ""
        while True:
            page = http.get("/v1/entries", params={"limit": 37, "after": after}).raise_for_status().json()
            listed += [entry["key"] for entry in page["entries"]]
            if page["next"] is None:
                break
            after = page["next"]
        assert listed == [k.hex() for k in keys]
        wanted = [k.hex() for k in keys if k.hex().startswith("3")]
        assert [e["key"] for e in http.get("/v1/entries", params={"prefix": "3"}).json()["entries"]] == wanted
        client.store([bytes([0x31]) * 32])
        assert len(http.get("/v1/entries", params={"prefix": "3"}).json()["entries"]) == len(wanted) + 1
        view = http.get(f"/v1/entries/{keys[5].hex()}").json()
        assert (view["length_bytes"], view["stride_bytes"], view["node"], view["tenant"]) == (1000, 4096, "n1", "a")
        missing = http.get(f"/v1/entries/{'ff' * 32}")
        assert (missing.status_code, missing.json()["field"]) == (404, "key")


@pytest.mark.parametrize(
    ("method", "path", "body", "field"),
    [
        ("GET", "/v1/entries?limit=0", None, "limit"),
        ("GET", "/v1/entries?limit=many", None, "limit"),
        ("GET", "/v1/entries?prefix=xyz", None, "prefix"),
        ("GET", "/v1/entries/abc", None, "key"),
        ("POST", "/v1/pin", {"keys": ["abc"], "ttl_ms": 5}, "keys.0"),
        ("POST", "/v1/pin", {"all": True}, "ttl_ms"),
        ("POST", "/v1/pin", {"all": True, "ttl_ms": -1}, "ttl_ms"),
        ("POST", "/v1/evict", {}, "body"),
        ("POST", "/v1/evict", {"all": True, "keys": ["00" * 32]}, "body"),
        ("POST", "/v1/evict", {"all": True, "purgee": True}, "purgee"),
        ("POST", "/v1/nodes/n1/drain", {"mode": "Explode"}, "mode"),
        ("PUT", "/v1/tenants/a", {"quota_bytes": -5}, "quota_bytes"),
        ("PUT", "/v1/tenants/a%20b", {"quota_bytes": 5}, "name"),
    ],
)
def test_bad_requests_name_field_value_and_fix(
    http: httpx.Client, method: str, path: str, body: dict[str, Any] | None, field: str
) -> None:
    answer = http.request(method, path, json=body)
    assert answer.status_code == 422
    assert answer.json()["field"] == field
    assert answer.json()["fix"]


def test_bodies_are_bounded(http: httpx.Client) -> None:
    assert http.post("/v1/evict", content=b" " * (9 << 20)).status_code == 413
    assert http.post("/v1/evict", content=iter([b"{}"])).status_code == 413  # of unknown length
    assert http.post("/v1/evict", content=b"{").status_code == 422


def test_unknown_and_lost_nodes_cannot_be_drained(manager: Running, http: httpx.Client) -> None:
    assert http.post("/v1/nodes/n1/drain", json={}).status_code == 404
    with FakeNode(manager.unix, join=False):
        joining = http.post("/v1/nodes/n1/drain", json={})
        assert joining.status_code == 409 and "Joining" in joining.json()["detail"]
    wait_until(lambda: "Down" in http.get("/v1/nodes").text, "the node to be lost")
    assert http.post("/v1/nodes/n1/drain", json={}).status_code == 409


def test_nodes_come_with_the_managers_life_and_age(manager: Running, http: httpx.Client) -> None:
    answer = http.get("/v1/nodes").json()
    assert answer["epoch"] == manager.epoch
    assert 0 < answer["uptime_s"] < 60


def test_pins_keep_entries_until_they_end(manager: Running, http: httpx.Client) -> None:
    with FakeNode(manager.unix), Client(manager.tcp) as client:
        keys = [key(n) for n in range(3)]
        client.store(keys)
        answer = http.post("/v1/pin", json={"keys": [keys[0].hex(), key(99).hex()], "ttl_ms": 60_000}).json()
        assert answer == {"pinned": 1, "not_now": 1}
        assert 0 < http.get(f"/v1/entries/{keys[0].hex()}").json()["pinned_ms"] <= 60_000
        assert stats(manager)["pinned_bytes"] == 4096
        assert http.post("/v1/pin", json={"all": True, "ttl_ms": 0}).json() == {"pinned": 3, "not_now": 0}
        assert stats(manager)["pinned_bytes"] == 0
        assert http.post("/v1/pin", json={"all": True, "ttl_ms": 1000}).json()["pinned"] == 3


def test_evict_drops_memory_copies_and_purge_everything(manager: Running, http: httpx.Client) -> None:
    with FakeNode(manager.unix, auto=None) as node, Client(manager.tcp) as client:
        keys = [key(n) for n in range(3)]
        client.store(keys)
        for _ in range(2):
            node.on_disk.done(node.on_disk.command()[1])
        assert http.post("/v1/evict", json={"all": True}).json() == {"evicted": 2, "not_now": 1}
        assert sorted(client.exists(*keys)) == [Tier.MEMORY, Tier.DISK, Tier.DISK]
        node.on_disk.auto = OperationResult.OK
        node.on_disk.done(node.on_disk.command()[1])
        assert http.post("/v1/evict", json={"all": True, "purge": True}).json() == {"evicted": 3, "not_now": 0}
        assert client.exists(*keys) == [0, 0, 0]
        wait_until(lambda: stats(manager)["entries"] == 0, "the files to be deleted")


def test_evicting_everything_never_asks_more_of_a_disk_than_it_can_answer_in_time(tmp_path: Path) -> None:
    settings = make_settings(tmp_path, operations_per_node=4)
    with (
        running_manager(settings) as manager,
        admin(manager) as http,
        Client(manager.tcp) as client,
        FakeNode(manager.unix) as node,
    ):
        client.store([key(n) for n in range(2000)])
        wait_until(lambda: stats(manager)["entries_by_state"]["MemoryAndDisk"] == 2000, "the offloads")
        assert http.post("/v1/evict", json={"all": True, "purge": True}).json()["evicted"] == 2000
        wait_until(lambda: stats(manager)["entries"] == 0, "the files to be deleted")
        assert not node.slab.closed.is_set()


def test_quotas_are_set_and_unset(manager: Running, http: httpx.Client) -> None:
    with FakeNode(manager.unix), Client(manager.tcp, OTHER_TOKEN) as client:
        assert list(client.begin([key(1)], 900_000).outcomes) == [0]
        assert list(client.begin([key(2)], 900_000).outcomes) == [4]
        view = http.put("/v1/tenants/b", json={"quota_bytes": 10 * MIB}).json()
        assert (view["quota_bytes"], view["quota_from"]) == (10 * MIB, "admin")
        assert list(client.begin([key(2)], 900_000).outcomes) == [0]
        view = http.put("/v1/tenants/b", json={"quota_bytes": None}).json()
        assert (view["quota_bytes"], view["quota_from"]) == (MIB, "file")
        assert list(client.begin([key(3)], 900_000).outcomes) == [4]


def test_metrics_say_what_happened(manager: Running, http: httpx.Client) -> None:
    with FakeNode(manager.unix) as node, Client(manager.tcp) as client:
        node.slab.counters = {'polarkv_slab_errors_total{kind="x"}': 3.0, "polarkv_pool_bytes": 5.0, "bad name": 1.0}
        keys = [key(n) for n in range(4)]
        client.store(keys)
        client.exists(*keys)
        client.release(client.acquire([*keys, key(9)]).lease)
        wait_until(lambda: metric(http, 'polarkv_entries{state="MemoryAndDisk"}') == 4, "the offloads")
        assert metric(http, 'polarkv_hits_total{tier="memory"}') == 4
        assert metric(http, 'polarkv_hits_total{tier="disk"}') == 0
        assert metric(http, "polarkv_misses_total") == 1
        assert metric(http, 'polarkv_stores_total{outcome="granted"}') == 4
        assert metric(http, "polarkv_stored_bytes_total") == 4000
        assert metric(http, "polarkv_read_bytes_total") == 4000
        assert metric(http, 'polarkv_lookup_hits_total{tier="memory"}') == 4
        assert metric(http, 'polarkv_operations_total{result="ok"}') == 4
        assert metric(http, "polarkv_tiering_local_bytes_total") == 4000
        assert metric(http, "polarkv_tiering_cross_node_bytes_total") == 0
        assert metric(http, 'polarkv_node_state{node="n1",state="Active"}') == 1
        assert metric(http, 'polarkv_memory_used_bytes{node="n1"}') == 4 * 4096
        assert metric(http, 'polarkv_tenant_used_bytes{tenant="a"}') == 4 * 4096
        wait_until(lambda: "polarkv_pool_bytes{" in http.get("/metrics").text, "a heartbeat")
        assert metric(http, 'polarkv_slab_errors_total{kind="x",node="n1",role="slab"}') == 3
        assert "bad" not in http.get("/metrics").text


def test_counters_that_contradict_one_another_do_not_break_the_page(manager: Running, http: httpx.Client) -> None:
    with FakeNode(manager.unix) as node:
        node.slab.counters = {'polarkv_x_total{a="1"}': 1.0, "polarkv_hits_total": 9.0, 'polarkv_y{node="z"}': 1.0}
        node.on_disk.counters = {"polarkv_x_total": 2.0, "polarkv_entries": 7.0}
        wait_until(lambda: "polarkv_x_total{" in http.get("/metrics").text, "a heartbeat")
        assert http.get("/metrics").text.count("# TYPE polarkv_hits_total") == 1
        assert http.get("/metrics").text.count("# TYPE polarkv_x_total") == 1
