"""Cache nodes at a manager: register in pairs, prove what they hold, obey, and go."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from polarkv_client import errors
from polarkv_client.layout import tenant_number
from polarkv_client.protocol.messages import (
    Carve,
    Empty,
    Heartbeat,
    HeartbeatAnswer,
    InventoryItem,
    NodeList,
    Op,
    OperationDone,
    OperationResult,
    ReportInventory,
)
from polarkv_client.protocol.wire import decode_body
from polarkv_client.states import Tier
from tests.support.managers import (
    LONG_MS,
    MIB,
    OTHER_TOKEN,
    Client,
    FakeNode,
    NodeSide,
    Running,
    admin,
    key,
    make_settings,
    running_manager,
    stats,
)
from tests.support.waiting import wait_until

OK = OperationResult.OK
TENANT = tenant_number("b")


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Running]:
    with running_manager(make_settings(tmp_path)) as running:
        yield running


def in_memory(number: int, offset_bytes: int, length_bytes: int = 1000, checksum: int = 7) -> InventoryItem:
    return InventoryItem(key(number), length_bytes, checksum, TENANT, offset_bytes)


def on_disk(number: int, length_bytes: int = 1000, checksum: int = 7) -> InventoryItem:
    return InventoryItem(key(number), length_bytes, checksum, TENANT)


def node_view(manager: Running, name: str = "n1") -> dict[str, Any]:
    with admin(manager) as http:
        nodes = http.get("/v1/nodes").raise_for_status().json()["nodes"]
    return next(node for node in nodes if node["name"] == name)


def test_a_node_serves_once_both_roles_are_there_and_memory_is_proved(manager: Running) -> None:
    with FakeNode(manager.unix, join=False) as node, Client(manager.tcp) as client:
        registered = node.slab.registered
        assert (registered.number, registered.incarnation, registered.epoch) == (1, 1, manager.epoch)
        assert (registered.heartbeat_ms, registered.timeout_ms) == (100, LONG_MS)
        node.slab.inventory()
        assert node_view(manager)["state"] == "Joining"
        assert list(client.begin([key(1)]).outcomes) == [3]
        node.attach_disk(OK)
        assert node_view(manager)["state"] == "Active"
        client.store([key(1)])


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        ({"incarnation": 9}, "incarnation 9 is not that of the slab"),
        ({"pool": "another-pool"}, "pool 'another-pool' is not that of the slab"),
        ({"host_id": "elsewhere"}, "host_id 'elsewhere' is not that of the slab"),
        ({"node": "n2"}, "slab not registered yet: try again"),
        ({"disk_bytes": -1}, "disk_bytes=-1"),
        ({"volumes": 0}, "volumes=0"),
        ({"volumes": 257}, "volumes=257"),
    ],
)
def test_a_disk_server_must_belong_to_its_slab_server(manager: Running, overrides: dict[str, Any], text: str) -> None:
    with FakeNode(manager.unix, join=False) as node:
        with pytest.raises(errors.Refused, match=text):
            node.attach_disk(**overrides)
        node.attach_disk()


@pytest.mark.parametrize(
    ("overrides", "error", "text"),
    [
        ({"token": "wrong"}, errors.Unauthorized, "same secret file"),
        ({"wire_min": 5, "wire_max": 6}, errors.VersionMismatch, "upgrade"),
        ({"node": "a b"}, errors.Refused, "node='a b'"),
        ({"slab_bytes": 1000}, errors.Refused, "slab_bytes=1000"),
        ({"slab_bytes": 0}, errors.Refused, "slab_bytes=0"),
        ({"memory_bytes": 4096}, errors.Refused, "memory_bytes=4096"),
        ({"memory_bytes": (1 << 32) + 4096, "slab_bytes": 4096}, errors.Refused, "at most 1048576"),
        ({"role": "both"}, errors.Refused, "role='both'"),
    ],
)
def test_a_registration_that_makes_no_sense_is_refused(
    manager: Running, overrides: dict[str, Any], error: type[Exception], text: str
) -> None:
    with FakeNode(manager.unix, "good") as node:
        with pytest.raises(error, match=text):
            NodeSide(manager.unix, node.register(overrides.pop("role", "slab"), 0, **{"node": "bad", **overrides}))
        assert node_view(manager, "good")["state"] == "Active"


def test_what_a_node_proves_is_served_and_nothing_else(manager: Running) -> None:
    memory = [in_memory(1, 0), in_memory(2, 4096), in_memory(3, 8192), in_memory(9, 100)]  # the last one is no slot
    disk = [on_disk(2), on_disk(3, checksum=8), on_disk(4), on_disk(5, length_bytes=2 * MIB)]
    node = FakeNode(manager.unix, memory=memory, disk=disk, incarnation=4, fresh=False, auto=None)
    with node, Client(manager.tcp, OTHER_TOKEN) as client:
        assert node.slab.registered.incarnation == 5
        assert client.exists(*[key(n) for n in (1, 2, 3, 4, 5, 9)]) == [1, 1, 1, 2, 0, 0]
        carve = decode_body(node.slab.commands.get(timeout=30).body, Carve)
        assert (carve.incarnation, carve.base_bytes, carve.stride_bytes) == (5, 0, 4096)
        commands = [node.on_disk.command() for _ in range(4)]
        # Memory is written to disk at once, whatever the disk says later; one file could never be loaded.
        assert {c.key for op, c in commands if op == Op.OFFLOAD} == {key(1), key(2), key(3)}
        assert {c.key for op, c in commands if op == Op.PURGE} == {key(5)}
        assert stats(manager)["entries_by_state"]["Disk"] == 1
        with admin(manager) as http:
            tenants = {t["name"]: t["used_bytes"] for t in http.get("/v1/tenants").json()["tenants"]}
        assert tenants == {"a": 0, "b": 4 * 4096}


def test_a_long_inventory_lets_others_be_served_and_keeps_order(manager: Running) -> None:
    with FakeNode(manager.unix, join=False, disk_bytes=1 << 40) as node, Client(manager.tcp) as client:
        node.attach_disk(OK)
        node.slab.inventory()
        items = [on_disk(n) for n in range(20_000)]
        life = node.on_disk.life
        answers = [
            node.on_disk.post(Op.REPORT_INVENTORY, ReportInventory(*life, items[at : at + 5000]))
            for at in range(0, len(items), 5000)
        ]
        answers.append(node.on_disk.post(Op.REPORT_INVENTORY, ReportInventory(*life, [], last=True)))
        client.store([key(90_000)])
        for answer in answers:
            assert answer.get(timeout=30).status == 0
        assert client.exists(key(0), key(19_999)) == [Tier.DISK, Tier.DISK]
        assert stats(manager)["counts"]["recoveries"] == 1


def test_an_active_node_says_whether_all_that_it_holds_is_known(manager: Running) -> None:
    with FakeNode(manager.unix, join=False) as node:
        node.slab.inventory()
        node.attach_disk(OK)
        node.on_disk.inventory([on_disk(1)], last=False)
        view = node_view(manager)
        assert (view["state"], view["inventory_complete"]) == ("Active", False)
        with admin(manager) as http:
            assert 'polarkv_node_inventory_complete{node="n1"} 0.0' in http.get("/metrics").text
        node.on_disk.inventory()
        assert node_view(manager)["inventory_complete"]
    wait_until(lambda: node_view(manager)["state"] == "Down", "the node to be lost")
    assert not node_view(manager)["inventory_complete"]
    with FakeNode(manager.unix, join=False) as again:
        again.slab.inventory()
        again.attach_disk(OK)
        view = node_view(manager)
        assert (view["state"], view["inventory_complete"]) == ("Active", False)


def test_bytes_are_counted_by_node_and_over_its_lives(manager: Running) -> None:
    keys = [key(n * 0x0505_0505) for n in range(40)]
    with FakeNode(manager.unix, "n1"), Client(manager.tcp) as client:
        with FakeNode(manager.unix, "n2"):
            client.store(keys)
            client.release(client.acquire(keys).lease)
            views = [node_view(manager, name) for name in ("n1", "n2")]
            assert [view["read_bytes"] for view in views] == [view["stored_bytes"] for view in views]
            assert sum(view["read_bytes"] for view in views) == stats(manager)["counts"]["read_bytes"] == 40_000
            assert all(view["read_bytes"] > 0 for view in views)
        with FakeNode(manager.unix, "n2", incarnation=1):
            assert node_view(manager, "n2")["read_bytes"] == views[1]["read_bytes"]
            with admin(manager) as http:
                text = http.get("/metrics").text
            assert f'polarkv_node_stored_bytes_total{{node="n2"}} {float(views[1]["stored_bytes"])}' in text


@pytest.mark.parametrize("role", ["slab", "disk"])
def test_losing_either_connection_loses_the_node_and_only_it(manager: Running, role: str) -> None:
    with FakeNode(manager.unix, "n1") as node, FakeNode(manager.unix, "n2") as other, Client(manager.tcp) as client:
        keys = [bytes(24) + n.to_bytes(8, "little") for n in range(0, 100_000, 1000)]
        client.store(keys)
        both = client.exists(*keys)
        assert both == [1] * 100
        (node.slab if role == "slab" else node.on_disk).close()
        wait_until(lambda: 0 in client.exists(*keys), "the node's keys to be misses")
        left = client.exists(*keys).count(1)
        assert 0 < left < 100
        assert [info.name for info in client.call(Op.LIST_NODES, Empty(), NodeList).nodes] == ["n2"]
        assert node_view(manager)["state"] == "Down"
        survivor = node.on_disk if role == "slab" else node.slab
        wait_until(survivor.closed.is_set, "the other role to be told")
        assert not other.slab.closed.is_set()
        node.close()
        with FakeNode(manager.unix, "n1", incarnation=1, fresh=False) as again:
            assert again.slab.registered.incarnation == 2
            assert again.slab.registered.number == node.slab.registered.number


def test_a_silent_role_loses_the_node(tmp_path: Path) -> None:
    with running_manager(make_settings(tmp_path, heartbeat_ms=50, node_timeout_ms=1500)) as manager:
        for silent in ("slab", "disk"):
            with FakeNode(manager.unix, silent) as node:
                wait_until(lambda node=node: node.slab.beat(), "a heartbeat")  # type: ignore[misc]
                (node.slab if silent == "slab" else node.on_disk).beating = False
                wait_until(lambda name=silent: node_view(manager, name)["state"] == "Down", "the node to be lost")  # type: ignore[misc]
                wait_until(node.slab.closed.is_set, "its connections to be closed")
                wait_until(node.on_disk.closed.is_set, "its connections to be closed")


def test_an_operation_that_is_never_answered_loses_the_node(tmp_path: Path) -> None:
    settings = make_settings(tmp_path, operation_timeout_ms=1000)
    with running_manager(settings) as manager, FakeNode(manager.unix, auto=None) as node, Client(manager.tcp) as client:
        client.store([key(1)])
        node.on_disk.command()
        wait_until(lambda: client.exists(key(1)) == [0], "the node to be lost")


def test_messages_of_another_life_are_refused(manager: Running) -> None:
    with FakeNode(manager.unix, auto=None) as node, Client(manager.tcp) as client:
        client.store([key(1)])
        _, command = node.on_disk.command()
        number, incarnation = node.on_disk.life
        for life in ((number, incarnation + 1), (number + 1, incarnation), (number, 0)):
            with pytest.raises(errors.Refused, match="is over"):
                node.slab.ask(Op.HEARTBEAT, Heartbeat(*life, {}), HeartbeatAnswer)
            with pytest.raises(errors.Refused, match="is over"):
                node.on_disk.ask(Op.OPERATION_DONE, OperationDone(*life, command.operation, 0), Empty)
            with pytest.raises(errors.Refused, match="is over"):
                node.slab.ask(Op.REPORT_INVENTORY, ReportInventory(*life, [in_memory(5, 0)], True), Empty)
        assert stats(manager)["entries_by_state"]["Offloading"] == 1
        node.on_disk.done(command)
        node.on_disk.done(command)  # an answer that comes twice changes nothing
        assert stats(manager)["entries_by_state"]["MemoryAndDisk"] == 1
        assert stats(manager)["counts"]["operations_stale"] == 1


def test_impossible_inventories_and_results_close_the_connection(manager: Running) -> None:
    for item in (InventoryItem(b"short", 1, 1, 1, 0), in_memory(1, 1 << 40), in_memory(1, -1), in_memory(1, 0, -5)):
        with FakeNode(manager.unix, join=False) as node:
            with pytest.raises(errors.ProtocolError, match="inventory item"):
                node.slab.inventory([item])
            wait_until(node.slab.closed.is_set, "the connection to be closed")
    with FakeNode(manager.unix) as node, pytest.raises(errors.ProtocolError, match="no result"):
        node.on_disk.ask(Op.OPERATION_DONE, OperationDone(*node.on_disk.life, 1, 99), Empty)
    with FakeNode(manager.unix) as node, pytest.raises(errors.ProtocolError, match="cannot ask"):
        node.slab.ask(Op.OPERATION_DONE, OperationDone(*node.slab.life, 1, 0), Empty)


def test_bytes_count_as_local_only_where_both_roles_name_one_pool(manager: Running) -> None:
    with FakeNode(manager.unix, auto=None) as node, Client(manager.tcp) as client:
        client.store([key(1), key(2)])
        node.on_disk.done(node.on_disk.command()[1], moved_bytes=4096)
        counts = stats(manager)["counts"]
        assert (counts["local_bytes"], counts.get("cross_node_bytes", 0)) == (4096, 0)
        node.on_disk.pool = "another-pool"
        node.on_disk.done(node.on_disk.command()[1], moved_bytes=8192)
        counts = stats(manager)
        assert (counts["counts"]["local_bytes"], counts["cross_node_bytes"]) == (4096, 8192)
        with admin(manager) as http:
            assert "polarkv_tiering_cross_node_bytes_total 8192.0" in http.get("/metrics").text


def test_a_second_slab_server_of_a_name_ends_the_first_ones_life(manager: Running) -> None:
    with FakeNode(manager.unix) as first, Client(manager.tcp) as client:
        client.store([key(1)])
        with FakeNode(manager.unix, incarnation=1) as second:
            assert second.slab.registered.incarnation == 2
            wait_until(first.slab.closed.is_set, "the first one to be closed")
            wait_until(first.on_disk.closed.is_set, "the first one to be closed")
            assert client.exists(key(1)) == [0]
            client.store([key(1)])


def test_a_second_disk_server_ends_the_life_too(manager: Running) -> None:
    with FakeNode(manager.unix) as node:
        with pytest.raises(errors.Refused, match="must register again"):
            NodeSide(manager.unix, node.register("disk", 1))
        wait_until(node.slab.closed.is_set, "the slab server to be told")


def test_slots_that_were_not_fresh_rest_before_they_are_granted(tmp_path: Path) -> None:
    settings = make_settings(tmp_path, write_ticket_ms=1500, read_lease_ms=1500, quarantine_ms=500)
    with (
        running_manager(settings) as manager,
        Client(manager.tcp) as client,
        FakeNode(manager.unix, fresh=False, incarnation=3),
    ):
        assert list(client.begin([key(1)]).outcomes) == [3]
        client.store([key(1)])  # which waits


def test_a_drain_flushes_first_and_can_be_cancelled(manager: Running) -> None:
    with FakeNode(manager.unix, auto=None) as node, Client(manager.tcp) as client, admin(manager) as http:
        client.store([key(1), key(2)])
        view = http.post("/v1/nodes/n1/drain", json={"mode": "Flush"}).raise_for_status().json()
        assert view["state"] == "Draining"
        assert list(client.begin([key(5)]).outcomes) == [3]
        for _ in range(2):
            node.on_disk.done(node.on_disk.command()[1])
        wait_until(lambda: node_view(manager)["state"] == "Drained", "the drain to end")
        http.post("/v1/nodes/n1/cancel-drain").raise_for_status()
        assert node_view(manager)["state"] == "Active"
        assert client.exists(key(1), key(2)) == [1, 1]


def test_registering_over_tcp_and_unix_is_the_same(manager: Running) -> None:
    with FakeNode(manager.tcp) as node, Client(manager.unix) as client:
        client.store([key(1)])
        assert node.slab.beat().manager_now_ms > 0
