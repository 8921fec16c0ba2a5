"""The slab server's TCP path: what a grant allows, and nothing else, ever."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from polarkv_client import layout
from polarkv_client.errors import PolarKVError, ProtocolError, Refused, Unauthorized
from polarkv_client.protocol.grants import Access, Extent, Grant, sign
from polarkv_client.protocol.messages import Empty, Op, SlabRead, SlabWrite
from polarkv_client.protocol.wire import HEAD, encode_frame
from polarkv_dataplane.slab import tcp
from polarkv_dataplane.slab.server import SlabServer
from polarkv_dataplane.slab.tcp import MAX_REQUEST_BYTES, PIECE_BYTES
from tests.support.cache_node import MIB, TcpClient, chunk, registered_slab
from tests.support.fake_manager import FakeManager
from tests.support.waiting import wait_until


@pytest.fixture
def client(manager: FakeManager, slab: SlabServer) -> Iterator[TcpClient]:
    made = connect(manager)
    yield made
    made.close()


@pytest.fixture
def impatient(manager: FakeManager, tmp_path: Path) -> Iterator[SlabServer]:
    """A slab server that soon gives up who stalls."""
    with registered_slab(manager, tmp_path, stall_timeout_ms=1000) as server:
        yield server


def connect(manager: FakeManager) -> TcpClient:
    return TcpClient(manager.channel("slab").register.tcp)


def ended(client: TcpClient) -> bool:
    """Whether the server closed the connection, once all that it still had to say is read."""
    try:
        while client.sock.recv(65536):
            pass
    except ConnectionError:
        pass
    return True


def test_chunks_of_all_sizes_come_back_byte_for_byte(manager: FakeManager, slab: SlabServer, client: TcpClient) -> None:
    lengths = [0, 1, 4032, 4033, PIECE_BYTES - 64, PIECE_BYTES, PIECE_BYTES + 1, 3 * MIB + 17]
    extents, chunks, offset = [], [], 8192
    for index, length_bytes in enumerate(lengths):
        key, payload, checksum = chunk(index, length_bytes)
        extents.append(Extent(index, key, offset, length_bytes))
        chunks.append((payload, checksum))
        offset += layout.stride_bytes(length_bytes)
    slab.pool.view[:offset] = b"\xff" * offset
    client.write(manager.grant(Access.WRITE, extents), chunks)
    read = client.read(manager.grant(Access.READ, extents), lengths)
    for extent, (payload, checksum), (header, found) in zip(extents, chunks, read, strict=True):
        assert header == layout.Header(extent.key, extent.length_bytes, checksum, 9)
        assert found == payload
        end = extent.offset_bytes + layout.HEADER_BYTES + extent.length_bytes
        padding = slab.pool.view[end : extent.offset_bytes + layout.stride_bytes(extent.length_bytes)]
        assert not any(padding)  # what lay there before is not carried to disk


def test_picks_choose_extents_in_any_order(manager: FakeManager, client: TcpClient) -> None:
    extents = [Extent(i, bytes([i]) * 32, i * 8192, 100) for i in range(3)]
    payloads = [bytes([65 + i]) * 100 for i in range(3)]
    client.write(manager.grant(Access.WRITE, extents), [(p, layout.checksum([p])) for p in payloads])
    client.ask(Op.SLAB_READ, SlabRead(manager.grant(Access.READ, extents), [2, 0]))
    client.answer()
    raw = b"".join(client.sock.recv(164, socket.MSG_WAITALL) for _ in range(2))
    assert raw[64:164] == payloads[2]
    assert raw[228:] == payloads[0]


def test_a_slot_holds_nothing_while_it_is_written(manager: FakeManager, slab: SlabServer, client: TcpClient) -> None:
    key, payload, checksum = chunk(1, MIB)
    extents = [Extent(0, key, 0, MIB)]
    client.write(manager.grant(Access.WRITE, extents), [(payload, checksum)])
    assert layout.unpack_header(slab.pool.view[:64]) is not None
    client.ask(Op.SLAB_WRITE, SlabWrite(manager.grant(Access.WRITE, extents), [0]))
    client.sock.sendall(payload)  # all but the checksum
    wait_until(lambda: layout.unpack_header(slab.pool.view[:64]) is None, "the header to be erased")
    client.sock.sendall(struct.pack("<Q", checksum))
    client.answer()
    assert layout.expect_header(slab.pool.view, key, MIB).checksum == checksum


def test_a_writer_that_dies_leaves_an_empty_slot(manager: FakeManager, slab: SlabServer, client: TcpClient) -> None:
    key, payload, checksum = chunk(1, MIB)
    client.write(manager.grant(Access.WRITE, [Extent(0, key, 0, MIB)]), [(payload, checksum)])
    client.ask(Op.SLAB_WRITE, SlabWrite(manager.grant(Access.WRITE, [Extent(0, key, 0, MIB)]), [0]))
    client.sock.sendall(payload[: MIB // 2])
    client.close()
    wait_until(lambda: slab.counters.snapshot()["polarkv_slab_tcp_connections"] == 0, "the connection to be closed")
    assert layout.unpack_header(slab.pool.view[:64]) is None


def test_no_byte_lands_after_the_grants_end(manager: FakeManager, slab: SlabServer, client: TcpClient) -> None:
    """A client that stalls past its deadline must not write into memory that was given to another."""
    key, payload, _ = chunk(1, 2 * MIB)
    sent = MIB // 2
    client.ask(
        Op.SLAB_WRITE, SlabWrite(manager.grant(Access.WRITE, [Extent(0, key, 0, 2 * MIB)], deadline_ms=1500), [0])
    )
    client.sock.sendall(payload[:sent])
    wait_until(lambda: slab.pool.view[64 : 64 + sent] == payload[:sent], "the first half")
    ends_at = time.monotonic() + 1.5
    wait_until(lambda: time.monotonic() > ends_at, "the grant's end")
    slab.pool.view[: 2 * MIB] = b"\xee" * (2 * MIB)  # the next owner's bytes
    client.sock.sendall(payload[sent : sent + MIB])
    with pytest.raises(Refused, match="ended"):
        client.answer()
    assert slab.pool.view[: 2 * MIB] == b"\xee" * (2 * MIB)


def test_a_reader_past_the_grants_end_is_cut_off(manager: FakeManager, slab: SlabServer, client: TcpClient) -> None:
    length_bytes = 30 * MIB  # more than socket buffers take
    client.ask(
        Op.SLAB_READ,
        SlabRead(manager.grant(Access.READ, [Extent(0, b"k" * 32, 0, length_bytes)], deadline_ms=1500), [0]),
    )
    client.answer()
    ends_at = time.monotonic() + 1.55
    wait_until(lambda: time.monotonic() > ends_at, "the grant's end")
    received = 0
    while data := client.sock.recv(1 << 20):
        received += len(data)
    assert received < length_bytes


def test_a_reader_that_takes_nothing_is_dropped(manager: FakeManager, impatient: SlabServer) -> None:
    client = connect(manager)
    client.ask(Op.SLAB_READ, SlabRead(manager.grant(Access.READ, [Extent(0, b"k" * 32, 0, 30 * MIB)]), [0]))
    error = 'polarkv_slab_tcp_errors_total{kind="DeadlineExceeded"}'
    wait_until(lambda: impatient.counters.snapshot().get(error) == 1, "the send's time-out")
    open_ones = "polarkv_slab_tcp_connections"
    wait_until(lambda: impatient.counters.snapshot()[open_ones] == 0, "the connection to be closed")
    client.close()


@pytest.mark.usefixtures("impatient")
def test_a_writer_that_stalls_is_told_and_dropped(manager: FakeManager) -> None:
    client = connect(manager)
    key, payload, _ = chunk(1, MIB)
    client.ask(Op.SLAB_WRITE, SlabWrite(manager.grant(Access.WRITE, [Extent(0, key, 0, MIB)]), [0]))
    client.sock.sendall(payload[:1000])
    with pytest.raises(PolarKVError):
        client.answer()
    assert ended(client)
    client.close()


EXTENT = Extent(0, b"k" * 32, 0, 100)


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"incarnation": 99}, Refused, "incarnation"),
        ({"epoch": 99}, Refused, "epoch"),
        ({"node": 99}, Refused, "cache node 99"),
        ({"deadline_ms": -1}, Refused, "ended"),
        ({"access": Access.WRITE}, Refused, "access"),
        ({"secret": b"another cluster's secret"}, Unauthorized, "signature"),
        ({"extents": [Extent(0, b"k" * 32, 32 * MIB - 4096, 5000)]}, Refused, "outside"),
        ({"extents": [Extent(0, b"k" * 32, -4096, 100)]}, Refused, "outside"),
        ({"extents": [Extent(0, b"k" * 32, 0, -1)]}, Refused, "range"),
        ({"extents": []}, ProtocolError, "pick 0"),
    ],
)
def test_a_read_without_the_right_to_it_is_refused_and_the_connection_stays(
    manager: FakeManager, client: TcpClient, changes: dict[str, object], error: type[PolarKVError], text: str
) -> None:
    fields: dict[str, object] = {
        "access": Access.READ, "node": 7, "incarnation": 1, "epoch": 1, "holder": 1, "tenant": 9,
        "deadline_ms": 30_000, "extents": [EXTENT], "secret": manager.secrets.grant_key,
    } | changes  # fmt: skip
    fields["deadline_ms"] = manager.now_ms() + int(str(fields["deadline_ms"]))
    secret = fields.pop("secret")
    assert isinstance(secret, bytes)
    client.ask(Op.SLAB_READ, SlabRead(sign(Grant(**fields), secret), [0]))  # type: ignore[arg-type]
    with pytest.raises(error, match=text):
        client.answer()
    client.read(manager.grant(Access.READ, [EXTENT]), [100])


def test_a_refused_writer_gets_the_reason_although_it_is_still_sending(manager: FakeManager, client: TcpClient) -> None:
    key, payload, _ = chunk(1, 8 * MIB)
    client.ask(Op.SLAB_WRITE, SlabWrite(manager.grant(Access.WRITE, [Extent(0, key, 0, 8 * MIB)], epoch=99), [0]))
    client.sock.sendall(payload)
    with pytest.raises(Refused, match="epoch"):
        client.answer()
    assert ended(client)


def test_a_new_incarnation_closes_every_connection(manager: FakeManager, slab: SlabServer, client: TcpClient) -> None:
    grant = manager.grant(Access.READ, [EXTENT])
    client.read(grant, [100])
    manager.new_incarnation_for_known = True
    manager.drop_connections()
    wait_until(lambda: slab._incarnation == 2, "the second life")
    assert ended(client)
    again = connect(manager)
    again.ask(Op.SLAB_READ, SlabRead(grant, [0]))
    with pytest.raises(Refused, match="incarnation"):
        again.answer()
    again.close()


def test_connections_outlive_a_manager_that_comes_back(
    manager: FakeManager, slab: SlabServer, client: TcpClient
) -> None:
    old = manager.grant(Access.READ, [EXTENT])
    client.read(old, [100])
    manager.epoch = 2
    manager.drop_connections()
    manager.channel("slab", 2)
    wait_until(lambda: slab._gate.life.epoch == 2, "the new epoch")
    client.ask(Op.SLAB_READ, SlabRead(old, [0]))
    with pytest.raises(Refused, match="epoch"):
        client.answer()
    client.read(manager.grant(Access.READ, [EXTENT]), [100])


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        os.urandom(4096),
        b"\0" * 100_000,
        HEAD.pack(b"PK", 99, Op.SLAB_READ, 1, 0, 0),
        HEAD.pack(b"PK", 1, Op.SLAB_READ, 1, MAX_REQUEST_BYTES + 1, 0),
        HEAD.pack(b"PK", 1, Op.SLAB_READ, 1, 10, 0) + b"\xff" * 10,
        encode_frame(Op.ATTACH, 1, Empty()),
    ],
    ids=["http", "random", "zeros", "version", "oversized", "no-message", "wrong-op"],
)
def test_garbage_closes_its_own_connection_only(manager: FakeManager, client: TcpClient, garbage: bytes) -> None:
    client.read(manager.grant(Access.READ, [EXTENT]), [100])
    bad = connect(manager)
    bad.sock.sendall(garbage)
    with pytest.raises(PolarKVError):
        bad.answer()
    bad.sock.shutdown(socket.SHUT_WR)
    assert ended(bad)
    bad.close()
    client.read(manager.grant(Access.READ, [EXTENT]), [100])


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("sent", [1, HEAD.size, HEAD.size + 5])
def test_a_truncated_frame_ends_in_time(manager: FakeManager, sent: int) -> None:
    frame = encode_frame(Op.SLAB_READ, 1, SlabRead(manager.grant(Access.READ, [EXTENT]), [0]))
    bad = connect(manager)
    bad.sock.sendall(frame[:sent])  # and nothing more
    assert ended(bad)
    bad.close()


def test_a_connection_that_asks_for_nothing_is_closed(
    manager: FakeManager, slab: SlabServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kind: silent connections held the slab server's places until everyone else was refused."""
    monkeypatch.setattr(tcp, "_IDLE_S", 0.1)
    silent = connect(manager)
    assert ended(silent)
    silent.close()
    wait_until(lambda: slab.counters.snapshot()["polarkv_slab_tcp_connections"] == 0, "its place to be free")


