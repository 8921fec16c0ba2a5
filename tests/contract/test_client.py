"""The blocking client against real slab servers: what comes back, and what becomes a miss."""

from __future__ import annotations

import inspect
import os
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from polarkv_client import engine, errors
from polarkv_client.errors import ConfigurationError
from polarkv_client.keys import Namespace, chunk_keys
from polarkv_client.protocol import messages as m
from polarkv_client.protocol.messages import Op
from polarkv_client.protocol.wire import Frame
from polarkv_client.results import Reason, Stored
from polarkv_client.states import StoreOutcome, Tier
from polarkv_client.sync import SyncClient
from tests.contract.peers import SIZE, chunks, in_time, key, payload, settled, ways
from tests.support.ports import reserved_ports
from tests.support.slab_process import SlabProcess
from tests.support.small_manager import SmallManager, hang
from tests.support.waiting import wait_until

NAMESPACE = Namespace(model_id="m", chunk_tokens=4)


@pytest.fixture
def manager(slab: SlabProcess) -> Iterator[SmallManager]:
    made = SmallManager([slab.node()])
    yield made
    made.close()


@pytest.fixture
def client(manager: SmallManager, kind: str) -> Iterator[SyncClient]:
    with SyncClient.connect(endpoint=manager.endpoint, **ways(kind)) as made:
        yield made


def test_what_was_stored_is_loaded(manager: SmallManager, client: SyncClient, kind: str) -> None:
    keys, payloads, targets = chunks(9)
    stored = client.store(keys, payloads)
    assert (stored.stored, stored.present, stored.bytes_stored) == (9, 9, 9 * SIZE)
    loaded = client.load(keys, targets)
    assert targets == payloads
    assert (loaded.hits, loaded.complete, loaded.bytes_loaded) == (9, True, 9 * SIZE)
    assert {chunk.tier for chunk in loaded.chunks} == {Tier.MEMORY}
    assert settled(manager, m.ReleaseRead) == [m.ReleaseRead(2, True)]
    status = client.status()
    assert (status.connected, status.breaker, status.tenant) == (True, "closed", "default")
    assert [(node.node, node.transport) for node in status.nodes] == [("node-0", kind.partition("-")[0])]
    assert status.counters["bytes_loaded"] == 9 * SIZE
    assert status.counters["hits_memory"] == 9


def test_a_second_store_is_skipped(client: SyncClient) -> None:
    keys, payloads, _ = chunks(3)
    client.store(keys[:2], payloads[:2])
    again = client.store(keys, payloads)
    assert [chunk.outcome for chunk in again.chunks] == [Stored.EXISTS, Stored.EXISTS, Stored.STORED]
    assert (again.stored, again.present, again.bytes_stored) == (1, 3, SIZE)


def test_prefix_semantics(manager: SmallManager, client: SyncClient) -> None:
    tokens = list(range(42))
    keys = chunk_keys(NAMESPACE, tokens)
    payloads = [payload(SIZE, n) for n in range(10)]
    assert client.store_kv(NAMESPACE, tokens, payloads).stored == 10
    del manager.chunks[keys[6]]
    targets = [bytearray(SIZE) for _ in keys]
    loaded = client.load_kv(NAMESPACE, tokens, targets)
    assert (loaded.tokens_loaded, loaded.prefix_chunks, loaded.bytes_loaded) == (24, 6, 6 * SIZE)
    assert loaded.chunks[6].reason is Reason.ABSENT
    assert {chunk.reason for chunk in loaded.chunks[7:]} == {Reason.NOT_REACHED}
    assert targets[:6] == payloads[:6]
    assert all(not any(target) for target in targets[6:])  # what is of no use is not moved either
    assert client.match_prefix(keys) == [Tier.MEMORY] * 6
    assert client.exists(keys) == [Tier.MEMORY] * 6 + [Tier.NONE] + [Tier.MEMORY] * 3
    assert client.load(keys, targets).hits == 9  # by keys, all that is there


def test_extras_are_part_of_the_key(client: SyncClient) -> None:
    tokens = list(range(8))
    client.store_kv(NAMESPACE, tokens, [payload(10)] * 2, extras={1: b"image"})
    targets = [bytearray(10), bytearray(10)]
    assert client.load_kv(NAMESPACE, tokens, targets).tokens_loaded == 4
    assert client.load_kv(NAMESPACE, tokens, targets, extras={1: b"image"}).tokens_loaded == 8


