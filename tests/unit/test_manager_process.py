"""A manager as a process: ready, killed, started again, told to end."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from polarkv_client import errors
from polarkv_client.layout import tenant_number
from polarkv_client.protocol import grants
from polarkv_client.protocol.messages import InventoryItem, Op, ReportInventory
from polarkv_client.states import Tier
from polarkv_dataplane.embedded.supervisor import STOP_S
from tests.support.managers import MIB, SECRETS, Client, FakeNode, ManagerProcess, extents, key, make_settings, stats
from tests.support.waiting import wait_until

TENANT = tenant_number("a")


@pytest.fixture(params=["", "sqlite"])
def process(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ManagerProcess]:
    url = f"sqlite://{tmp_path}/metadata.db" if request.param else ""
    with ManagerProcess(make_settings(tmp_path, ready_file=tmp_path / "ready.json", metadata_url=url)) as running:
        yield running


def test_it_says_where_it_listens_and_ends_cleanly(process: ManagerProcess) -> None:
    manager = process.start()
    announced = json.loads(process.ready_file.read_text(encoding="utf-8"))
    assert announced["pid"] == manager.pid
    client = Client(manager.tcp)
    node = FakeNode(manager.unix)
    client.store([key(1)])
    began = time.monotonic()
    assert process.end(signal.SIGTERM) == 0
    assert time.monotonic() - began < STOP_S
    with pytest.raises(errors.Unavailable):
        client.exists(key(1))
    wait_until(node.slab.closed.is_set, "the node to be told")
    node.close()
    client.close()
    assert not Path(manager.unix.removeprefix("unix://")).exists()


def test_a_killed_manager_serves_again_what_nodes_prove_and_never_what_they_cannot(process: ManagerProcess) -> None:
    first = process.start()
    keys = [key(n) for n in range(40)]
    with FakeNode(first.unix) as node, Client(first.tcp, name="before") as client:
        client.store(keys[:30])
        read = client.acquire(keys[:30])
        held = {extent.key: extent for extent in extents(read.grants)}
        open_ticket = client.begin(keys[30:])
        lease = read.lease
        process.end(signal.SIGKILL)
        wait_until(node.slab.closed.is_set, "the node to notice")
        incarnation = node.slab.registered.incarnation
    second = process.start()
    assert second.epoch > first.epoch
    memory = [InventoryItem(k, 1000, 7, TENANT, held[k].offset_bytes) for k in keys[:20]]
    disk = [InventoryItem(k, 1000, 7, TENANT) for k in keys[10:25]]
    with (
        FakeNode(second.unix, incarnation=incarnation, fresh=False, memory=memory, disk=disk) as node,
        Client(second.tcp) as client,
    ):
        assert node.slab.registered.incarnation == incarnation + 1
        assert client.exists(*keys) == [Tier.MEMORY] * 20 + [Tier.DISK] * 5 + [0] * 15
        # What the former life granted means nothing any more.
        assert set(client.commit(open_ticket.ticket, keys[30:])) == {1}
        client.release(lease)
        grant = grants.read(read.grants[0])
        for now in (0, grant.deadline_ms - 1):
            with pytest.raises(errors.Refused):
                grants.verify(
                    read.grants[0], SECRETS.grant_key, access=grants.Access.READ,
                    incarnation=node.slab.registered.incarnation, epoch=second.epoch, manager_now_ms=now,
                )  # fmt: skip
        again = client.acquire(keys[:20])
        assert set(again.outcomes) == {0}
        assert {e.key: e.offset_bytes for e in extents(again.grants)} == {k: held[k].offset_bytes for k in keys[:20]}
        assert again.lease != lease


def test_epochs_rise_even_when_lives_are_short(tmp_path: Path) -> None:
    with ManagerProcess(make_settings(tmp_path, ready_file=tmp_path / "ready.json")) as process:
        epochs = []
        for _ in range(2):
            epochs.append(process.start().epoch)
            process.end(signal.SIGKILL)
    assert epochs[0] < epochs[1]


def test_ten_thousand_entries_are_back_within_seconds(process: ManagerProcess) -> None:
    manager = process.start()
    count = 10_000
    memory = [InventoryItem(key(n), 1000, n, TENANT, n * 4096) for n in range(count // 2)]
    disk = [InventoryItem(key(n), 1000, n, TENANT) for n in range(count)]
    with (
        FakeNode(manager.unix, join=False, memory_bytes=64 * MIB, disk_bytes=1 << 40, fresh=False) as node,
        Client(manager.tcp) as client,
    ):
        node.attach_disk()
        began = time.monotonic()
        answers = []
        reports = (node.on_disk, disk[count // 2 :]), (node.slab, memory), (node.on_disk, disk[: count // 2])
        for side, items in reports:
            for at in range(0, len(items), 4096):
                message = ReportInventory(*side.life, items[at : at + 4096], at + 4096 >= len(items))
                answers.append(side.post(Op.REPORT_INVENTORY, message))
        for answer in answers:
            assert answer.get(timeout=30).status == 0
        seconds = time.monotonic() - began
        assert client.exists(*[key(n) for n in range(count)]).count(0) == 0
        print(f"{count} entries recovered in {seconds:.2f} s")
        assert seconds < 5
        assert stats(manager)["entries"] == count
