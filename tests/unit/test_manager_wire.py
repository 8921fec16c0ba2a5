"""A manager's ports: what is not a frame, not allowed or too much ends that connection, and no other."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from polarkv_client import errors
from polarkv_client.keys import golden_digest, join_keys
from polarkv_client.protocol.messages import (
    Attach,
    Attached,
    BeginStore,
    Heartbeat,
    HeartbeatAnswer,
    Keys,
    Op,
    Outcomes,
    Registered,
)
from polarkv_client.protocol.wire import HEAD, Connection, connect_socket, decode_body, encode_frame
from polarkv_dataplane.manager.shell import peer
from tests.support.managers import (
    OTHER_TOKEN,
    TOKEN,
    Client,
    FakeNode,
    NodeSide,
    Running,
    deadline,
    key,
    make_settings,
    running_manager,
    stats,
)
from tests.support.waiting import wait_until

HELLO = Attach(1, 1, TOKEN, golden_digest(), "test", "host")


@pytest.fixture(scope="module")
def manager(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running_manager(make_settings(tmp_path_factory.mktemp("manager"), attach_timeout_ms=1500)) as running:
        yield running


def raw(manager: Running, data: bytes, *, tcp: bool = True) -> bytes:
    """Send bytes and return all that comes until the manager closes the connection."""
    with connect_socket(manager.tcp if tcp else manager.unix, deadline()) as sock:
        sock.settimeout(10)
        received = b""
        try:
            sock.sendall(data)
            while part := sock.recv(65536):
                received += part
        except ConnectionResetError:
            pass
        return received


def failure(received: bytes) -> str:
    """The text of the failure frame in ``received``."""
    _, _, _, _, length_bytes, status = HEAD.unpack(received[: HEAD.size])
    assert status != 0
    return received[HEAD.size : HEAD.size + length_bytes].decode(errors="replace")


@pytest.mark.parametrize("tcp", [True, False], ids=["tcp", "unix"])
@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "not a PolarKV peer"),
        (bytes(64), "not a PolarKV peer"),
        (HEAD.pack(b"PK", 9, Op.ATTACH, 7, 0, 0), "upgrade the older one"),
        (HEAD.pack(b"PK", 1, Op.ATTACH, 7, 0xFFFF_FFFF, 0), "exceeds the limit"),
        (HEAD.pack(b"PK", 1, Op.ATTACH, 7, 1 << 20, 0), "exceeds the limit"),
        (HEAD.pack(b"PK", 1, Op.ATTACH, 7, 3, 0) + b"\xc1\xc1\xc1", "not a valid Attach"),
        (encode_frame(Op.EXISTS, 7, Keys(key(1))), "comes first"),
        (encode_frame(99, 7, Keys(key(1))), "comes first"),
        (encode_frame(Op.ATTACH, 7, HELLO) + encode_frame(Op.REGISTER, 8, HELLO), "cannot ask for"),
        (encode_frame(Op.ATTACH, 7, HELLO) + encode_frame(Op.ATTACH, 8, HELLO), "cannot ask for"),
    ],
)
def test_what_is_no_request_closes_its_connection_with_a_reason(
    manager: Running, data: bytes, text: str, tcp: bool
) -> None:
    received = raw(manager, data, tcp=tcp)
    while HEAD.unpack(received[: HEAD.size])[5] == 0:  # an answer to the part that was good
        received = received[HEAD.size + HEAD.unpack(received[: HEAD.size])[4] :]
    assert text in failure(received)
    with Client(manager.tcp) as client:
        assert client.exists(key(1)) == [0]


def test_a_version_that_cannot_be_spoken_is_answered_to_the_request_it_came_with(manager: Running) -> None:
    received = raw(manager, HEAD.pack(b"PK", 9, Op.ATTACH, 77, 0, 0))
    assert HEAD.unpack(received[: HEAD.size])[2:4] == (Op.ATTACH, 77)


def test_random_bytes_never_stop_the_manager(manager: Running) -> None:
    rng = random.Random(5)
    hello = encode_frame(Op.ATTACH, 1, HELLO)
    for round_number in range(40):
        good = bytearray(hello + encode_frame(rng.choice(list(Op)), 2, BeginStore(key(1) * 3, [10], 0)))
        for _ in range(rng.randrange(1, 20)):
            good[rng.randrange(len(good) if round_number % 2 else len(good) - len(hello))] = rng.randrange(256)
        raw(manager, bytes(good) + rng.randbytes(rng.randrange(200)) + bytes(64))
    with Client(manager.tcp) as client:
        assert client.exists(key(1)) == [0]


def test_a_truncated_frame_is_an_end_like_any_other(manager: Running) -> None:
    with Client(manager.tcp) as client:
        client.connection.sock.sendall(encode_frame(Op.EXISTS, 5, Keys(key(1)))[:-3])
        client.connection.sock.shutdown(socket.SHUT_WR)
        assert "inside a frame" in failure(client.connection.sock.recv(65536))
    with Client(manager.tcp) as client:
        assert client.exists(key(1)) == [0]


def test_frames_may_come_in_any_pieces(manager: Running) -> None:
    with connect_socket(manager.tcp, deadline()) as sock:
        sock.settimeout(10)
        frames = encode_frame(Op.ATTACH, 1, HELLO)
        requests = [Keys(join_keys([key(i) for i in range(n)])) for n in range(5)]
        frames += b"".join(encode_frame(Op.EXISTS, 2 + n, request) for n, request in enumerate(requests))
        rng = random.Random(1)
        at = 0
        while at < len(frames):
            step = rng.randrange(1, 40)
            sock.sendall(frames[at : at + step])
            at += step
        received = b""
        ids: list[int] = []
        while len(ids) < 6:
            received += sock.recv(65536)
            while len(received) >= HEAD.size:
                _, _, _, request_id, length_bytes, status = HEAD.unpack(received[: HEAD.size])
                if len(received) < HEAD.size + length_bytes:
                    break
                assert status == 0
                ids.append(request_id)
                received = received[HEAD.size + length_bytes :]
        assert ids == [1, 2, 3, 4, 5, 6]


def test_silence_before_attaching_ends(manager: Running) -> None:
    assert "in time" in failure(raw(manager, b""))
    with Client(manager.tcp) as client:  # and not after it
        wait_until(lambda: raw(manager, b""), "another connection to time out")
        assert client.exists(key(1)) == [0]


@pytest.mark.parametrize(
    ("attach", "error", "text"),
    [
        ({"token": "wrong-token"}, errors.Unauthorized, "tokens file"),
        ({"token": ""}, errors.Unauthorized, "tokens file"),
        ({"golden": bytes(32)}, errors.GoldenMismatch, "golden"),
        ({"wire_min": 2, "wire_max": 3}, errors.VersionMismatch, "upgrade"),
        ({"wire_min": 0, "wire_max": 0}, errors.VersionMismatch, "upgrade"),
    ],
)
def test_who_cannot_attach_is_told_why(
    manager: Running, attach: dict[str, object], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text) as caught:
        Client(manager.tcp, **attach)  # type: ignore[arg-type]
    assert "wrong-token" not in str(caught.value)


def test_a_newer_client_is_served_with_the_version_both_speak(manager: Running) -> None:
    with Client(manager.tcp, wire_max=7) as client:
        assert client.attached.wire == 1
        assert client.attached.tenant == "a"
        assert client.attached.epoch == manager.epoch


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        ((Op.EXISTS, Keys(key(1)[:-1])), "whole keys"),
        ((Op.EXISTS, Keys(key(1) * 16_385)), "split the batch"),
        ((Op.BEGIN_STORE, BeginStore(key(1) * 3, [1, 2])), "one a key"),
        ((Op.BEGIN_STORE, BeginStore(key(1), [0])), "use 1 to"),
        ((Op.BEGIN_STORE, BeginStore(key(1), [(1 << 30) + 1])), "use 1 to"),
        ((Op.BEGIN_STORE, BeginStore(key(1), [-5])), "use 1 to"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_and_the_connection_stays(
    manager: Running, request_: tuple[Op, object], text: str
) -> None:
    with Client(manager.tcp) as client:
        with pytest.raises(errors.Refused, match=text):
            client.call(*request_, Outcomes)
        assert client.exists(key(1)) == [0]


def test_connections_are_bounded(tmp_path: Path) -> None:
    with running_manager(make_settings(tmp_path, max_connections=3)) as manager:
        clients = [Client(manager.tcp) for _ in range(3)]
        with pytest.raises(errors.PolarKVError):
            Client(manager.tcp)
        assert "max_connections" in failure(raw(manager, b""))
        clients.pop().close()
        another = wait_until(lambda: attach_if_possible(manager), "a place for another connection")
        assert another is not None
        for client in [*clients, another]:
            assert client.exists(key(1)) == [0]
            client.close()


def attach_if_possible(manager: Running) -> Client | None:
    try:
        return Client(manager.tcp)
    except errors.PolarKVError:
        return None


def test_a_peer_that_does_not_read_is_not_listened_to(manager: Running) -> None:
    with connect_socket(manager.unix, deadline()) as sock:
        sock.sendall(encode_frame(Op.ATTACH, 1, HELLO))
        request = encode_frame(Op.EXISTS, 2, Keys(key(1) * 4096))
        sock.setblocking(False)
        sent = 0
        small = encode_frame(Op.LIST_NODES, 3, Keys(b""))
        with contextlib.suppress(BlockingIOError):  # it stops taking: what it holds for this peer is bounded
            while sent < 1 << 30:
                sent += sock.send(request + small * 2000)
        assert sent < 64 << 20
        with Client(manager.tcp) as client:
            assert client.exists(key(1)) == [0]


def test_a_peer_that_does_not_read_is_closed_all_the_same(
    manager: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was sent to it before would otherwise keep the connection, and the cache node's place, for ever."""
    monkeypatch.setattr(peer, "FLUSH_S", 0.1)
    with FakeNode(manager.unix) as other, connect_socket(manager.unix, deadline()) as sock:
        # Its own three; those of other tests end when the manager comes to it.
        before = 3
        wait_until(lambda: stats(manager)["connections"] == before, "the connections of other tests to end")
        sock.sendall(encode_frame(Op.REGISTER, 1, other.register("slab", 0, node="deaf", pool="deaf")))
        registered = decode_body(Connection(sock).receive(deadline()).body, Registered)
        beats = encode_frame(Op.HEARTBEAT, 2, Heartbeat(registered.number, registered.incarnation, {})) * 2000
        sock.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                sock.send(beats)
        assert stats(manager)["connections"] == before
        again = NodeSide(manager.unix, other.register("slab", 1, node="deaf", pool="deaf"))
        wait_until(lambda: stats(manager)["connections"] == before, "the deaf one's connection to be closed")
        again.close()