def test_scatter_lists(client: SyncClient) -> None:
    whole = payload(SIZE)
    client.store([key(1)], [[whole[:5], whole[5:60_000], whole[60_000:]]])
    parts = [bytearray(30_000), bytearray(40_000)]
    assert client.load([key(1)], [parts]).complete
    assert b"".join(parts) == whole


def test_batches_are_cut_and_every_byte_arrives(manager: SmallManager, kind: str) -> None:
    settings: dict[str, Any] = {"inflight_bytes": 1 << 20, "batch_keys": 3, "threads": 2}
    with SyncClient.connect(endpoint=manager.endpoint, **ways(kind), **settings) as client:
        keys, payloads, targets = chunks(40)
        assert client.store(keys, payloads).stored == 40
        assert client.load(keys, targets).complete
        assert targets == payloads
        requests = manager.requests(m.AcquireRead)
        assert len(requests) >= 14
        del manager.chunks[keys[30]]
        assert client.match_prefix(keys) == [Tier.MEMORY] * 30
        assert client.exists(keys) == [Tier.MEMORY] * 30 + [Tier.NONE] + [Tier.MEMORY] * 9
        assert client.prefetch(keys)
        asked = manager.requests(m.Keys)
        assert len(asked) == 11 + 14
        requests += asked + manager.requests(m.Prefetch)
        assert all(len(request.keys) <= 3 * 32 for request in requests)  # type: ignore[attr-defined]


def test_another_length_is_a_miss_and_moves_nothing(client: SyncClient) -> None:
    keys, payloads, _ = chunks(3)
    client.store(keys, payloads)
    targets = [bytearray(SIZE), bytearray(SIZE + 1), bytearray(SIZE)]
    loaded = client.load(keys, targets)
    assert [chunk.reason for chunk in loaded.chunks] == [Reason.NONE, Reason.LENGTH, Reason.NONE]
    assert not any(targets[1])
    assert client.load([keys[0]], [bytearray(5)]).chunks[0].reason is Reason.LENGTH


def test_damage_is_a_miss_and_is_reported(manager: SmallManager, client: SyncClient) -> None:
    keys, payloads, targets = chunks(3)
    client.store(keys, payloads)
    manager.chunks[keys[1]].checksum ^= 1
    loaded = client.load(keys, targets)
    assert [chunk.reason for chunk in loaded.chunks] == [Reason.NONE, Reason.DAMAGED, Reason.NONE]
    (report,) = settled(manager, m.ReportDamaged)
    assert report == m.ReportDamaged(2, keys[1])
    assert manager.requests(m.ReleaseRead) == []  # the report has ended the lease
    assert client.load(keys, targets).chunks[1].reason is Reason.ABSENT


def test_leases_that_a_failed_call_was_to_end_are_ended(
    manager: SmallManager, client: SyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "_LINGER_S", 0.3)
    keys, payloads, targets = chunks(2)
    client.store(keys, payloads)
    manager.instead[Op.ACQUIRE_READ] = refused_once_then(manager)
    assert client.load(keys, targets).complete
    assert not client.load(keys, targets).hits
    assert client.load(keys, targets).complete
    wait_until(lambda: len(ended_leases(manager)) == 2, "both leases to be ended")


def refused_once_then(manager: SmallManager) -> Callable[[SmallManager, Frame], object]:
    """Acquires: the second one is refused before anything of it is looked at."""

    def answer(_: SmallManager, frame: Frame) -> object:
        if manager.calls[Op.ACQUIRE_READ] == 2:
            raise errors.Refused("not this one")
        return manager.rules(frame)

    return answer


def ended_leases(manager: SmallManager) -> list[int]:
    """The leases that clients have ended, in whichever way."""
    ended = [request.lease for request in manager.requests(m.ReleaseRead) if isinstance(request, m.ReleaseRead)]
    for request in manager.requests(m.AcquireRead):
        assert isinstance(request, m.AcquireRead)
        ended += request.ended
    return ended


