"""The link from a cache node's process to the manager, and what rides on it."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from polarkv_client.errors import ConfigurationError, Refused, Unauthorized
from polarkv_client.protocol.messages import Carve, Empty, Heartbeat, InventoryItem, Op, Registered, ReportInventory
from polarkv_client.protocol.wire import Frame, decode_body, encode_frame
from polarkv_dataplane.runtime.clock import ManagerClock
from polarkv_dataplane.runtime.counters import Counters, export, labelled
from polarkv_dataplane.runtime.node_link import NodeLink
from polarkv_dataplane.runtime.session import WINDOW, Session, report_inventory
from polarkv_dataplane.runtime.stream import read_frame
from tests.support.cache_node import SECRET, slab_server
from tests.support.fake_manager import FakeManager
from tests.support.ports import reserved_ports
from tests.support.waiting import wait_until


@pytest.fixture
def session() -> Iterator[tuple[Session, socket.socket]]:
    near, far = socket.socketpair()
    yield Session(near, Registered(1, 3, 7, 5, 0, 50, 1000), time.monotonic()), far
    near.close()
    far.close()


def test_the_clock_is_never_early_and_at_most_a_round_trip_late(monkeypatch: pytest.MonkeyPatch) -> None:
    ahead_ms, now = 1_000_000, [100.0]
    monkeypatch.setattr("polarkv_dataplane.runtime.clock.time", SimpleNamespace(monotonic=lambda: now[0]))

    def manager_ms() -> float:
        return now[0] * 1000 + ahead_ms

    clock = ManagerClock(int(manager_ms()) + 40, now[0])  # an answer that took 40 ms to be made
    now[0] += 0.05
    assert manager_ms() <= clock.now_ms() <= manager_ms() + 41
    sent_at = now[0]
    now[0] += 0.002
    clock.observe(int(manager_ms()), sent_at)
    tight = clock.now_ms() - manager_ms()
    assert 0 <= tight <= 3
    clock.observe(int(manager_ms()) + 500, now[0])  # a slow answer does not loosen the bound
    assert clock.now_ms() - manager_ms() <= tight + 1


def test_heartbeats_carry_counters(manager: FakeManager, tmp_path: Path) -> None:
    with slab_server(manager, tmp_path) as slab:
        slab.counters.add(labelled("polarkv_test_total", "kind", "x"), 3)
        channel = manager.channel("slab")
        wait_until(
            lambda: channel.heartbeats and channel.heartbeats[-1].counters.get('polarkv_test_total{kind="x"}') == 3,
            "a heartbeat with the counter",
        )
        assert channel.heartbeats[-1].incarnation == 1
        assert channel.heartbeats[-1].number == 7


def test_a_lost_connection_is_registered_again_with_the_last_incarnation(manager: FakeManager, tmp_path: Path) -> None:
    with slab_server(manager, tmp_path):
        first = manager.channel("slab").register
        assert (first.fresh, first.incarnation) == (True, 0)
        manager.drop_connections()
        again = manager.channel("slab", 2).register
        assert (again.fresh, again.incarnation, again.pool) == (False, 1, first.pool)


def test_a_manager_that_is_silent_is_left_for_a_new_connection(tmp_path: Path) -> None:
    manager = FakeManager(SECRET, heartbeat_ms=20, timeout_ms=500)
    try:
        with slab_server(manager, tmp_path) as slab:
            manager.channel("slab")
            manager.mute.set()
            manager.channel("slab", 2)
            assert slab.counters.snapshot()["polarkv_link_losses_total"] >= 1
            manager.mute.clear()
            wait_until(lambda: len(manager.channels[-1].heartbeats) > 15, "heartbeats to go on")
    finally:
        manager.close()


def test_garbage_from_the_manager_costs_the_connection_only(manager: FakeManager, tmp_path: Path) -> None:
    with slab_server(manager, tmp_path):
        manager.channel("slab").sock.sendall(b"this is no frame at all, but long enough for a head")
        manager.channel("slab", 2)


def test_a_wrong_token_at_the_first_registration_ends_the_process(manager: FakeManager, tmp_path: Path) -> None:
    manager.refuse = Unauthorized("the node token is wrong")
    with slab_server(manager, tmp_path) as slab:
        wait_until(slab._stop.is_set, "the server to give up")
        assert isinstance(slab._stop.error, Unauthorized)


def test_a_refusal_is_tried_again(manager: FakeManager, tmp_path: Path) -> None:
    manager.refuse = Refused("not now")
    with slab_server(manager, tmp_path) as slab:
        wait_until(lambda: slab.counters.snapshot().get("polarkv_link_losses_total", 0) >= 2, "two refusals")
        assert not slab._stop.is_set()
        manager.refuse = None
        manager.channel("slab")


@pytest.mark.parametrize("where", ["describe", "registered", "command"])
def test_a_defect_costs_the_connection_and_not_the_link(manager: FakeManager, tmp_path: Path, where: str) -> None:
    """Kind: the thread that is a node's only way into the cluster ended with the first defect."""
    with slab_server(manager, tmp_path) as slab:
        manager.channel("slab")
        good = getattr(slab, where)
        failures: list[str] = []

        def defective(*arguments: object) -> object:
            if not failures:
                failures.append(where)
                raise RuntimeError("a defect")
            return good(*arguments)

        setattr(slab, where, defective)
        if where == "command":
            manager.carve(0, 4096)
        else:
            manager.drop_connections()
        wait_until(lambda: failures and len(manager.channels) >= 2, "a new registration")
        # Of the last one: that which met the defect may still look open.
        wait_until(lambda: manager.channels[-1].heartbeats, "heartbeats to go on")


