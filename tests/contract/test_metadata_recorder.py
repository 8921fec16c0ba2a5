"""Metadata written behind a real manager, recalled by its next life, and a database that goes away meanwhile."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from polarkv_client.layout import tenant_number
from polarkv_client.protocol.messages import BeginStore, InventoryItem, Op
from polarkv_client.protocol.wire import encode_frame
from polarkv_client.states import EntryState
from polarkv_dataplane.manager.records.model import Entry, Tenant
from polarkv_dataplane.manager.shell.metadata import make_store
from polarkv_dataplane.manager.shell.metadata.recorder import Recorder
from polarkv_dataplane.manager.shell.metadata.store import Batch, MetadataStore, NodeRow, Recalled, Remembered
from tests.support import mariadb, postgres
from tests.support.databases import DatabaseServer
from tests.support.managers import (
    Client,
    FakeNode,
    Running,
    admin,
    deadline,
    key,
    make_settings,
    running_manager,
    stats,
)
from tests.support.waiting import wait_until

TENANT = tenant_number("a")
MINUTE_MS = 60_000


def looked_up(url: str, *keys: bytes) -> dict[bytes, Recalled]:
    """What the store remembers, read through a connection of one's own."""

    async def run() -> dict[bytes, Recalled]:
        store = make_store(url)
        await store.open()
        try:
            return await store.look_up(keys)
        finally:
            await store.close()

    return asyncio.run(run())


def files(*numbers: int) -> list[InventoryItem]:
    return [InventoryItem(key(n), 1000, 7, TENANT) for n in numbers]


def test_the_next_life_recalls_pins_recency_numbers_and_quotas(tmp_path: Path, url: str) -> None:
    settings = make_settings(tmp_path, metadata_url=url)
    keys = [key(n) for n in range(4)]
    with running_manager(settings) as manager, admin(manager) as http:
        with FakeNode(manager.unix, "n0"), FakeNode(manager.unix, "n1") as node, Client(manager.tcp) as client:
            assert node.slab.registered.number == 2
            http.post("/v1/nodes/n0/drain", json={}).raise_for_status()
            for k in (keys[2], keys[0], keys[3]):  # their order is their recency
                client.store([k])
                wait_until(lambda k=k: looked_up(url, k).get(k, Recalled(0, 0)).recency_ms, "it to be written")  # type: ignore[misc]
            http.post("/v1/pin", json={"keys": [keys[3].hex()], "ttl_ms": MINUTE_MS}).raise_for_status()
            http.put("/v1/tenants/b", json={"quota_bytes": 12345}).raise_for_status()
            wait_until(lambda: looked_up(url, keys[3])[keys[3]].pinned_until_ms, "the pin to be written")
        first_epoch = manager.epoch
    with running_manager(settings) as manager, admin(manager) as http, Client(manager.tcp) as client:
        assert manager.epoch > first_epoch
        assert client.exists(*keys) == [0] * 4  # nothing is believed that no node proves
        view = next(t for t in http.get("/v1/tenants").json()["tenants"] if t["name"] == "b")
        assert (view["quota_bytes"], view["quota_from"]) == (12345, "admin")
        # Sixteen slots, five files.
        sizes: dict[str, Any] = {"memory_bytes": 65536, "slab_bytes": 65536, "disk_bytes": 5 * 4096}
        with FakeNode(manager.unix, "n1", disk=files(0, 1, 3), auto=None, **sizes) as node:
            assert (node.slab.registered.number, node.slab.registered.incarnation) == (2, 2)
            pinned = f"/v1/entries/{keys[3].hex()}"
            wait_until(lambda: http.get(pinned).json()["pinned_ms"] > 0, "the pin to be recalled")
            assert http.get(pinned).json()["pinned_ms"] <= MINUTE_MS
            wait_until(lambda: keys[2] not in looked_up(url, *keys), "what was not proved to be forgotten")
            assert set(looked_up(url, *keys)) == {keys[0], keys[1], keys[3]}
            # More than fits: the file of which nothing was known goes first, then the least recent, never the pinned.
            client.store([key(50 + n) for n in range(16)])
            client.connection.send(encode_frame(Op.BEGIN_STORE, 9, BeginStore(key(90), [1000], 20_000)), deadline())
            gone: list[bytes] = []
            while len(gone) < 2:
                op, command = node.on_disk.command()
                if op is Op.PURGE:
                    gone.append(command.key)
                if command.operation:
                    node.on_disk.done(command)
            assert gone == [keys[1], keys[0]]


