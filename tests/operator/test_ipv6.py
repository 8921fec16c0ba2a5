"""A Kubernetes cluster whose pods have IPv6 addresses alone: what the operator makes serves there, on real sockets."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import httpx
import kopf
import pytest

from polarkv_client.endpoints import parse_endpoint
from polarkv_client.listening import EVERYWHERE, bind_tcp
from polarkv_client.sync import SyncClient
from polarkv_operator import handlers
from polarkv_operator.api import parse
from polarkv_operator.resources import cache_nodes, manager, names, settings
from polarkv_operator.settings import OperatorSettings
from polarkv_operator.webhooks.settings import WebhookSettings
from tests.contract.peers import SIZE, chunks
from tests.operator.support.clusters import body
from tests.operator.support.webhooks import HeldApi, running
from tests.support.families import needs_ipv6
from tests.support.managers import TOKEN, Running, admin, make_settings, running_manager
from tests.support.ports import reserved_ports
from tests.support.processes import server_process
from tests.support.waiting import wait_until

POD_IP = "::1"
MIB = 1 << 20
FAMILIES = [pytest.param(POD_IP, marks=needs_ipv6), "127.0.0.1"]


def at(address: str, host: str) -> str:
    """An address of a server that listens everywhere, seen from ``host``."""
    return address.replace(f"[{EVERYWHERE}]", written(host))


def written(host: str) -> str:
    """As a URL has it."""
    return f"[{host}]" if ":" in host else host


@pytest.mark.parametrize("host", FAMILIES)
def test_a_cluster_serves_pods_of_either_family(tmp_path: Path, host: str) -> None:
    """With the addresses that the operator writes, in the servers' own processes, each at its pod's address."""
    told = settings.manager_settings(parse(body()))["manager"]
    rpc = told["rpc"][0].replace(f":{names.MANAGER_RPC_PORT}", ":0")
    with running_manager(make_settings(tmp_path, rpc=(rpc,), http_host=told["http_host"])) as running_one:
        endpoint = at(running_one.tcp, host)
        assert parse_endpoint(endpoint).host == host
        running_one.http = at(running_one.http, host)
        with reserved_ports(2) as ports:
            serve_and_load(running_one, endpoint, host, tmp_path, ports)


def serve_and_load(running_one: Running, endpoint: str, host: str, folder: Path, ports: list[int]) -> None:
    told = settings.cache_node_settings(parse(body()))
    common = {"node": "node-0", "manager": endpoint, "secret_file": folder / "secret"}
    slab = common | {
        "listen_host": told["slab"]["listen_host"], "metrics_host": told["slab"]["metrics_host"],
        "metrics_port": ports[0], "advertise_host": host, "memory_bytes": 16 * MIB, "slab_bytes": MIB,
        "unix_socket": str(folder / "slab.sock"),
    }  # fmt: skip
    disk = common | {
        "metrics_host": told["disk"]["metrics_host"], "metrics_port": ports[1],
        "slab_socket": str(folder / "slab.sock"), "directories": [folder / "disk"],
        "capacity_bytes": 64 * MIB,
    }  # fmt: skip
    with (
        server_process("slab", slab, folder / "slab.log"),
        server_process("disk", disk, folder / "disk.log"),
        admin(running_one) as http,
    ):

        def active() -> bool:
            nodes = http.get("/v1/nodes").raise_for_status().json()["nodes"]
            return [(node["state"], node["inventory_complete"]) for node in nodes] == [("Active", True)]

        wait_until(active, "the cache node to be Active", 30)
        for port in ports:  # the manager knows sooner than the server, which has yet to hear its answer
            url = f"http://{written(host)}:{port}/readyz"
            wait_until(partial(is_well, url), f"{url} to be well")
        keys, payloads, targets = chunks(9)
        with SyncClient.connect(endpoint=endpoint, token=TOKEN, transport="tcp") as client:
            assert client.store(keys, payloads).stored == 9
            loaded = client.load(keys, targets)
            assert (loaded.hits, loaded.bytes_loaded, targets) == (9, 9 * SIZE, payloads)
            assert [node.transport for node in client.status().nodes] == ["tcp"]


def is_well(url: str) -> bool:
    return httpx.get(url, trust_env=False).status_code == 200


class Threads:
    """An operator's threads, one of which may be lost."""

    def __init__(self) -> None:
        self.alive = True
        self.election = self
        self.settings = OperatorSettings(image="polarkv:1")

    def leads(self) -> bool:
        return True

    def start(self) -> None: ...

    def stop(self) -> None: ...


@pytest.mark.asyncio
@pytest.mark.parametrize("host", FAMILIES)
async def test_the_operators_health_answers_either_family(host: str) -> None:
    """As the kubelet's probes ask: at the pod's own address."""
    threads, sock = Threads(), bind_tcp("health_port", EVERYWHERE, 0)
    made = handlers.Handlers(threads, kopf.OperatorRegistry(), sock)  # type: ignore[arg-type]
    await made.startup(kopf.OperatorSettings())
    try:
        url = f"http://{written(host)}:{sock.getsockname()[1]}/healthz"
        async with httpx.AsyncClient(trust_env=False) as http:
            answer = await http.get(url)
            assert (answer.status_code, answer.text) == (200, "leads\n")
            threads.alive = False
            answer = await http.get(url)
            assert answer.status_code == 503 and "thread" in answer.text
    finally:
        await made.cleanup()


@pytest.mark.parametrize("host", FAMILIES)
def test_the_webhooks_health_answers_either_family(host: str) -> None:
    with running(WebhookSettings(image="polarkv:1", port=0, health_port=0), HeldApi()) as webhook:
        health = httpx.get(f"http://{written(host)}:{webhook.health_port}/healthz", trust_env=False)
        assert health.status_code == 200


def test_services_ask_for_an_address_of_each_family_that_there_is() -> None:
    cluster = parse(body())
    for service in (manager.service(cluster), cache_nodes.service(cluster)):
        assert service["spec"]["ipFamilyPolicy"] == "PreferDualStack"
        assert "ipFamilies" not in service["spec"]  # which comes first is the Kubernetes cluster's to say
