"""Frames and the blocking connection: versions, garbage, truncation, deadlines."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import socket
import threading
import time
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polarkv_client import errors
from polarkv_client.protocol import messages, wire
from polarkv_client.protocol.messages import AcquireRead, Empty, Keys, NodeInfo, Op, Outcomes
from polarkv_client.protocol.wire import (
    HEAD,
    Connection,
    Status,
    decode_body,
    decode_head,
    encode_failure,
    encode_frame,
)

SLACK_S = 1.5  # for a loaded machine; what would hang here hangs for longer
ERRORS = [kind for kind in vars(errors).values() if inspect.isclass(kind) and issubclass(kind, errors.PolarKVError)]


@pytest.fixture
def pair() -> Iterator[tuple[Connection, socket.socket]]:
    ours, theirs = socket.socketpair()
    connection = Connection(ours)
    yield connection, theirs
    connection.close()
    theirs.close()


def soon(seconds: float = 5.0) -> float:
    return time.monotonic() + seconds


def test_golden_vector() -> None:
    assert encode_frame(Op.EXISTS, 7, Keys(b"k")).hex() == "504b010807000000040000000000000091c4016b"


@given(st.integers(0, 255), st.integers(0, 2**32 - 1), st.binary(max_size=99), st.integers(0, 255))
def test_a_frame_comes_back(op: int, request_id: int, keys: bytes, status: int) -> None:
    raw = encode_frame(op, request_id, Keys(keys), status)
    assert decode_head(raw[: HEAD.size]) == (op, request_id, len(raw) - HEAD.size, status)
    assert decode_body(raw[HEAD.size :], Keys) == Keys(keys)


@pytest.mark.parametrize("version", [0, wire.WIRE_VERSION + 1, 255])
def test_another_version_is_a_loud_error(version: int) -> None:
    raw = bytearray(encode_frame(Op.EXISTS, 1, Empty()))
    raw[2] = version
    with pytest.raises(errors.VersionMismatch, match=f"version {version}"):
        decode_head(raw[: HEAD.size])


@given(st.binary(min_size=HEAD.size, max_size=HEAD.size).filter(lambda raw: not raw.startswith(b"PK")))
def test_garbage_is_no_head(raw: bytes) -> None:
    with pytest.raises(errors.ProtocolError):
        decode_head(raw)


def test_a_body_beyond_the_limit_is_refused_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = encode_frame(Op.EXISTS, 1, Keys(b"k" * 100))
    monkeypatch.setattr(wire, "MAX_BODY_BYTES", 99)
    with pytest.raises(errors.ProtocolError, match="exceeds"):
        decode_head(raw[: HEAD.size])
    with pytest.raises(errors.ProtocolError, match="split"):
        encode_frame(Op.EXISTS, 1, Keys(b"k" * 100))


@given(st.binary(max_size=60))
def test_a_garbage_body_is_an_error_or_a_message(raw: bytes) -> None:
    with contextlib.suppress(errors.ProtocolError):
        decode_body(raw, AcquireRead)


def test_messages_grow_at_their_end() -> None:
    older = msgspec.msgpack.encode([b"keys"])
    newer = msgspec.msgpack.encode([b"keys", 5, [], "unknown"])
    assert decode_body(older, AcquireRead) == AcquireRead(b"keys", 0)
    assert decode_body(newer, AcquireRead) == AcquireRead(b"keys", 5)
    assert decode_body(msgspec.msgpack.encode(["n", 1, 2, "Active"]), NodeInfo).tcp == ""


def test_every_op_is_in_its_range() -> None:
    assert all(1 <= op < 80 for op in Op)
    assert len({int(op) for op in Op}) == len(Op.__members__)
    assert messages.Op.ATTACH == 1


@pytest.mark.parametrize("kind", ERRORS)
def test_every_error_crosses_the_wire_as_one_of_the_tree(kind: type[errors.PolarKVError]) -> None:
    error = kind("f", 1, "fix") if kind is errors.ConfigurationError else kind("text")
    raw = encode_failure(Op.EXISTS, 1, error)
    _, _, _, status = decode_head(raw[: HEAD.size])
    with pytest.raises(errors.PolarKVError) as caught:
        wire.raise_failure(wire.Frame(Op.EXISTS, 1, status, raw[HEAD.size :]))
    if isinstance(error, errors.Unavailable):
        assert type(caught.value) is errors.Unavailable
        assert str(caught.value) == str(error)
    if status not in (Status.INTERNAL, Status.CONFIGURATION):
        assert isinstance(error, type(caught.value))
        assert str(caught.value) == str(error)


def test_an_unknown_error_does_not_leak_its_text() -> None:
    assert b"password" not in encode_failure(Op.EXISTS, 1, RuntimeError("password"))


def test_a_call_and_its_answer(pair: tuple[Connection, socket.socket]) -> None:
    connection, theirs = pair

    def serve() -> None:
        raw = theirs.recv(4096)
        _, request_id, _, _ = decode_head(raw[: HEAD.size])
        answer = encode_frame(Op.EXISTS, request_id, Outcomes(b"\1" * 70_000))
        for start in range(0, len(answer), 999):  # in many parts
            theirs.sendall(answer[start : start + 999])

    thread = threading.Thread(target=serve)
    thread.start()
    assert connection.call(Op.EXISTS, Keys(b""), Outcomes, soon()).outcomes == b"\1" * 70_000
    thread.join()
    assert not connection.closed


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", errors.ProtocolError),
        (encode_frame(Op.EXISTS, 999, Empty()), errors.ProtocolError),
        (encode_frame(Op.EXISTS, 2, Empty()) * 2, errors.ProtocolError),
        (encode_frame(Op.EXISTS, 2, Outcomes(b"1234"))[:-2], errors.Unavailable),
        (b"PK", errors.Unavailable),
        (b"", errors.Unavailable),
    ],
)
def test_a_broken_answer_closes_the_connection(
    pair: tuple[Connection, socket.socket], answer: bytes, kind: type[errors.PolarKVError]
) -> None:
    connection, theirs = pair
    theirs.sendall(answer)
    theirs.shutdown(socket.SHUT_WR)
    with pytest.raises(kind):
        connection.call(Op.EXISTS, Keys(b""), Empty, soon())
    assert connection.closed
    with pytest.raises(errors.Unavailable):
        connection.call(Op.EXISTS, Keys(b""), Empty, soon())


def test_a_refusal_leaves_the_connection_open(pair: tuple[Connection, socket.socket]) -> None:
    connection, theirs = pair
    theirs.sendall(encode_failure(Op.EXISTS, 2, errors.Refused("no")))
    with pytest.raises(errors.Refused, match="no"):
        connection.call(Op.EXISTS, Keys(b""), Empty, soon())
    assert not connection.closed


def test_silence_ends_at_the_deadline(pair: tuple[Connection, socket.socket]) -> None:
    connection, _ = pair
    begin = time.monotonic()
    with pytest.raises(errors.DeadlineExceeded):
        connection.call(Op.EXISTS, Keys(b""), Empty, begin + 0.05)
    assert 0.05 <= time.monotonic() - begin < 0.05 + SLACK_S
    assert connection.closed


@pytest.mark.parametrize("last", ["is late", "is silent", "hangs up"])
def test_a_peer_that_was_quick_may_be_anything_next_time(pair: tuple[Connection, socket.socket], last: str) -> None:
    connection, theirs = pair
    for request_id in (2, 3, 4):  # already there when asked for, as quick as can be
        theirs.sendall(encode_frame(Op.EXISTS, request_id, Outcomes(b"\1")))
        assert connection.call(Op.EXISTS, Keys(b""), Outcomes, soon()) == Outcomes(b"\1")
    if last == "is late":
        answer = encode_frame(Op.EXISTS, 5, Outcomes(b"\2"))
        late = threading.Timer(0.05, theirs.sendall, (answer,))
        late.start()
        assert connection.call(Op.EXISTS, Keys(b""), Outcomes, soon()) == Outcomes(b"\2")
        late.join()
        return
    if last == "hangs up":
        theirs.shutdown(socket.SHUT_RDWR)
    begin = time.monotonic()
    with pytest.raises(errors.DeadlineExceeded if last == "is silent" else errors.Unavailable):
        connection.call(Op.EXISTS, Keys(b""), Outcomes, begin + 0.05)
    assert time.monotonic() - begin < 0.05 + SLACK_S


def test_a_peer_that_drips_does_not_stretch_the_deadline(pair: tuple[Connection, socket.socket]) -> None:
    connection, theirs = pair
    stop = threading.Event()

    def drip() -> None:
        answer = encode_frame(Op.EXISTS, 2, Outcomes(bytes(60_000)))
        for byte in answer:
            if stop.wait(0.01):
                return
            theirs.sendall(bytes([byte]))

    thread = threading.Thread(target=drip)
    thread.start()
    begin = time.monotonic()
    with pytest.raises(errors.DeadlineExceeded):
        connection.call(Op.EXISTS, Keys(b""), Outcomes, begin + 0.1)
    elapsed_s = time.monotonic() - begin
    stop.set()
    thread.join()
    assert elapsed_s < 0.1 + SLACK_S


@pytest.mark.parametrize("endpoint", ["", "http://x:1", "tcp://:1", "tcp://x", "tcp://x:port", "unix"])
def test_an_endpoint_of_no_known_form_is_named(endpoint: str) -> None:
    with pytest.raises(errors.ConfigurationError, match="endpoint"):
        Connection.open(endpoint, soon())


def test_nobody_there_is_unavailable() -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))  # bound, not listening
        with pytest.raises(errors.Unavailable):
            Connection.open(f"tcp://127.0.0.1:{reserved.getsockname()[1]}", soon())
    with pytest.raises(errors.Unavailable):
        Connection.open("unix:///nowhere/at/all", soon())


@pytest.mark.parametrize(
    ("raw", "kind"),
    [(b"", EOFError), (b"PK\1", errors.ProtocolError), (encode_frame(1, 1, Keys(b"k"))[:-1], errors.ProtocolError)],
)
def test_the_asyncio_reader_tells_the_end_from_a_cut(raw: bytes, kind: type[BaseException]) -> None:
    async def read() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(raw)
        reader.feed_eof()
        await wire.read_frame(reader)

    with pytest.raises(kind):
        asyncio.run(read())


def test_the_asyncio_reader_reads_what_the_encoder_wrote() -> None:
    async def read() -> wire.Frame:
        reader = asyncio.StreamReader()
        reader.feed_data(encode_frame(Op.EXISTS, 5, Keys(b"k")))
        return await wire.read_frame(reader)

    frame = asyncio.run(read())
    assert (frame.op, frame.request_id, frame.status) == (Op.EXISTS, 5, Status.OK)
    assert decode_body(frame.body, Keys) == Keys(b"k")


def test_what_is_said_to_the_connection_itself_is_raised(pair: tuple[Connection, socket.socket]) -> None:
    connection, peer = pair
    peer.sendall(encode_failure(Op.ATTACH, 0, errors.Refused("1024 connections are open: raise max_connections")))
    with pytest.raises(errors.Refused, match="raise max_connections"):
        connection.call(Op.EXISTS, Empty(), Empty, time.monotonic() + 5)
    assert connection.closed