def test_connections_beyond_the_bound_are_refused_with_the_reason(manager: FakeManager, tmp_path: Path) -> None:
    with registered_slab(manager, tmp_path, max_connections=2) as slab:
        kept = [connect(manager) for _ in range(2)]
        for client in kept:
            client.read(manager.grant(Access.READ, [EXTENT]), [100])
        extra = connect(manager)
        extra.ask(Op.SLAB_READ, SlabRead(manager.grant(Access.READ, [EXTENT]), [0]))
        with pytest.raises(Refused, match="2 connections are open"):
            extra.answer()
        extra.close()
        kept[0].close()
        wait_until(lambda: slab.counters.snapshot()["polarkv_slab_tcp_connections"] == 1, "room")
        late = connect(manager)
        late.read(manager.grant(Access.READ, [EXTENT]), [100])
        for client in (late, kept[1]):
            client.close()


def test_bytes_are_counted(manager: FakeManager, slab: SlabServer, client: TcpClient) -> None:
    key, payload, checksum = chunk(1, MIB)
    extents = [Extent(0, key, 0, MIB)]
    client.write(manager.grant(Access.WRITE, extents), [(payload, checksum)])
    client.read(manager.grant(Access.READ, extents), [MIB])
    wait_until(lambda: slab.counters.snapshot()["polarkv_slab_tcp_read_chunks_total"] == 1, "the count")
    values = slab.counters.snapshot()
    assert values["polarkv_slab_tcp_write_bytes_total"] == MIB
    assert values["polarkv_slab_tcp_read_bytes_total"] == MIB + 64