def test_an_answer_that_took_longer_than_the_lease_is_late(manager: SmallManager, client: SyncClient) -> None:
    """The deadline counts from when the request was sent: by now the slot may be another's."""
    keys, payloads, targets = chunks(2)
    client.store(keys, payloads)
    manager.lease_ms = 50
    manager.instead[Op.ACQUIRE_READ] = delayed(0.1)
    loaded = client.load(keys, targets)
    assert {chunk.reason for chunk in loaded.chunks} == {Reason.LATE}
    assert not any(map(any, targets))


def test_a_read_that_ends_after_its_lease_is_thrown_away(
    manager: SmallManager, client: SyncClient, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, payloads, targets = chunks(2)
    client.store(keys, payloads)
    manager.lease_ms = 1500
    transport = client._operations.engine.transports._routes[7].transport
    assert transport is not None
    read = transport.read

    def slow(*arguments: object) -> object:
        results = read(*arguments)  # type: ignore[arg-type]
        assert results == [None, None]
        threading.Event().wait(1.55)
        return results

    monkeypatch.setattr(transport, "read", slow)
    assert {chunk.reason for chunk in client.load(keys, targets).chunks} == {Reason.LATE}


def test_nothing_is_written_after_the_ticket(manager: SmallManager, client: SyncClient) -> None:
    keys, payloads, targets = chunks(2)
    manager.ticket_ms = 50
    manager.instead[Op.BEGIN_STORE] = delayed(0.1)
    stored = client.store(keys, payloads)
    assert [(chunk.outcome, chunk.reason) for chunk in stored.chunks] == [(Stored.FAILED, Reason.LATE)] * 2
    assert settled(manager, m.AbortStore) == [m.AbortStore(1, keys[0] + keys[1])]
    assert manager.requests(m.CommitStore) == []
    assert client.load(keys, targets).hits == 0


def test_a_commit_that_came_too_late_is_no_store(manager: SmallManager, client: SyncClient) -> None:
    manager.instead[Op.COMMIT_STORE] = lambda *_: m.Outcomes(b"\0\1")
    keys, payloads, _ = chunks(2)
    stored = client.store(keys, payloads)
    assert [chunk.outcome for chunk in stored.chunks] == [Stored.STORED, Stored.FAILED]
    assert stored.chunks[1].reason is Reason.LATE


@pytest.mark.parametrize("outcome", [outcome for outcome in StoreOutcome if outcome is not StoreOutcome.GRANTED])
def test_every_outcome_of_a_store_has_a_name(manager: SmallManager, client: SyncClient, outcome: StoreOutcome) -> None:
    manager.instead[Op.BEGIN_STORE] = lambda *_: m.StoreGrants(0, 1000, bytes([outcome]), [])
    (chunk,) = client.store([key(1)], [b"x"]).chunks
    assert chunk.outcome.name == outcome.name


def test_chunks_from_disk_are_copied_as_they_come(manager: SmallManager, client: SyncClient) -> None:
    """A batch is a pipeline: while one chunk is still loading, those before it are already in the caller's buffers."""
    keys, payloads, targets = chunks(6)
    client.store(keys, payloads)
    for place in range(1, 6):
        manager.chunks[keys[place]].ready.clear()
        manager.chunks[keys[place]].tier = Tier.DISK
    seen: list[bool] = []

    def arrived(place: int) -> bool:
        return targets[place] == payloads[place]

    def disk() -> None:
        for place in range(5):
            seen.append(wait_until(partial(arrived, place), f"chunk {place}"))
            manager.chunks[keys[place + 1]].ready.set()

    thread = threading.Thread(target=disk)
    thread.start()
    loaded = client.load(keys, targets, deadline_ms=20_000)
    thread.join(30)
    assert loaded.complete
    assert [chunk.tier for chunk in loaded.chunks] == [Tier.MEMORY] + [Tier.DISK] * 5
    assert targets == payloads
    assert seen == [True] * 5


def test_a_disk_that_does_not_answer_costs_the_deadline(manager: SmallManager, client: SyncClient) -> None:
    keys, payloads, targets = chunks(3)
    client.store(keys, payloads)
    manager.chunks[keys[1]].ready.clear()
    with in_time(1.5):
        loaded = client.load(keys, targets, deadline_ms=1500)
    assert [chunk.hit for chunk in loaded.chunks] == [True, False, True]
    assert loaded.chunks[1].reason in {Reason.TIMEOUT, Reason.NOT_REACHED}
    assert client.status().breaker == "closed"


def delayed(seconds: float) -> Callable[[SmallManager, Frame], object]:
    """The right answer, late."""

    def handler(small: SmallManager, frame: Frame) -> object:
        answer = small.rules(frame)
        threading.Event().wait(seconds)
        return answer

    return handler


KINDS_OF_ERROR = [
    found for found in vars(errors).values() if inspect.isclass(found) and issubclass(found, errors.PolarKVError)
]


@pytest.mark.parametrize("error", KINDS_OF_ERROR)
@pytest.mark.parametrize("where", ["manager", "transport"])
def test_every_error_becomes_a_miss(
    manager: SmallManager, error: type[errors.PolarKVError], where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_misses(manager, monkeypatch, where, made_error(error))


@pytest.mark.parametrize("error", [RuntimeError("x"), OSError("x"), MemoryError("x"), KeyError("x")])
@pytest.mark.parametrize("where", ["manager", "transport"])
def test_a_defect_becomes_a_miss(
    manager: SmallManager, error: Exception, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_misses(manager, monkeypatch, where, error)


def made_error(kind: type[errors.PolarKVError]) -> errors.PolarKVError:
    return kind("field", 1, "fix") if issubclass(kind, errors.ConfigurationError) else kind("text")


def check_misses(manager: SmallManager, monkeypatch: pytest.MonkeyPatch, where: str, error: Exception) -> None:
    keys, payloads, targets = chunks(2)
    with SyncClient.connect(endpoint=manager.endpoint) as client:
        assert client.store(keys, payloads).stored == 2
        engine = client._operations.engine

        def fail(*_: object, **__: object) -> object:
            raise error

        if where == "manager":
            monkeypatch.setattr(engine.manager.home, "call", fail)
            assert client.exists(keys) == [Tier.NONE] * 2
            assert client.match_prefix(keys) == []
            assert client.prefetch(keys) is False
        else:
            transport = engine.transports._routes[7].transport
            monkeypatch.setattr(transport, "read", fail)
            monkeypatch.setattr(transport, "write", fail)
        loaded = client.load(keys, targets)
        stored = client.store([key(8), key(9)], payloads)
        assert not loaded.hits
        assert not stored.present
        assert all(chunk.reason is not Reason.NONE for chunk in loaded.chunks)
        assert all(chunk.reason is not Reason.NONE for chunk in stored.chunks)
        if type(error) in KINDS_OF_ERROR:
            assert len({chunk.reason for chunk in loaded.chunks} | {chunk.reason for chunk in stored.chunks}) == 1


OPERATIONS: list[Callable[[SyncClient], object]] = [
    lambda client: client.load([key(1)], [bytearray(10)]).hits,
    lambda client: client.store([key(2)], [b"x" * 10]).present,
    lambda client: client.load_kv(NAMESPACE, range(4), [bytearray(10)]).tokens_loaded,
    lambda client: client.store_kv(NAMESPACE, range(4), [bytearray(10)]).present,
    lambda client: any(client.exists([key(1)])),
    lambda client: client.match_prefix([key(1)]),
    lambda client: client.prefetch([key(1)]),
]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_hanging_manager_costs_the_deadline(manager: SmallManager, operation: Callable[[SyncClient], object]) -> None:
    with SyncClient.connect(endpoint=manager.endpoint, deadline_ms=200, breaker_failures=100) as client:
        manager.mute.set()
        with in_time(0.2):
            assert not operation(client)
        manager.mute.clear()
        assert client.store([key(5)], [b"x"], deadline_ms=20_000).stored == 1


@pytest.mark.parametrize("operation", OPERATIONS)
def test_no_manager_is_misses_until_there_is_one(slab: SlabProcess, operation: Callable[[SyncClient], object]) -> None:
    settings: dict[str, Any] = {"deadline_ms": 500, "breaker_failures": 1}
    settings |= {"breaker_first_ms": 10, "breaker_longest_ms": 50}
    with (
        reserved_ports(1) as (port,),
        SyncClient.connect(endpoint=f"tcp://127.0.0.1:{port}", **settings) as client,
    ):
        with in_time(0.5):
            assert not operation(client)
        assert not client.status().connected
        back = SmallManager([slab.node()], port=port)
        wait_until(lambda: client.store([key(5)], [b"x"]).present, "the manager")
        assert client.status().connected
        back.close()


@pytest.mark.parametrize(
    ("change", "kind_of_error"),
    [
        (lambda small: setattr(small, "token", "other"), errors.Unauthorized),
        (lambda small: setattr(small, "golden", b"other"), errors.GoldenMismatch),
    ],
)
def test_what_could_never_work_is_said_at_connect(
    manager: SmallManager, change: Callable[[SmallManager], None], kind_of_error: type[errors.PolarKVError]
) -> None:
    change(manager)
    with pytest.raises(kind_of_error):
        SyncClient.connect(endpoint=manager.endpoint)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda client: client.load([b"short"], [bytearray(1)]), r"keys\[0\]='5 bytes'"),
        (lambda client: client.load([key(1)], []), "0 buffers"),
        (lambda client: client.load([key(1)], [b"x"]), r"buffers\[0\].*writable"),
        (lambda client: client.store([key(1)], [bytearray()]), r"buffers\[0\].*0 bytes"),
        (lambda client: client.store([key(1)], [b"x"], deadline_ms=0), "deadline_ms=0"),
        (lambda client: client.store_kv(NAMESPACE, [1, 2, 3, -4], [b"x"]), "tokens"),
        (lambda client: client.load_kv(NAMESPACE, range(9), [bytearray(1)]), "2 whole chunks of 4 tokens"),
        (lambda client: client.exists([key(1), b""]), r"keys\[1\]='0 bytes'"),
    ],
)
def test_bad_arguments_are_named(manager: SmallManager, call: Callable[[SyncClient], object], text: str) -> None:
    with SyncClient.connect(endpoint=manager.endpoint) as client, pytest.raises(ConfigurationError, match=text):
        call(client)


