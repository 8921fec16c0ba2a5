"""Calls to the manager: pool, retry, breaker, shards, deadlines. A manager that follows a script answers."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from polarkv_client import errors
from polarkv_client.channel import Silence
from polarkv_client.config import load_config
from polarkv_client.manager_client import ManagerClient
from polarkv_client.protocol import messages as m
from polarkv_client.protocol.messages import NodeInfo, Op, Shard
from polarkv_client.protocol.wire import Frame
from polarkv_client.resolve import Resolver
from polarkv_client.transport.base import Scope
from tests.support.ports import reserved_ports
from tests.support.small_manager import Chunk, Node, SmallManager, hang, refuse
from tests.support.waiting import wait_until

SLACK_S = 1.0  # for a loaded machine; what would hang here hangs for longer
KEY = bytes(32)


@pytest.fixture
def manager() -> Iterator[SmallManager]:
    made = SmallManager()
    made.chunks[KEY] = Chunk(7, 0, 1, committed=True)
    yield made
    made.close()


@contextmanager
def client(endpoint: str, **settings: Any) -> Iterator[ManagerClient]:
    patient = {"connect_timeout_ms": 10_000, "manager_timeout_ms": 10_000} | settings
    made = ManagerClient(load_config(environment={}, endpoint=endpoint, **patient), "host")
    yield made
    made.close()


def soon(seconds: float = 5.0) -> float:
    return time.monotonic() + seconds


def exists(made: ManagerClient, deadline: float | None = None) -> bytes:
    return made.exists(made.home, KEY, soon() if deadline is None else deadline)


def test_one_connection_serves_call_after_call(manager: SmallManager) -> None:
    with client(manager.endpoint) as made:
        assert [exists(made) for _ in range(5)] == [b"\1"] * 5
        assert manager.calls[Op.ATTACH] == 1
        assert made.attached is not None
        assert made.attached.tenant == "default"


def test_threads_share_a_bounded_pool(manager: SmallManager) -> None:
    gate = threading.Barrier(4)

    def together(small: SmallManager, frame: Frame) -> object:
        gate.wait(30)  # four requests are in flight at once, or nobody is answered
        return small.rules(frame)

    manager.instead[Op.EXISTS] = together
    with client(manager.endpoint, manager_connections=4, manager_timeout_ms=5000) as made:
        found: list[bytes] = []
        threads = [threading.Thread(target=lambda: found.append(exists(made))) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert found == [b"\1"] * 8
        assert manager.calls[Op.ATTACH] <= 4


def test_a_full_pool_is_waited_for_until_the_deadline(manager: SmallManager) -> None:
    enough = threading.Event()

    def late(small: SmallManager, frame: Frame) -> object:
        enough.wait(30)
        return small.rules(frame)

    manager.instead[Op.EXISTS] = late
    with client(manager.endpoint, manager_connections=1, manager_timeout_ms=30_000) as made:
        first = threading.Thread(target=lambda: exists(made, soon(30)))
        first.start()
        wait_until(lambda: manager.calls[Op.EXISTS], "the first call")
        begin = time.monotonic()
        with pytest.raises(errors.DeadlineExceeded, match="became free"):
            exists(made, soon(0.1))
        assert time.monotonic() - begin < 0.1 + SLACK_S
        enough.set()
        first.join(30)


def test_a_restarted_manager_is_not_noticed(manager: SmallManager) -> None:
    with client(manager.endpoint) as made:
        exists(made)
        for _ in range(3):
            manager.drop_connections()
            assert exists(made) == b"\1"


def test_a_commit_is_never_sent_twice(manager: SmallManager) -> None:
    with client(manager.endpoint) as made:
        exists(made)
        manager.drop_connections()
        with pytest.raises(errors.Unavailable):
            made.commit_store(made.home, 1, KEY, [1], soon())
        assert manager.calls[Op.COMMIT_STORE] == 0
        assert exists(made) == b"\1"


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda small: setattr(small, "token", "other"), errors.Unauthorized),
        (lambda small: setattr(small, "golden", b"other"), errors.GoldenMismatch),
        (lambda small: small.instead.__setitem__(Op.EXISTS, refuse), errors.Refused),
        (lambda small: small.instead.__setitem__(Op.EXISTS, lambda *_: m.Outcomes(b"\1\1")), errors.ProtocolError),
        (lambda small: small.instead.__setitem__(Op.EXISTS, lambda *_: m.Outcomes(b"")), errors.ProtocolError),
        (lambda small: small.instead.__setitem__(Op.EXISTS, lambda *_: m.Empty()), errors.ProtocolError),
    ],
)
def test_what_the_manager_says_is_raised_as_one_of_the_tree(
    manager: SmallManager, change: Callable[[SmallManager], None], kind: type[errors.PolarKVError]
) -> None:
    change(manager)
    with client(manager.endpoint) as made, pytest.raises(kind):
        exists(made)


def test_refusals_do_not_open_the_breaker(manager: SmallManager) -> None:
    manager.instead[Op.EXISTS] = refuse
    with client(manager.endpoint, breaker_failures=1) as made:
        for _ in range(5):
            with pytest.raises(errors.Refused):
                exists(made)
        assert made.home.breaker.state == "closed"
        assert manager.calls[Op.ATTACH] == 1


def test_a_silent_manager_costs_its_time_out_a_few_times_and_then_nothing(manager: SmallManager) -> None:
    with client(manager.endpoint, manager_timeout_ms=500, breaker_failures=2, breaker_longest_ms=200) as made:
        exists(made)
        manager.mute.set()
        for _ in range(2):
            begin = time.monotonic()
            with pytest.raises(errors.DeadlineExceeded):
                exists(made)
            assert time.monotonic() - begin < 0.5 + SLACK_S
        begin = time.monotonic()
        for _ in range(100):
            with pytest.raises(errors.BreakerOpen):
                exists(made)
        assert time.monotonic() - begin < 100 * 0.5 / 2
        # Nobody calls, and still it comes back: the background found out.
        manager.mute.clear()
        wait_until(lambda: made.home.breaker.state == "closed", "the reconnect")
        assert exists(made) == b"\1"


def test_a_dead_manager_that_comes_back_on_its_port() -> None:
    with (
        reserved_ports(1) as (port,),
        contextlib.closing(SmallManager(port=port)) as first,
        client(first.endpoint, breaker_failures=1, breaker_first_ms=10, breaker_longest_ms=50) as made,
    ):
        exists(made)
        first.close()
        with pytest.raises(errors.Unavailable):
            exists(made)
        second = SmallManager(port=port)
        second.epoch = 2
        wait_until(lambda: made.home.breaker.state == "closed", "the reconnect")
        assert exists(made) == b"\0"
        assert made.attached is not None
        assert made.attached.epoch == 2
        second.close()


def test_the_prober_outlives_a_defect_and_a_manager_that_dies_again(
    manager: SmallManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing but the prober closes an open breaker: without one, every call would be a miss for ever."""
    with client(manager.endpoint, breaker_failures=1, breaker_first_ms=10, breaker_longest_ms=20) as made:
        exists(made)
        home = made.home
        opened, failures = home._open, [RuntimeError("can't start new thread")] * 3
        may_open = threading.Event()

        def sometimes(deadline: float) -> Any:
            may_open.wait(30)
            if failures:
                raise failures.pop()
            return opened(deadline)

        monkeypatch.setattr(home, "_open", sometimes)
        for _ in range(3):
            may_open.clear()
            home._failed(errors.Unavailable("it died"))
            assert home.breaker.state != "closed"
            may_open.set()
            wait_until(lambda: home.breaker.state == "closed", "the breaker to close")
        assert exists(made) == b"\1"