def test_an_entry_that_goes_is_forgotten_and_a_lost_nodes_entries_are_not(tmp_path: Path, url: str) -> None:
    with running_manager(make_settings(tmp_path, metadata_url=url)) as manager, admin(manager) as http:
        with FakeNode(manager.unix), Client(manager.tcp) as client:
            client.store([key(1), key(2)])
            wait_until(lambda: len(looked_up(url, key(1), key(2))) == 2, "both to be written")
            http.post("/v1/evict", json={"keys": [key(1).hex()], "purge": True}).raise_for_status()
            wait_until(lambda: key(1) not in looked_up(url, key(1)), "it to be forgotten")
        wait_until(lambda: stats(manager)["entries"] == 0, "the node to be lost")
        with FakeNode(manager.unix, incarnation=1, disk=files(2)):
            wait_until(lambda: stats(manager)["counts"].get("recoveries", 0) == 2, "the node to come back")
        assert set(looked_up(url, key(1), key(2))) == {key(2)}


def serve_a_little(manager: Running, first: int) -> float:
    """Store, read and look up; the longest call in seconds."""
    longest = 0.0
    with Client(manager.tcp) as client:
        for n in range(first, first + 30):
            calls: list[Callable[[], Any]] = [
                lambda n=n: client.store([key(n)]),  # type: ignore[misc]
                lambda n=n: client.release(client.acquire([key(n)]).lease),  # type: ignore[misc]
            ]
            for call in calls:
                began = time.monotonic()
                call()
                longest = max(longest, time.monotonic() - began)
    return longest


@pytest.mark.parametrize(
    "server",
    [
        pytest.param(postgres.a_server, id="postgres", marks=pytest.mark.postgres),
        pytest.param(mariadb.a_server, id="mariadb", marks=pytest.mark.mariadb),
    ],
)
def test_a_database_that_stops_hangs_or_dies_never_stops_the_cache(
    tmp_path: Path, server: Callable[[], AbstractContextManager[DatabaseServer]]
) -> None:
    with server() as database:
        settings = make_settings(tmp_path, metadata_url=database.url, metadata_timeout_ms=500)
        with running_manager(settings) as manager, FakeNode(manager.unix):
            wait_until(lambda: stats(manager)["metadata_connected"], "the database")
            assert serve_a_little(manager, 0) < 1
            wait_until(lambda: stats(manager)["metadata_waiting"] == 0, "what was stored to be written")
            servers = database.processes()
            assert servers
            for process in servers:
                process.suspend()
            assert serve_a_little(manager, 100) < 1
            wait_until(lambda: stats(manager)["counts"].get("metadata_failures", 0) > 0, "the time-out")
            for process in reversed(servers):
                process.resume()
            wait_until(lambda: stats(manager)["metadata_waiting"] == 0, "the rest to be written")
            assert len(looked_up(database.url, *[key(n) for n in range(100, 130)])) == 30
            failures = stats(manager)["counts"]["metadata_failures"]
            database.end_connections()
            assert serve_a_little(manager, 200) < 1
            wait_until(lambda: stats(manager)["counts"]["metadata_failures"] > failures, "the failure")
    # The server is gone for good: a manager starts all the same, and says so.
    with running_manager(settings) as manager, FakeNode(manager.unix):
        assert not stats(manager)["metadata_connected"]
        assert serve_a_little(manager, 300) < 1


def test_a_file_that_cannot_be_written_never_stops_the_cache(tmp_path: Path) -> None:
    path = tmp_path / "metadata.db"
    settings = make_settings(tmp_path, metadata_url=f"sqlite://{path}", metadata_timeout_ms=500)
    with running_manager(settings) as manager, FakeNode(manager.unix):
        wait_until(lambda: stats(manager)["metadata_connected"], "the database")
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN EXCLUSIVE")
        assert serve_a_little(manager, 0) < 1
        wait_until(lambda: stats(manager)["counts"].get("metadata_failures", 0) > 0, "the time-out")
        other.execute("ROLLBACK")
        other.close()
        wait_until(lambda: stats(manager)["metadata_waiting"] == 0, "what waits to be written")
        assert len(looked_up(f"sqlite://{path}", *[key(n) for n in range(30)])) == 30


def test_a_file_that_is_no_database_is_left_alone_and_the_cache_serves(tmp_path: Path) -> None:
    path = tmp_path / "metadata.db"
    path.write_bytes(b"this is somebody's file, not a database" * 100)
    before = path.read_bytes()
    with running_manager(make_settings(tmp_path, metadata_url=f"sqlite://{path}")) as manager, FakeNode(manager.unix):
        assert serve_a_little(manager, 0) < 1
        assert not stats(manager)["metadata_connected"]
    assert path.read_bytes() == before