def test_nothing_asked_is_nothing_done(manager: SmallManager, client: SyncClient) -> None:
    assert client.load([], []).chunks == []
    assert client.store([], []).chunks == []
    assert client.exists([]) == client.match_prefix([]) == []
    assert client.load_kv(NAMESPACE, [1, 2, 3], []).tokens_loaded == 0


def test_a_closed_client_answers_misses(manager: SmallManager, client: SyncClient) -> None:
    client.close()
    client.close()
    with in_time(0):
        assert not client.load([key(1)], [bytearray(1)]).hits
        assert not client.store([key(1)], [b"x"]).present
        assert client.exists([key(1)]) == [Tier.NONE]


def test_hanging_in_the_background_does_not_hold_operations(manager: SmallManager, client: SyncClient) -> None:
    keys, payloads, targets = chunks(2)
    client.store(keys, payloads)
    manager.instead[Op.RELEASE_READ] = hang
    with in_time(0):
        for _ in range(4):
            assert client.load(keys, targets).complete


def test_threads_share_a_client(client: SyncClient) -> None:
    wrong: list[object] = []

    def work(number: int) -> None:
        keys = [key(1000 * number + n) for n in range(6)]
        payloads = [payload(SIZE, number + n) for n in range(6)]
        if client.store(keys, payloads).stored != 6:
            wrong.append("store")
        for _ in range(5):
            targets = [bytearray(SIZE) for _ in keys]
            if not client.load(keys, targets).complete or targets != payloads:
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert wrong == []


def test_a_prefetch_reaches_the_manager(manager: SmallManager, client: SyncClient) -> None:
    assert client.prefetch([key(1), key(2)])
    assert manager.requests(m.Prefetch) == [m.Prefetch(key(1) + key(2))]


def test_a_client_does_not_survive_a_fork(manager: SmallManager, client: SyncClient) -> None:
    """Parent and child would read each other's answers from the sockets they share."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            client.exists([key(1)])
            os.write(writing, b"answered")
        except ConfigurationError as error:
            os.write(writing, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert b"after the fork" in os.read(reading, 4096)
    assert client.exists([key(1)]) == [Tier.NONE]
    os.close(reading)
    os.close(writing)
