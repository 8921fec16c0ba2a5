"""The client and its cache nodes: lost, stopped, reborn, reached in another way."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from polarkv_client import upkeep
from polarkv_client.protocol import messages as m
from polarkv_client.results import Reason, Stored
from polarkv_client.sync import SyncClient
from polarkv_client.transport.base import HeldGrant, Scope
from polarkv_client.transport.shm import ShmTransport
from tests.contract.peers import SIZE, chunks, in_time, key, payload, settled, ways
from tests.support.slab_process import SlabProcess, start_slab
from tests.support.small_manager import SmallManager
from tests.support.waiting import wait_until

# A breaker that opens stays so for longer than any test: its first probe may otherwise come between two lines.
LEFT_ALONE: dict[str, Any] = {"breaker_first_ms": 60_000, "breaker_longest_ms": 60_000}


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[SlabProcess, SlabProcess]]:
    first = start_slab(tmp_path, name="node-0", number=7)
    second = start_slab(tmp_path, name="node-1", number=8)
    yield first, second
    first.close()
    second.close()


def test_one_node_lost_costs_its_own_chunks(two: tuple[SlabProcess, SlabProcess]) -> None:
    manager = SmallManager([slab.node() for slab in two])
    with SyncClient.connect(endpoint=manager.endpoint, transport="tcp", deadline_ms=2000, **LEFT_ALONE) as client:
        keys, payloads, targets = chunks(8)
        assert client.store(keys, payloads).stored == 8
        assert client.load(keys, targets).complete
        assert targets == payloads
        two[1].kill()
        with in_time(2):
            loaded = client.load(keys, targets)
        assert [chunk.hit for chunk in loaded.chunks] == [True, False] * 4
        assert {chunk.reason for chunk in loaded.chunks[1::2]} == {Reason.UNAVAILABLE}
        more = [key(n) for n in range(100, 104)]
        stored = client.store(more, payloads[:4])
        assert [chunk.outcome for chunk in stored.chunks] == [Stored.STORED, Stored.FAILED] * 2
        assert len(settled(manager, m.AbortStore)) == 1
        client.load(keys, targets)
        with in_time(0.1):  # by now it is known
            loaded = client.load(keys, targets)
        assert {chunk.reason for chunk in loaded.chunks[1::2]} == {Reason.BREAKER_OPEN}
    manager.close()


def test_a_lease_of_which_no_node_can_be_reached_is_ended_once(own_slab: SlabProcess) -> None:
    manager = SmallManager([own_slab.node()])
    keys, payloads, targets = chunks(4)
    with SyncClient.connect(endpoint=manager.endpoint, transport="tcp") as client:
        assert client.store(keys, payloads).stored == 4
    own_slab.kill()
    with SyncClient.connect(endpoint=manager.endpoint, transport="tcp") as client:
        assert {chunk.reason for chunk in client.load(keys, targets).chunks} == {Reason.UNAVAILABLE}
        assert settled(manager, m.ReleaseRead) == [m.ReleaseRead(2, True)]
    assert manager.requests(m.ReleaseRead) == [m.ReleaseRead(2, True)]  # closing has told all that there was to tell
    manager.close()


def test_a_node_that_lets_leases_end_is_left_alone(own_slab: SlabProcess) -> None:
    """The leases are shorter than the operations, so that it is never an operation that runs out of time."""
    manager = SmallManager([own_slab.node()])
    keys, payloads, targets = chunks(2, 400_000)
    with SyncClient.connect(endpoint=manager.endpoint, transport="tcp", breaker_failures=2, **LEFT_ALONE) as client:
        assert client.store(keys, payloads).stored == 2
        manager.lease_ms = 300
        own_slab.freeze()
        for _ in range(2):
            assert {chunk.reason for chunk in client.load(keys, targets).chunks} == {Reason.LATE}
        with in_time(0):
            assert {chunk.reason for chunk in client.load(keys, targets).chunks} == {Reason.BREAKER_OPEN}
    manager.close()


def test_damage_beside_a_transfer_that_may_go_on_does_not_end_the_lease_cleanly(
    two: tuple[SlabProcess, SlabProcess],
) -> None:
    manager = SmallManager([slab.node() for slab in two])
    keys, payloads, targets = chunks(2, 400_000)
    with SyncClient.connect(endpoint=manager.endpoint, transport="tcp") as client:
        assert client.store(keys, payloads).stored == 2
        manager.chunks[keys[0]].checksum ^= 1
        two[1].freeze()
        loaded = client.load(keys, targets, deadline_ms=1500)
        assert [chunk.reason for chunk in loaded.chunks] == [Reason.DAMAGED, Reason.TIMEOUT]
        assert settled(manager, m.ReportDamaged) == [m.ReportDamaged(2, keys[0], False)]
    manager.close()


def test_a_stopped_node_costs_the_deadline_and_its_own_chunks(two: tuple[SlabProcess, SlabProcess]) -> None:
    manager = SmallManager([slab.node() for slab in two])
    with SyncClient.connect(endpoint=manager.endpoint, transport="tcp") as client:
        keys, payloads, targets = chunks(8, 400_000)
        assert client.store(keys, payloads).stored == 8
        two[1].freeze()
        before = len(manager.requests(m.ReleaseRead))
        with in_time(1.5):
            loaded = client.load(keys, targets, deadline_ms=1500)
        assert [chunk.hit for chunk in loaded.chunks[::2]] == [True] * 4
        assert loaded.chunks[7].reason is Reason.TIMEOUT
        assert targets[::2] == payloads[::2]
        # The stopped server may go on sending from the slots when it wakes: they need their quarantine.
        assert settled(manager, m.ReleaseRead, before + 1)[-1] == m.ReleaseRead(2, False)
    manager.close()


def test_shared_memory_that_cannot_be_reached_gives_way_to_tcp(slab: SlabProcess, tmp_path: Path) -> None:
    node = slab.node()
    for changes, text in (
        ({"shm": f"unix://{tmp_path}/absent.sock"}, "shm: cannot connect"),
        ({"shm": ""}, "shm: the node does not offer it"),
        ({"host_id": "another"}, "another host"),
    ):
        node.info = msgspec.structs.replace(slab.info, **changes)
        manager = SmallManager([node])
        with SyncClient.connect(endpoint=manager.endpoint) as client:
            assert client.store([key(1)], [payload(SIZE)]).stored == 1
            (status,) = client.status().nodes
            assert status.transport == "tcp"
            assert text in status.why
        manager.close()


def test_a_node_that_begins_a_new_life_is_found_again(tmp_path: Path, kind: str) -> None:
    first = start_slab(tmp_path)
    manager = SmallManager([first.node()])
    keys, payloads, targets = chunks(2)
    with SyncClient.connect(endpoint=manager.endpoint, **ways(kind), deadline_ms=2000) as client:
        assert client.store(keys, payloads).stored == 2
        first.kill()
        second = start_slab(tmp_path, manager=first.manager)
        assert second.info.incarnation == first.info.incarnation == 2
        manager.nodes = {7: second.node()}
        manager.chunks.clear()
        assert client.store(keys, payloads).stored == 2
        assert client.load(keys, targets).complete
        assert targets == payloads
        assert [node.incarnation for node in client.status().nodes] == [2]
        second.close()
    manager.close()
    first.close()


def slab_memory_held(slab: SlabProcess) -> Callable[[], bool]:
    """Whether this process holds the memory of ``slab`` open."""
    memory = {os.stat(path).st_ino for path in Path(f"/proc/{slab.process.pid}/fd").iterdir() if is_memory(path)}
    assert len(memory) == 1, "the slab server's memory is one file without a name"

    def held() -> bool:
        found = set()
        for path in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                found.add(os.stat(path).st_ino)
        return bool(found & memory)

    return held


def is_memory(path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return "polarkv-pool" in os.readlink(path)
    return False


def test_an_idle_client_gives_a_dead_slabs_memory_back(own_slab: SlabProcess) -> None:
    manager = SmallManager([own_slab.node()])
    held = slab_memory_held(own_slab)
    with SyncClient.connect(endpoint=manager.endpoint, transport="shm") as client:
        assert client.store([key(1)], [payload(SIZE)]).stored == 1
        assert held()
        own_slab.kill()
        wait_until(lambda: not held(), "the memory to be given back by a client that asks for nothing")
        (status,) = client.status().nodes
        assert (status.transport, status.why) == ("none", "shm: the slab server has gone")
    manager.close()


def test_an_idle_client_forgets_cache_nodes_that_are_no_more(
    own_slab: SlabProcess, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "SWEEP_S", 0.02)
    monkeypatch.setattr(upkeep, "NODES_S", 0.05)
    manager = SmallManager([own_slab.node()])
    with SyncClient.connect(endpoint=manager.endpoint, **ways(kind)) as client:
        assert client.store([key(1)], [payload(SIZE)]).stored == 1
        assert [node.node for node in client.status().nodes] == ["node-0"]
        manager.nodes = {}
        assert wait_until(lambda: client.status().nodes == [], "the node to be forgotten")
        manager.nodes = {7: own_slab.node()}
        # A miss where the answer to an earlier question comes while the node is being connected to.
        wait_until(lambda: client.load([key(1)], [bytearray(SIZE)]).complete, "the node to be found again")
    manager.close()


def test_a_node_forgotten_while_it_is_connected_to_leaks_nothing(
    own_slab: SlabProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = SmallManager([own_slab.node()])
    held = slab_memory_held(own_slab)
    with SyncClient.connect(endpoint=manager.endpoint, transport="shm") as client:
        transports = client._operations.engine.transports
        reach = ShmTransport.reach

        def forgotten(transport: ShmTransport, grant: HeldGrant, scope: Scope) -> None:
            transports.forget_absent({})
            reach(transport, grant, scope)

        monkeypatch.setattr(ShmTransport, "reach", forgotten)
        (chunk,) = client.store([key(1)], [payload(SIZE)]).chunks
        assert chunk.reason is Reason.UNAVAILABLE
        assert not held()
    manager.close()