@pytest.fixture
def long_silence(monkeypatch: pytest.MonkeyPatch) -> float:
    """Longer than a busy machine makes one short call last; seconds of silence that are the manager's failure."""
    monkeypatch.setattr("polarkv_client.channel._TELLING_S", 0.5)
    return 0.5


@pytest.mark.usefixtures("long_silence")
def test_a_callers_short_deadline_is_not_the_managers_failure(manager: SmallManager) -> None:
    manager.instead[Op.EXISTS] = hang
    with client(manager.endpoint, breaker_failures=1) as made:
        with pytest.raises(errors.DeadlineExceeded):
            exists(made, soon(0.02))
        assert made.home.breaker.state == "closed"


def test_short_deadlines_one_after_the_other_show_that_it_is_silent(manager: SmallManager, long_silence: float) -> None:
    with client(manager.endpoint, breaker_failures=1) as made:
        manager.instead[Op.EXISTS] = hang
        began, calls = time.monotonic(), 0
        while made.home.breaker.state == "closed" and time.monotonic() - began < 30:
            with pytest.raises(errors.DeadlineExceeded):
                exists(made, soon(0.02))
            calls += 1
        assert calls > 1
        assert long_silence <= time.monotonic() - began < 30
        # An answer ends the silence.
        del manager.instead[Op.EXISTS]
        wait_until(lambda: made.home.breaker.state == "closed", "the reconnect")
        exists(made)
        manager.instead[Op.EXISTS] = hang
        with pytest.raises(errors.DeadlineExceeded):
            exists(made, soon(0.02))
        assert made.home.breaker.state == "closed"


def test_short_deadlines_with_a_pause_between_them_are_no_long_silence() -> None:
    """Kind: what is measured from its first occurrence, while nobody looked in between."""
    silence = Silence()
    assert silence.lasts_s(100.0, 100.02) == pytest.approx(0.02)
    assert silence.lasts_s(100.5, 100.52) == pytest.approx(0.52)  # in a row
    assert silence.lasts_s(100.4, 100.45) == pytest.approx(0.45)  # another thread's, which began sooner
    assert silence.lasts_s(3700.0, 3700.02) == pytest.approx(0.02)
    silence.ends()
    assert silence.lasts_s(3700.1, 3700.12) == pytest.approx(0.02)