def test_a_tenant_cannot_name_the_tickets_and_leases_of_another(manager: Running) -> None:
    with FakeNode(manager.unix), Client(manager.tcp) as mine, Client(manager.tcp, OTHER_TOKEN) as other:
        keys = [key(100), key(101)]
        granted = mine.begin(keys)
        assert other.commit(granted.ticket, keys) == [1, 1]
        assert mine.commit(granted.ticket, keys) == [0, 0]
        lease = mine.acquire(keys).lease
        other.release(lease)
        assert stats(manager)["leases"] == 1
        mine.release(lease)
        assert stats(manager)["leases"] == 0


def test_a_client_cannot_speak_as_a_node(manager: Running) -> None:
    with Client(manager.tcp) as client, pytest.raises(errors.ProtocolError, match="cannot ask"):
        client.call(Op.HEARTBEAT, Heartbeat(1, 1, {}), HeartbeatAnswer)


def test_an_answer_to_a_large_call_arrives_whole(manager: Running) -> None:
    with Client(manager.unix) as client:
        keys = [struct.pack("<Q", n) + os.urandom(24) for n in range(16_384)]
        assert client.exists(*keys) == [0] * len(keys)


def test_attaching_twice_from_one_place_shares_nothing_but_the_name(manager: Running) -> None:
    with Client(manager.tcp) as one, Client(manager.tcp) as two:
        assert one.attached.session != two.attached.session
    connection = Connection.open(manager.unix, deadline())
    assert connection.call(Op.ATTACH, HELLO, Attached, deadline()).tenant == "a"
    connection.close()
