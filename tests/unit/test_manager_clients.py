"""What clients ask of a manager, over real sockets, with cache nodes that are only spoken for."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from polarkv_client import errors
from polarkv_client.keys import join_keys
from polarkv_client.protocol import grants
from polarkv_client.protocol.grants import Access
from polarkv_client.protocol.messages import (
    AbortStore,
    AcquireRead,
    BeginStore,
    Empty,
    NodeList,
    Op,
    OperationResult,
    Outcomes,
    Prefetch,
    ReadGrants,
    ReportDamaged,
    StoreGrants,
)
from polarkv_client.protocol.wire import decode_body, encode_frame
from polarkv_client.states import ReadOutcome, StoreOutcome, Tier
from tests.support.managers import (
    LONG_MS,
    MIB,
    OTHER_TOKEN,
    SECRETS,
    Client,
    FakeNode,
    Running,
    admin,
    deadline,
    extents,
    key,
    make_settings,
    running_manager,
    stats,
)
from tests.support.waiting import wait_until

OK = OperationResult.OK


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Running]:
    with running_manager(make_settings(tmp_path)) as running:
        yield running


def evict_all(manager: Running, *, purge: bool = False) -> int:
    """Drop what disk has too; how many are on disk alone now."""
    with admin(manager) as http:
        answer = http.post("/v1/evict", json={"all": True, "purge": purge}).raise_for_status().json()
    return int(answer["evicted"])


def to_disk(manager: Running, client: Client, count: int, first: int = 1) -> list[bytes]:
    """Store keys and have them on disk alone."""
    keys = [key(first + n) for n in range(count)]
    client.store(keys)
    wait_until(lambda: evict_all(manager) >= count, "the entries to be on disk alone")
    assert client.exists(*keys) == [Tier.DISK] * count
    return keys


def test_a_store_becomes_visible_with_its_commit_and_grants_are_signed(manager: Running) -> None:
    with FakeNode(manager.unix) as node, Client(manager.tcp) as client:
        keys = [key(n) for n in range(5)]
        granted = client.begin(keys, 1000)
        assert list(granted.outcomes) == [StoreOutcome.GRANTED] * 5
        assert client.exists(*keys) == [0] * 5
        assert LONG_MS - 1000 < granted.ticket_ms < LONG_MS
        (signed,) = granted.grants
        now_ms = node.slab.beat().manager_now_ms
        grant = grants.verify(
            signed, SECRETS.grant_key, access=Access.WRITE, incarnation=1, epoch=manager.epoch, manager_now_ms=now_ms
        )
        assert [extent.index for extent in grant.extents] == [0, 1, 2, 3, 4]
        assert [extent.key for extent in grant.extents] == keys
        assert len({extent.offset_bytes for extent in grant.extents}) == 5
        assert (grant.node, grant.holder, grant.tenant) == (1, granted.ticket, client.attached.tenant_number)
        assert client.commit(granted.ticket, keys[:3], checksum=9) == [0, 0, 0]
        assert client.match_prefix(*keys) == [Tier.MEMORY] * 3
        read = client.acquire(keys)
        assert list(read.outcomes) == [0, 0, 0, ReadOutcome.MISS, ReadOutcome.MISS]
        assert [(e.index, e.checksum) for e in extents(read.grants)] == [(0, 9), (1, 9), (2, 9)]
        client.release(read.lease)


def test_chunks_spread_over_nodes_with_one_grant_each(manager: Running) -> None:
    with FakeNode(manager.unix, "n1"), FakeNode(manager.unix, "n2"), Client(manager.unix) as client:
        keys = [bytes(24) + n.to_bytes(8, "little") for n in range(0, 100_000, 1000)]
        granted = client.begin(keys)
        assert set(granted.outcomes) == {StoreOutcome.GRANTED}
        assert sorted(grants.read(signed).node for signed in granted.grants) == [1, 2]
        assert sorted(extent.index for extent in extents(granted.grants)) == list(range(100))
        nodes = client.call(Op.LIST_NODES, Empty(), NodeList).nodes
        assert [(node.name, node.state) for node in nodes] == [("n1", "Active"), ("n2", "Active")]


def test_without_a_node_there_is_no_space_and_nothing_hangs(manager: Running) -> None:
    with Client(manager.tcp) as client:
        began = time.monotonic()
        assert list(client.begin([key(1)], wait_ms=100).outcomes) == [StoreOutcome.NO_SPACE]
        assert time.monotonic() - began < 2
        assert list(client.acquire([key(1)], wait_ms=5000).outcomes) == [ReadOutcome.MISS]
        assert client.exists(key(1)) == [0]


def test_second_writer_quota_and_oversize_have_their_own_outcomes(manager: Running) -> None:
    with FakeNode(manager.unix), Client(manager.tcp) as client, Client(manager.tcp, OTHER_TOKEN) as other:
        client.store([key(1)])
        granted = client.begin([key(2)])
        outcomes = client.call(
            Op.BEGIN_STORE, BeginStore(join_keys([key(1), key(2), key(3)]), [10, 10, 2 * MIB]), StoreGrants
        ).outcomes
        assert list(outcomes) == [StoreOutcome.EXISTS, StoreOutcome.IN_PROGRESS, StoreOutcome.OVERSIZED]
        client.call(Op.ABORT_STORE, AbortStore(granted.ticket, key(2)), Empty)
        assert client.commit(granted.ticket, [key(2)]) == [1]
        keys = [key(10 + n) for n in range(4)]  # the quota is 1 MiB
        assert list(other.begin(keys, 300_000).outcomes) == [0, 0, 0, StoreOutcome.QUOTA_EXCEEDED]
        counts = stats(manager)["counts"]
        assert (counts["store_exists"], counts["store_oversized"], counts["store_quota_exceeded"]) == (1, 1, 1)


def test_a_store_waits_for_space_until_it_is_there(manager: Running) -> None:
    with FakeNode(manager.unix, memory_bytes=MIB, auto=None) as node, Client(manager.tcp) as client:
        keys = [key(n) for n in range(16)]
        client.store(keys, 65_000)  # sixteen slots of 64 KiB: all
        assert list(client.begin([key(50)], 65_000).outcomes) == [StoreOutcome.NO_SPACE]
        with Client(manager.tcp) as waiter:
            sent = encode_frame(Op.BEGIN_STORE, 77, BeginStore(key(51), [65_000], 8000))
            waiter.connection.send(sent, deadline())
            wait_until(lambda: stats(manager)["waiting_calls"] == 1, "the call to be parked")
            _, command = node.on_disk.command()
            node.on_disk.done(command)
            frame = waiter.connection.receive(deadline())
            answer = decode_body(frame.body, StoreGrants)
            assert (frame.request_id, list(answer.outcomes)) == (77, [StoreOutcome.GRANTED])
            assert answer.ticket_ms >= LONG_MS  # what it waited is added: the client counts from when it sent the call
            assert waiter.commit(answer.ticket, [key(51)]) == [0]
        assert stats(manager)["waiting_calls"] == 0


def test_a_wait_for_space_ends_in_time(manager: Running) -> None:
    with FakeNode(manager.unix, memory_bytes=MIB, auto=None), Client(manager.tcp) as client:
        client.store([key(n) for n in range(16)], 65_000)
        began = time.monotonic()
        assert list(client.begin([key(50)], 65_000, wait_ms=300).outcomes) == [StoreOutcome.NO_SPACE]
        assert 0.25 < time.monotonic() - began < 2


def test_a_disk_hit_is_awaited_and_told_apart_from_a_memory_hit(manager: Running) -> None:
    with FakeNode(manager.unix) as node, Client(manager.tcp) as client:
        keys = to_disk(manager, client, 3)
        node.on_disk.auto = None
        with Client(manager.tcp) as reader:
            reader.connection.send(encode_frame(Op.ACQUIRE_READ, 9, AcquireRead(join_keys(keys), 8000)), deadline())
            commands = [node.on_disk.command() for _ in keys]
            assert [op for op, _ in commands] == [Op.LOAD] * 3
            node.on_disk.done(commands[1][1])
            answer = decode_body(reader.connection.receive(deadline()).body, ReadGrants)
            assert list(answer.outcomes) == [ReadOutcome.LOADING, ReadOutcome.GRANTED, ReadOutcome.LOADING]
            assert [extent.index for extent in extents(answer.grants)] == [1]
            assert list(answer.tiers) == [0, Tier.DISK, 0]
            reader.release(answer.lease)
            node.on_disk.done(commands[0][1], OperationResult.DAMAGED)
            node.on_disk.done(commands[2][1])
            answer = reader.acquire(keys, wait_ms=5000)
            assert list(answer.outcomes) == [ReadOutcome.MISS, ReadOutcome.GRANTED, ReadOutcome.GRANTED]
            assert list(answer.tiers) == [0, Tier.MEMORY, Tier.DISK]
        counts = stats(manager)
        assert (counts["hits_memory"], counts["hits_disk"], counts["misses"]) == (1, 2, 1)


def test_connections_of_one_client_share_what_they_await_and_others_do_not(manager: Running) -> None:
    with FakeNode(manager.unix) as node, Client(manager.tcp) as client:
        keys = to_disk(manager, client, 1)
        node.on_disk.auto = None
        assert list(client.acquire(keys).outcomes) == [ReadOutcome.LOADING]
        node.on_disk.done(node.on_disk.command()[1])
        with Client(manager.tcp, name="another") as another:
            assert list(another.acquire(keys).tiers) == [Tier.MEMORY]
        with Client(manager.tcp) as same:
            assert list(same.acquire(keys).tiers) == [Tier.DISK]
            assert list(same.acquire(keys).tiers) == [Tier.MEMORY]


def test_a_load_that_could_not_begin_begins_while_its_reader_waits(manager: Running) -> None:
    with FakeNode(manager.unix, memory_bytes=MIB) as node, Client(manager.tcp) as client:
        keys = [key(n) for n in range(16)]
        client.store(keys, 65_000)
        wait_until(lambda: evict_all(manager) >= 16, "the entries to be on disk alone")
        more = [key(50 + n) for n in range(16)]
        client.store(more, 65_000)
        lease = client.acquire(more).lease  # every slot is held
        with Client(manager.tcp) as reader:
            reader.connection.send(encode_frame(Op.ACQUIRE_READ, 9, AcquireRead(keys[0], 8000)), deadline())
            wait_until(lambda: stats(manager)["waiting_calls"] == 1, "the call to be parked")
            assert stats(manager)["entries_by_state"]["Loading"] == 0
            wait_until(lambda: stats(manager)["entries_by_state"]["MemoryAndDisk"] == 16, "the offloads")
            client.release(lease)
            answer = decode_body(reader.connection.receive(deadline()).body, ReadGrants)
            assert list(answer.outcomes) == [ReadOutcome.GRANTED]
            assert list(answer.tiers) == [Tier.DISK]
        assert node.on_disk.commands.empty()


def test_many_readers_wait_for_one_load(manager: Running) -> None:
    with FakeNode(manager.unix) as node, Client(manager.tcp) as client:
        keys = to_disk(manager, client, 1)
        node.on_disk.auto = None
        readers = [Client(manager.unix, name=f"reader-{n}") for n in range(8)]
        for reader in readers:
            reader.connection.send(encode_frame(Op.ACQUIRE_READ, 9, AcquireRead(keys[0], 8000)), deadline())
        _, command = node.on_disk.command()
        wait_until(lambda: stats(manager)["waiting_calls"] == 8, "the calls to be parked")
        node.on_disk.done(command)
        for reader in readers:
            answer = decode_body(reader.connection.receive(deadline()).body, ReadGrants)
            assert (list(answer.outcomes), list(answer.tiers)) == ([ReadOutcome.GRANTED], [Tier.DISK])
            reader.close()
        assert node.on_disk.commands.empty()


def test_a_wait_for_a_load_ends_in_time_and_with_its_connection(manager: Running) -> None:
    with FakeNode(manager.unix) as node, Client(manager.tcp) as client:
        keys = to_disk(manager, client, 1)
        node.on_disk.auto = None
        began = time.monotonic()
        assert list(client.acquire(keys, wait_ms=300).outcomes) == [ReadOutcome.LOADING]
        assert 0.25 < time.monotonic() - began < 2
        gone = Client(manager.tcp)
        gone.connection.send(encode_frame(Op.ACQUIRE_READ, 9, AcquireRead(keys[0], 20_000)), deadline())
        wait_until(lambda: stats(manager)["waiting_calls"] == 1, "the call to be parked")
        gone.close()
        wait_until(lambda: stats(manager)["waiting_calls"] == 0, "the call to be dropped")
        node.on_disk.done(node.on_disk.command()[1])
        assert stats(manager)["leases"] == 0


def test_a_lost_node_answers_those_who_wait_with_a_miss(manager: Running) -> None:
    with FakeNode(manager.unix) as node, Client(manager.tcp) as client:
        keys = to_disk(manager, client, 2)
        node.on_disk.auto = None
        client.connection.send(encode_frame(Op.ACQUIRE_READ, 9, AcquireRead(join_keys(keys), 20_000)), deadline())
        node.on_disk.command()
        node.on_disk.close()
        answer = decode_body(client.connection.receive(deadline()).body, ReadGrants)
        assert list(answer.outcomes) == [ReadOutcome.MISS] * 2


def test_beyond_the_limit_of_waiting_calls_the_answer_comes_at_once(tmp_path: Path) -> None:
    with running_manager(make_settings(tmp_path, max_waiting_calls=2)) as manager, Client(manager.tcp) as client:
        waiters = [Client(manager.unix) for _ in range(2)]
        for waiter in waiters:
            waiter.connection.send(encode_frame(Op.BEGIN_STORE, 5, BeginStore(key(1), [10], 20_000)), deadline())
        wait_until(lambda: stats(manager)["waiting_calls"] == 2, "the calls to be parked")
        began = time.monotonic()
        assert list(client.begin([key(2)], wait_ms=20_000).outcomes) == [StoreOutcome.NO_SPACE]
        assert time.monotonic() - began < 2
        for waiter in waiters:
            waiter.close()


def test_a_wait_is_cut_to_the_longest_allowed(tmp_path: Path) -> None:
    with running_manager(make_settings(tmp_path, max_wait_ms=200)) as manager, Client(manager.tcp) as client:
        began = time.monotonic()
        assert list(client.begin([key(2)], wait_ms=99_000).outcomes) == [StoreOutcome.NO_SPACE]
        assert time.monotonic() - began < 2


def test_prefetch_loads_and_damage_drops_the_memory_copy(manager: Running) -> None:
    with FakeNode(manager.unix) as node, Client(manager.tcp) as client:
        keys = to_disk(manager, client, 2)
        tiers = client.call(Op.PREFETCH, Prefetch(join_keys(keys)), Outcomes).outcomes
        assert list(tiers) == [Tier.DISK] * 2
        wait_until(lambda: client.exists(*keys) == [Tier.MEMORY] * 2, "the loads")
        node.on_disk.auto = None
        read = client.acquire(keys)
        client.call(Op.REPORT_DAMAGED, ReportDamaged(read.lease, keys[0]), Empty)
        assert client.exists(*keys) == [Tier.DISK, Tier.MEMORY]
        assert stats(manager)["leases"] == 0


def test_grants_of_a_client_that_died_end_by_themselves(tmp_path: Path) -> None:
    settings = make_settings(tmp_path, write_ticket_ms=1500, read_lease_ms=1500, quarantine_ms=50)
    with running_manager(settings) as manager, FakeNode(manager.unix, memory_bytes=MIB), Client(manager.tcp) as client:
        dying = Client(manager.tcp)
        dying.store([key(1)], 400_000)
        dying.acquire([key(1)])
        dying.begin([key(2)], 400_000)
        dying.close()
        wait_until(lambda: stats(manager)["leases"] + stats(manager)["tickets"] == 0, "the grants to end")
        granted = client.begin([key(2)], 400_000, wait_ms=5000)
        assert list(granted.outcomes) == [StoreOutcome.GRANTED]


def test_pipelined_calls_are_answered_in_order_around_one_that_waits(manager: Running) -> None:
    with FakeNode(manager.unix, memory_bytes=MIB, auto=None), Client(manager.tcp) as client:
        client.store([key(n) for n in range(16)], 65_000)
        frames = encode_frame(Op.BEGIN_STORE, 1, BeginStore(key(50), [65_000], 300))
        frames += encode_frame(Op.LIST_NODES, 2, Empty())
        client.connection.send(frames, deadline())
        assert client.connection.receive(deadline()).request_id == 2
        assert client.connection.receive(deadline()).request_id == 1


def test_many_clients_at_once_get_one_slot_each(manager: Running) -> None:
    with FakeNode(manager.unix) as _:
        outcomes: list[list[int]] = []

        def work(number: int) -> None:
            with Client(manager.unix if number % 2 else manager.tcp, name=f"c{number}") as client:
                keys = [key(n) for n in range(64)]
                granted = client.begin(keys)
                mine = [k for k, outcome in zip(keys, granted.outcomes, strict=True) if not outcome]
                assert not mine or client.commit(granted.ticket, mine) == [0] * len(mine)
                outcomes.append(list(granted.outcomes))

        threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert len(outcomes) == 6
        assert [sum(o[n] == 0 for o in outcomes) for n in range(64)] == [1] * 64


def test_the_deadline_of_a_call_is_the_clients_own(manager: Running) -> None:
    with FakeNode(manager.unix) as node, Client(manager.tcp) as client:
        keys = to_disk(manager, client, 1)
        node.on_disk.auto = None
        with pytest.raises(errors.DeadlineExceeded):
            client.call(Op.ACQUIRE_READ, AcquireRead(keys[0], 20_000), ReadGrants, timeout_s=0.2)
