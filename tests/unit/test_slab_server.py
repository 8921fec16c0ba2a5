"""The slab server as a whole: handing out memory, inventories, and its ends."""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import socket
import threading
import time
from pathlib import Path

import pytest

from polarkv_client import layout
from polarkv_client.errors import ConfigurationError, PolarKVError, ProtocolError, Refused, Unauthorized
from polarkv_client.protocol.grants import Access, Extent
from polarkv_client.protocol.messages import Op, SlabAttach, SlabAttached
from polarkv_client.protocol.wire import Connection, decode_body, encode_frame, raise_failure
from polarkv_dataplane.embedded.supervisor import STOP_S
from polarkv_dataplane.runtime.stopping import Stop
from polarkv_dataplane.runtime.stream import read_frame
from polarkv_dataplane.slab.server import SlabServer
from polarkv_dataplane.slab.settings import SlabSettings
from tests.support.cache_node import MIB, TcpClient, secret_file, slab_server, store
from tests.support.fake_manager import FakeManager
from tests.support.processes import server_process
from tests.support.waiting import wait_until


def attach(path: Path, request: SlabAttach) -> tuple[SlabAttached, int, socket.socket]:
    """Ask for the memory: (answer, descriptor, the connection)."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(30)
    try:
        sock.connect(str(path))
        sock.sendall(encode_frame(Op.SLAB_ATTACH, 1, request))
        data, fds, _, _ = socket.recv_fds(sock, 65536, 1)
        near, far = socket.socketpair()
        with near, far:
            near.sendall(data)
            frame = read_frame(far, time.monotonic() + 30)
        raise_failure(frame)
        return decode_body(frame.body, SlabAttached), fds[0], sock
    except BaseException:
        sock.close()
        raise


@pytest.mark.parametrize("access", [Access.READ, Access.WRITE])
def test_a_grant_of_either_kind_gets_the_memory(
    manager: FakeManager, slab: SlabServer, tmp_path: Path, access: Access
) -> None:
    grant = manager.grant(access, [Extent(0, b"k" * 32, 0, 100)])
    answer, fd, sock = attach(tmp_path / "slab.sock", SlabAttach(grant=grant))
    assert answer == SlabAttached(slab.pool.id, 7, 1, 32 * MIB)
    slab.pool.view[4096:4100] = b"same"
    with mmap.mmap(fd, answer.memory_bytes) as mapped:
        assert mapped[4096:4100] == b"same"
    os.close(fd)
    sock.close()


def test_the_node_token_gets_the_memory_and_others_do_not(
    manager: FakeManager, slab: SlabServer, tmp_path: Path
) -> None:
    path = tmp_path / "slab.sock"
    _, fd, sock = attach(path, SlabAttach(token=manager.secrets.node_token))
    os.close(fd)
    sock.close()
    with pytest.raises(Unauthorized, match="secret_file"):
        attach(path, SlabAttach(token="wrong"))
    with pytest.raises(PolarKVError):
        attach(path, SlabAttach())
    with pytest.raises(Refused, match="ended"):
        attach(path, SlabAttach(grant=manager.grant(Access.READ, [], deadline_ms=-5)))
    with pytest.raises(Refused, match="incarnation"):
        attach(path, SlabAttach(grant=manager.grant(Access.READ, [], incarnation=9)))


def test_nothing_is_served_before_the_first_registration(manager: FakeManager, tmp_path: Path) -> None:
    manager.refuse = Refused("not now")
    with slab_server(manager, tmp_path) as server:
        with pytest.raises(Refused, match="not registered"):
            attach(tmp_path / "slab.sock", SlabAttach(token=manager.secrets.node_token))
        tcp = TcpClient(f"tcp://127.0.0.1:{server._tcp_port}")
        with pytest.raises(Refused, match="not registered"):
            tcp.read(manager.grant(Access.READ, [Extent(0, b"k" * 32, 0, 100)]), [100])
        tcp.close()


def test_the_connection_ends_with_the_incarnation(manager: FakeManager, slab: SlabServer, tmp_path: Path) -> None:
    _, fd, sock = attach(tmp_path / "slab.sock", SlabAttach(token=manager.secrets.node_token))
    os.close(fd)
    manager.new_incarnation_for_known = True
    manager.drop_connections()
    assert sock.recv(1) == b""
    sock.close()


def test_a_fresh_slab_reports_that_it_holds_nothing(manager: FakeManager, slab: SlabServer) -> None:
    channel = manager.channel("slab")
    wait_until(lambda: channel.inventory_complete, "the inventory")
    assert channel.inventory == []


def test_after_the_managers_restart_the_slab_proves_what_it_holds(manager: FakeManager, slab: SlabServer) -> None:
    slab_bytes, stride = 4 * MIB, 128 * 1024
    manager.carve(slab_bytes, stride)
    manager.carve(2 * slab_bytes, MIB)
    wait_until(lambda: len(slab._carving.slabs()) == 2, "both carvings")
    stored = {}
    for number, offset in ((1, slab_bytes), (2, slab_bytes + 5 * stride), (3, 2 * slab_bytes + 3 * MIB)):
        key, _, checksum = store(manager, offset, number)
        stored[key] = (offset, checksum)
    erased, _, _ = store(manager, slab_bytes + stride, 4)
    slab.pool.view[slab_bytes + stride] ^= 1  # its header is not valid any more
    uncarved, _, _ = store(manager, 0, 5)
    manager.epoch = 2
    manager.drop_connections()
    channel = manager.channel("slab", 2)
    wait_until(lambda: channel.inventory_complete, "the inventory")
    assert {item.key: (item.offset_bytes, item.checksum) for item in channel.inventory} == stored
    assert {(item.length_bytes, item.tenant) for item in channel.inventory} == {(100_000, 9)}
    assert erased not in stored and uncarved not in stored


def test_a_new_incarnation_proves_the_memory_and_is_carved_anew(manager: FakeManager, slab: SlabServer) -> None:
    manager.carve(0, MIB)
    wait_until(slab._carving.slabs, "the carving")
    key, _, checksum = store(manager, 0, 1)
    manager.new_incarnation_for_known = True
    manager.drop_connections()
    channel = manager.channel("slab", 2)
    wait_until(lambda: channel.inventory_complete, "the inventory")
    assert [(item.key, item.offset_bytes, item.checksum) for item in channel.inventory] == [(key, 0, checksum)]
    assert slab._carving.slabs() == {}


@pytest.mark.parametrize(
    ("base", "stride"), [(1, 4096), (-4 * MIB, 4096), (32 * MIB, 4096), (0, 5000), (0, 8 * MIB), (0, -4096)]
)
def test_a_carving_that_cannot_be_is_left(manager: FakeManager, slab: SlabServer, base: int, stride: int) -> None:
    manager.carve(base, stride)
    manager.carve(4 * MIB, 8192)
    wait_until(lambda: slab._carving.slabs() == {4 * MIB: 8192}, "the good one alone")
    manager.carve(4 * MIB, 0)
    wait_until(lambda: slab._carving.slabs() == {}, "none")


def test_garbage_on_the_unix_socket_is_survived(manager: FakeManager, slab: SlabServer, tmp_path: Path) -> None:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(30)
    sock.connect(str(tmp_path / "slab.sock"))
    sock.sendall(b"garbage" * 100)
    with pytest.raises(ProtocolError, match="not a PolarKV peer"):
        raise_failure(read_frame(sock, time.monotonic() + 30))
    sock.settimeout(30)
    sock.shutdown(socket.SHUT_WR)
    assert sock.recv(1) == b""
    sock.close()
    _, fd, again = attach(tmp_path / "slab.sock", SlabAttach(token=manager.secrets.node_token))
    os.close(fd)
    again.close()


def test_a_socket_in_use_is_refused_and_a_dead_one_replaced(
    manager: FakeManager, slab: SlabServer, tmp_path: Path
) -> None:
    settings = {
        "node": "n", "manager": manager.endpoint, "secret_file": secret_file(tmp_path), "memory_bytes": MIB,
    }  # fmt: skip
    for change, field in (
        ({"unix_socket": str(tmp_path / "slab.sock")}, "unix_socket"),
        ({"listen_port": slab._tcp_port}, "listen"),
    ):
        with pytest.raises(ConfigurationError) as caught:
            SlabServer(SlabSettings(**settings, **change), Stop()).start()
        assert caught.value.field == field
    dead = tmp_path / "dead.sock"
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(dead))
    stop = Stop()
    server = SlabServer(SlabSettings(**settings, unix_socket=str(dead)), stop)
    server.start()
    stop.set()
    server.stop()
    assert not dead.exists()


def test_readers_and_writers_side_by_side(manager: FakeManager, slab: SlabServer) -> None:
    failures: list[BaseException] = []

    def work(index: int) -> None:
        try:
            for turn in range(10):
                key, payload, checksum = store(manager, index * MIB, index * 100 + turn, 200_000)
                client = TcpClient(manager.channel("slab").register.tcp)
                [(header, found)] = client.read(
                    manager.grant(Access.READ, [Extent(0, key, index * MIB, len(payload))]), [len(payload)]
                )
                client.close()
                assert found == payload and header == layout.Header(key, len(payload), checksum, 9)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert failures == []


def test_the_process_ends_cleanly_on_sigterm(manager: FakeManager, tmp_path: Path) -> None:
    settings: dict[str, object] = {
        "node": "node-1", "manager": manager.endpoint, "secret_file": secret_file(tmp_path),
        "memory_bytes": 32 * MIB, "unix_socket": str(tmp_path / "slab.sock"),
    }  # fmt: skip
    log = tmp_path / "log"
    with server_process("slab", settings, log) as process:
        register = manager.channel("slab").register
        wait_until(lambda: "ready slab node=node-1 incarnation=1" in log.read_text(), "the ready line")
        client = TcpClient(register.tcp)
        client.read(manager.grant(Access.READ, [Extent(0, b"k" * 32, 0, 100)]), [100])
        asked_at = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        assert time.monotonic() - asked_at < STOP_S
        client.close()
    assert not (tmp_path / "slab.sock").exists()
    assert log.read_text().count("ready") == 1


def test_a_process_that_was_killed_is_followed_by_a_fresh_life(manager: FakeManager, tmp_path: Path) -> None:
    settings: dict[str, object] = {
        "node": "node-1", "manager": manager.endpoint, "secret_file": secret_file(tmp_path),
        "memory_bytes": 32 * MIB, "unix_socket": str(tmp_path / "slab.sock"),
    }  # fmt: skip
    with server_process("slab", settings, tmp_path / "log"):
        first = manager.channel("slab").register
        with contextlib.closing(Connection.open(first.shm, time.monotonic() + 30)):
            pass
    with server_process("slab", settings, tmp_path / "log"):
        second = manager.channel("slab", 2).register
        assert (second.fresh, second.incarnation) == (True, 0)
        assert second.pool != first.pool
        wait_until(lambda: manager.channel("slab", 2).inventory_complete, "the inventory")


def test_a_process_with_a_wrong_setting_says_so_and_fails(manager: FakeManager, tmp_path: Path) -> None:
    settings: dict[str, object] = {
        "node": "node-1", "manager": manager.endpoint, "secret_file": secret_file(tmp_path), "memory_bytes": 1 << 50,
    }  # fmt: skip
    with server_process("slab", settings, tmp_path / "log") as process:
        assert process.wait(20) != 0
    assert "memory_bytes=" in (tmp_path / "log").read_text()