class Failing(MetadataStore):
    """Fails until it is told not to; keeps what it was given."""

    def __init__(self) -> None:
        self.failing = True
        self.batches: list[Batch] = []

    async def _try(self) -> None:
        await asyncio.sleep(0)
        if self.failing:
            raise OSError("no database")

    async def open(self) -> None:
        await self._try()

    async def close(self) -> None:
        pass

    async def take_epoch(self, at_least: int) -> int:
        await self._try()
        return at_least

    async def remembered(self) -> Remembered:
        return Remembered()

    async def write(self, batch: Batch) -> None:
        await self._try()
        self.batches.append(batch)

    async def look_up(self, keys: Any) -> dict[bytes, Recalled]:
        await self._try()
        return {}

    async def prune(self, node: str, epoch: int) -> int:
        return 0


def entries(count: int) -> dict[bytes, Entry]:
    """Entries as the ledger would have them."""

    class Node:
        name = "n1"

    made = {}
    for n in range(count):
        entry = Entry(key(n), Node(), 10, Tenant("a", 1))  # type: ignore[arg-type]
        entry.state = EntryState.MEMORY
        made[entry.key] = entry
    return made


def test_the_queue_is_bounded_coalesced_and_survives_failures() -> None:
    async def nothing(keys: Any) -> None:
        pass

    async def run() -> None:
        store = Failing()
        recorder = Recorder(store, 5, 1000, queue_keys=1000)
        known = entries(1500)
        recorder.bind(known, lambda found: None, nothing)
        for _ in range(3):
            recorder.changed(list(known)[:900], known, keep_absent=False)
        assert recorder.waiting == 900
        recorder.changed(list(known), known, keep_absent=False)
        assert recorder.waiting == 1000
        assert recorder.stats.counts["metadata_dropped"] == 500
        recorder.node("n1", 1, 1)
        recorder.quota("a", 5)
        task = asyncio.create_task(recorder.run())
        try:
            async with asyncio.timeout(10):
                while not recorder.stats.counts.get("metadata_failures"):
                    await asyncio.sleep(0.01)
                recorder.node("n1", 1, 2)
                gone = list(known)[1200]
                del known[gone]
                recorder.changed([gone], known, keep_absent=False)
                store.failing = False
                while recorder.waiting:
                    await asyncio.sleep(0.01)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        assert sum(len(batch.entries) for batch in store.batches) == 999
        assert [k for batch in store.batches for k in batch.gone] == [gone]
        assert [n for batch in store.batches for n in batch.nodes][-1] == NodeRow("n1", 1, 2)
        assert {name: q for batch in store.batches for name, q in batch.quotas.items()} == {"a": 5}
        assert max(len(batch.entries) for batch in store.batches) <= 500

    asyncio.run(run())


def test_what_is_being_written_has_not_been_written_yet() -> None:
    """Kind: a backlog that looked like none while a database hung."""

    async def nothing(keys: Any) -> None:
        pass

    async def run() -> None:
        store, begun, go_on = Failing(), asyncio.Event(), asyncio.Event()
        store.failing = False
        write = store.write

        async def slow(batch: Batch) -> None:
            begun.set()
            await go_on.wait()
            await write(batch)

        store.write = slow  # type: ignore[method-assign]
        recorder = Recorder(store, 5, 10_000, queue_keys=1000, connected=True)
        known = entries(3)
        recorder.bind(known, lambda found: None, nothing)
        recorder.used(list(known))
        task = asyncio.create_task(recorder.run())
        async with asyncio.timeout(30):
            await begun.wait()
            assert recorder.waiting == 3
            go_on.set()
            while recorder.waiting:
                await asyncio.sleep(0.01)
        assert len(store.batches[0].entries) == 3
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())


def test_pins_recency_and_absence_are_coalesced_to_the_newest() -> None:
    async def run() -> None:
        store = Failing()
        store.failing = False
        recorder = Recorder(store, 5, 1000, queue_keys=1000, connected=True)
        known = entries(3)
        one, two, three = known
        recorder.bind(known, lambda found: None, lambda keys: asyncio.sleep(0))
        recorder.used([one])
        recorder.changed([one], known, keep_absent=False)  # recency stays
        recorder.pinned({two: 99})
        recorder.read([three])
        del known[three]
        recorder.changed([three], known, keep_absent=False)
        await recorder.finish()
        rows = {row.key: row for batch in store.batches for row in batch.entries}
        assert set(rows) == {one, two}
        assert rows[one].recency_ms > 0 and rows[one].pinned_until_ms is None
        assert rows[two].pinned_until_ms == 99 and rows[two].recency_ms == 0
        assert [k for batch in store.batches for k in batch.gone] == [three]

    asyncio.run(run())