def test_a_cancellation_wakes_a_call_that_waits(manager: SmallManager) -> None:
    manager.instead[Op.ACQUIRE_READ] = hang
    with client(manager.endpoint, breaker_failures=1) as made:
        scope = Scope(soon(30))
        threading.Timer(0.05, scope.cancel).start()
        begin = time.monotonic()
        with pytest.raises(errors.Cancelled):
            made.acquire_read(made.home, KEY, 20_000, [], scope)
        assert time.monotonic() - begin < 0.05 + SLACK_S
        assert made.home.breaker.state == "closed"
        assert exists(made) == b"\1"


def test_deadlines_of_leases_count_from_when_the_request_was_sent(manager: SmallManager) -> None:
    def late(small: SmallManager, frame: Frame) -> object:
        threading.Event().wait(1.0)
        return small.rules(frame)

    manager.nodes = {7: Node(NodeInfo("n", 7, 1, "Active"), b"secret", lambda: 0)}
    manager.chunks[KEY].ready.set()
    manager.instead = {Op.ACQUIRE_READ: late, Op.BEGIN_STORE: late}
    manager.lease_ms = manager.ticket_ms = 1000
    with client(manager.endpoint, manager_timeout_ms=10_000) as made:
        made.connect(soon())
        before = time.monotonic()
        _, lease_ends = made.acquire_read(made.home, KEY, 0, [], Scope(soon()))
        assert lease_ends - before < 1.9  # from the answer on it would be more than two seconds
        before = time.monotonic()
        _, ticket_ends = made.begin_store(made.home, b"k" * 32, [1], 0, Scope(soon()))
        assert ticket_ends - before < 1.9


def test_a_newer_grant_makes_the_node_table_new(manager: SmallManager) -> None:
    manager.nodes = {7: Node(NodeInfo("n", 7, 1, "Active"), b"", lambda: 0)}
    with client(manager.endpoint) as made:
        made.connect(soon())
        assert made.node(7, 1, soon()).incarnation == 1
        manager.nodes = {7: Node(NodeInfo("n", 7, 2, "Active"), b"", lambda: 0)}
        assert made.node(7, 2, soon()).incarnation == 2
        with pytest.raises(errors.Refused):
            made.node(7, 1, soon())
        for _ in range(20):
            with pytest.raises(errors.Refused):
                made.node(9, 1, soon())
        assert manager.calls[Op.LIST_NODES] < 5  # strange grants do not make a storm


def test_keys_are_routed_by_their_first_byte() -> None:
    low, high = SmallManager(), SmallManager()
    low.shards = [Shard(0, 127), Shard(128, 255, high.endpoint)]
    keys = [bytes([byte]) * 32 for byte in (0, 200, 127, 128)]
    high.chunks[keys[1]] = Chunk(1, 0, 1, committed=True)
    with client(low.endpoint) as made:
        made.connect(soon())
        routes = made.route(keys)
        assert [(channel.endpoint, list(places)) for channel, places in routes] == [
            (low.endpoint, [0, 2]),
            (high.endpoint, [1, 3]),
        ]
        channel, places = routes[1]
        assert made.exists(channel, b"".join(keys[place] for place in places), soon()) == b"\1\0"
        assert len(made.channels) == 2
    low.close()
    high.close()


@pytest.mark.parametrize("where", ["refused", "black hole"])
def test_connecting_ends_in_time(where: str) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        if where == "black hole":
            sock.listen()  # the kernel accepts, nobody answers
        with client(f"tcp://127.0.0.1:{sock.getsockname()[1]}", connect_timeout_ms=100) as made:
            begin = time.monotonic()
            with pytest.raises(errors.PolarKVError):
                made.connect(soon())
            assert time.monotonic() - begin < 0.1 + SLACK_S


def test_names_are_resolved_within_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()

    def slow(*_: object, **__: object) -> list[object]:
        release.wait(30)
        return [(0, 0, 0, "", ("127.0.0.1", 0))]

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    resolver = Resolver("tcp://manager.example:7")
    begin = time.monotonic()
    with pytest.raises(errors.DeadlineExceeded):
        resolver.resolve(soon(0.05))
    assert time.monotonic() - begin < 0.05 + SLACK_S
    release.set()
    assert resolver.resolve(soon()) == "tcp://[127.0.0.1]:7"
    for literal in ("unix:///a/b", "tcp://127.0.0.1:7", "tcp://[::1]:7"):
        assert Resolver(literal).resolve(soon()) == literal


def test_a_name_that_does_not_exist_is_unavailable() -> None:
    def fail(*_: object, **__: object) -> list[object]:
        raise socket.gaierror("no such name")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", fail)
        with pytest.raises(errors.Unavailable, match="no such name"):
            Resolver("tcp://manager.example:7").resolve(soon())