def test_a_command_right_behind_the_registration_is_taken() -> None:
    """The answer and the first command may come in one segment."""
    taken: list[Carve] = []

    class Recorder:
        def describe(self, sock: socket.socket) -> Empty:
            return Empty()

        def registered(self, session: Session) -> None:
            pass

        def command(self, session: Session, frame: Frame) -> None:
            taken.append(decode_body(frame.body, Carve))

        def failed(self, error: Exception) -> None:
            raise AssertionError(error)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        link = NodeLink(f"tcp://127.0.0.1:{listener.getsockname()[1]}", Recorder(), Counters(), "test")  # type: ignore[arg-type]
        link.start()
        sock, _ = listener.accept()
        frame = read_frame(sock, time.monotonic() + 5)
        answer = encode_frame(frame.op, frame.request_id, Registered(1, 1, 7, 1, 0, 1000, 5000))
        sock.sendall(answer + encode_frame(Op.CARVE, 0, Carve(1, 0, 4096)) + encode_frame(Op.CARVE, 0, Carve(1, 1, 2)))
        wait_until(lambda: len(taken) == 2, "both commands")
        assert link.close(5)
        sock.close()


def test_posts_do_not_wait_for_answers_but_are_bounded(session: tuple[Session, socket.socket]) -> None:
    near, far = session
    for _ in range(WINDOW):
        assert near.post(Op.HEARTBEAT, lambda: Heartbeat(7, 5, {}))
    assert not near.post(Op.HEARTBEAT, lambda: Heartbeat(7, 5, {}), block=False)
    results: list[bool] = []
    thread = threading.Thread(target=lambda: results.append(near.post(Op.HEARTBEAT, lambda: Heartbeat(7, 5, {}))))
    thread.start()
    first = read_frame(far, time.monotonic() + 5)
    answered = near.answered(Frame(first.op, first.request_id, 0, b"\x90"))
    assert answered is not None and answered[0] == Op.HEARTBEAT
    thread.join(30)
    assert results == [True]
    blocked = threading.Thread(target=lambda: results.append(near.post(Op.HEARTBEAT, lambda: Heartbeat(7, 5, {}))))
    blocked.start()
    near.end()  # whoever waits for room learns that there will be none
    blocked.join(30)
    assert results == [True, False]


def test_trust_ends_when_nothing_sent_lately_was_answered() -> None:
    near, far = socket.socketpair()
    with near, far:
        fresh = Session(near, Registered(1, 3, 7, 5, 0, 50, 1000), time.monotonic())
        assert fresh.trusted()
        stale = Session(near, Registered(1, 3, 7, 5, 0, 50, 1000), time.monotonic() - 1.1)
        assert not stale.trusted()
        fresh.end()
        assert not fresh.trusted()


def test_inventory_goes_in_batches_and_has_an_end(session: tuple[Session, socket.socket]) -> None:
    near, far = session
    item = InventoryItem(b"k" * 32, 1, 2, 3)
    batches = [lambda: [item] * 3, list[InventoryItem], lambda: [item]]
    assert report_inventory(near, iter(batches))
    reports = [decode_body(read_frame(far, time.monotonic() + 5).body, ReportInventory) for _ in range(3)]
    assert [(len(report.items), report.last) for report in reports] == [(3, False), (1, False), (0, True)]
    assert {(report.number, report.incarnation) for report in reports} == {(7, 5)}


@pytest.fixture
def port() -> Iterator[int]:
    with reserved_ports(1) as (port,):
        yield port


def test_counters_are_shown_to_prometheus(port: int) -> None:
    counters = Counters()
    counters.add("polarkv_a_total", 2)
    counters.add(labelled("polarkv_b_total", "kind", "x"), 3)
    counters.gauge("polarkv_c_bytes", lambda: 4)
    stop = export(counters, "127.0.0.1", port, lambda: True)
    try:
        lines = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=5).raise_for_status().text.splitlines()
    finally:
        stop()
    assert "polarkv_a_total 2.0" in lines
    assert 'polarkv_b_total{kind="x"} 3.0' in lines
    assert "polarkv_c_bytes 4.0" in lines


def test_a_server_lives_before_it_is_ready(port: int) -> None:
    ready = threading.Event()
    stop = export(Counters(), "127.0.0.1", port, ready.is_set)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=5) as http:
            assert http.get("/healthz").status_code == 200
            assert http.get("/readyz").status_code == 503
            ready.set()
            assert http.get("/readyz").status_code == 200
    finally:
        stop()


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigurationError, match="metrics_port"):
        export(Counters(), "127.0.0.1", taken.getsockname()[1], lambda: True)
