"""Bad input on every way in: an error that says what is wrong, at the right place, and the process keeps serving."""

from __future__ import annotations

import http.client
import json
import os
import random
import struct
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from polarkv_client.errors import ConfigurationError, GoldenMismatch, PolarKVError, Unauthorized, VersionMismatch
from polarkv_client.keys import Namespace, golden_digest
from polarkv_client.protocol import messages as m
from polarkv_client.protocol.messages import Op
from polarkv_client.protocol.wire import MAX_BODY_BYTES, WIRE_VERSION, Connection, Status, encode_frame
from polarkv_client.results import Reason, Stored
from polarkv_client.sync import SyncClient
from polarkv_dataplane.slab.settings import default_slab_bytes
from tests.local.support.invariants import settled
from tests.local.support.oracle import Chunks
from tests.local.support.raw import CALL_S, RawClient, answer_to, failure_in
from tests.local.support.world import World, recovers, running
from tests.support.waiting import wait_until

CHUNKS = Chunks("bad input", (50_000,))
NUMBERS = list(range(8))
ENDPOINTS = ["manager rpc unix", "manager rpc tcp", "slab tcp", "slab unix"]


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with running(1, "16MiB", "64MiB", patient=True) as world:
        yield world


@pytest.fixture
def healthy(world: World) -> Iterator[World]:
    """The same processes serve before and after, over both transports."""
    with world.caller(CHUNKS, "shm") as near, world.caller(CHUNKS, "tcp") as far:
        assert recovers(near, NUMBERS) < 20
        before = world.cluster.pids()
        yield world
        assert world.cluster.pids() == before, "a process died of bad input"
        assert near.load(NUMBERS).complete
        assert far.load(NUMBERS).complete
        settled(world)


def endpoint(world: World, name: str) -> str:
    if name == "manager rpc tcp":
        return _lone[0]
    places: dict[str, str] = {
        "manager rpc unix": f"unix://{world.places.socket('manager')}",
        "slab tcp": world.nodes()[0]["tcp"],
        "slab unix": f"unix://{world.places.socket('slab-0')}",
    }
    return places[name]


_lone: list[str] = []


@pytest.fixture(scope="module", autouse=True)
def manager_on_tcp(world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A second manager, without cache nodes: the embedded one listens on a Unix socket alone."""
    ready_file = tmp_path_factory.mktemp("manager") / "ready.json"
    command = [
        sys.executable,
        "-m",
        "polarkv_dataplane.cli",
        "manager",
        "--rpc",
        "tcp://127.0.0.1:0",
        "--http-port",
        "0",
    ]
    command += ["--secret-file", str(world.places.secret), "--tokens-file", str(world.places.tokens)]
    process = subprocess.Popen([*command, "--ready-file", str(ready_file)], stdout=subprocess.DEVNULL)
    try:
        wait_until(ready_file.exists, "the manager on TCP")
        _lone.append(json.loads(ready_file.read_text())["rpc"][0])
        yield
        with RawClient(world.cluster.connection, endpoint=_lone[0]) as raw:  # after all that, it serves
            assert raw.attached.tenant
        assert process.poll() is None
    finally:
        process.kill()
        process.wait(30)


GARBAGE = {
    "zeros": bytes(4096),
    "noise": random.Random(7).randbytes(100_000),
    "an HTTP request": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "a TLS hello": bytes.fromhex("16030100a5010000a10303") + bytes(160),
    "one byte": b"P",
    "the beginning of a head": b"PK\x01",
    "nothing": b"",
    "the right head, noise as its body": encode_frame(Op.ATTACH, 1, m.Empty())[:8]
    + struct.pack("<IB3x", 500, 0)
    + random.Random(8).randbytes(500),
    "a body shorter than its head says": encode_frame(Op.REGISTER, 1, m.Empty())[:8]
    + struct.pack("<IB3x", 500, 0)
    + b"x",
    "a body longer than any": encode_frame(Op.ATTACH, 1, m.Empty())[:8] + struct.pack("<IB3x", MAX_BODY_BYTES + 1, 0),
    "an op that does not exist": encode_frame(250, 1, m.Empty()),
    "a message of another op": encode_frame(Op.ATTACH, 1, m.Keys(b"k" * 32)),
    "deep nesting": encode_frame(Op.ATTACH, 1, m.Empty())[:8] + struct.pack("<IB3x", 60_000, 0) + b"\x91" * 60_000,
}


@pytest.mark.parametrize("name", ENDPOINTS)
@pytest.mark.parametrize("garbage", GARBAGE)
def test_garbage_on_a_port(healthy: World, name: str, garbage: str) -> None:
    answer = answer_to(endpoint(healthy, name), GARBAGE[garbage])
    if answer:
        status, text = failure_in(answer)
        assert status and text, answer


@pytest.mark.parametrize("name", ENDPOINTS)
def test_another_wire_version_is_told_so(healthy: World, name: str) -> None:
    frame = bytearray(encode_frame(Op.ATTACH, 1, m.Empty()))
    frame[2] = WIRE_VERSION + 1
    status, text = failure_in(answer_to(endpoint(healthy, name), bytes(frame)))
    assert status == Status.VERSION
    assert str(WIRE_VERSION + 1) in text and "upgrade" in text


@pytest.mark.parametrize("name", ENDPOINTS)
def test_a_hundred_silent_connections_keep_nobody_out(healthy: World, name: str) -> None:
    silent = [Connection.open(endpoint(healthy, name), time.monotonic() + CALL_S) for _ in range(100)]
    try:
        with healthy.caller(CHUNKS, "tcp" if name == "slab tcp" else "auto") as caller:
            assert caller.load(NUMBERS).complete
    finally:
        for connection in silent:
            connection.close()


@pytest.mark.parametrize(
    ("method", "path", "body", "expected"),
    [
        ("GET", "/v1/nodes", None, 401),
        ("POST", "/v1/evict", b'{"keys": ["zz"]}', 401),
        ("GET", "/nothing", None, 404),
        ("GET", "/healthz", None, 200),
    ],
)
def test_admin_without_a_token(healthy: World, method: str, path: str, body: bytes | None, expected: int) -> None:
    connection = http.client.HTTPConnection(healthy.admin_endpoint.removeprefix("tcp://"), timeout=CALL_S)
    connection.request(method, path, body, {"Content-Type": "application/json"})
    assert connection.getresponse().status == expected
    connection.close()


@pytest.mark.parametrize("body", [{"keys": ["zz"]}, {"keys": "not a list"}, {"keys": ["ab"]}, {}, [], "x"])
def test_admin_with_a_body_that_is_wrong_says_what(healthy: World, body: object) -> None:
    with pytest.raises(OSError, match=r"(400|422) .*(key|dictionary)"):
        healthy.admin("/v1/evict", body)


@pytest.mark.parametrize("garbage", ["zeros", "noise", "one byte", "nothing"])
def test_garbage_on_the_admin_port(healthy: World, garbage: str) -> None:
    answer_to(healthy.admin_endpoint, GARBAGE[garbage])


def test_a_wrong_token_is_an_error_at_once(healthy: World) -> None:
    with pytest.raises(Unauthorized, match="token"):
        healthy.client(token="not the right one")


def test_a_wrong_golden_is_an_error_at_once(healthy: World) -> None:
    with pytest.raises(GoldenMismatch, match="version"):
        RawClient(healthy.cluster.connection, golden=bytes(32))


def test_a_client_of_another_wire_version_is_an_error_at_once(healthy: World) -> None:
    known = json.loads(healthy.cluster.connection.read_text())
    connection = Connection.open(known["endpoint"], time.monotonic() + CALL_S)
    request = m.Attach(WIRE_VERSION + 1, WIRE_VERSION + 5, known["token"], golden_digest(), "new", "h")
    with pytest.raises(VersionMismatch, match="upgrade"):
        connection.call(Op.ATTACH, request, m.Attached, time.monotonic() + CALL_S)
    connection.close()


@pytest.mark.parametrize("role", ["slab", "disk"])
def test_a_cache_node_with_the_wrong_secret_is_refused(healthy: World, role: str) -> None:
    connection = Connection.open(f"unix://{healthy.places.socket('manager')}", time.monotonic() + CALL_S)
    request = m.Register(WIRE_VERSION, WIRE_VERSION, "0" * 64, role, "node-0", 0, "p", "h", 1 << 24, 1 << 20)
    with pytest.raises(Unauthorized, match="secret"):
        connection.call(Op.REGISTER, request, m.Registered, time.monotonic() + CALL_S)
    connection.close()


def test_an_unknown_namespace_just_misses(healthy: World) -> None:
    with healthy.client() as client:
        known, unknown = (Namespace(model, chunk_tokens=16) for model in ("m", "never seen"))
        tokens, buffers = list(range(64)), [bytearray(1000) for _ in range(4)]
        assert client.store_kv(known, tokens, buffers).present == 4
        assert client.load_kv(known, tokens, buffers).tokens_loaded == 64
        missed = client.load_kv(unknown, tokens, buffers)
        assert missed.tokens_loaded == 0
        assert missed.chunks[0].reason is Reason.ABSENT


def test_an_oversized_chunk_is_refused_alone(healthy: World) -> None:
    slab_bytes = default_slab_bytes(16 << 20)
    with healthy.client() as client:
        keys = [os.urandom(32) for _ in range(3)]
        stored = client.store(keys, [bytes(1000), bytes(slab_bytes), bytes(2000)])
        assert [chunk.outcome for chunk in stored.chunks] == [Stored.STORED, Stored.OVERSIZED, Stored.STORED]
        assert client.load([keys[1]], [bytearray(slab_bytes)]).chunks[0].reason is Reason.ABSENT


@pytest.mark.parametrize(
    ("keys", "buffers", "field"),
    [
        ([b"short"], [b"x"], "keys[0]"),
        ([b"k" * 32], [], "buffers"),
        ([b"k" * 32], [b""], "buffers[0]"),
        ([b"k" * 32], ["text"], "buffers[0]"),
    ],
)
def test_a_callers_mistake_is_named(healthy: World, keys: list[bytes], buffers: list[object], field: str) -> None:
    with healthy.client() as client, pytest.raises(ConfigurationError) as caught:
        client.store(keys, buffers)
    assert caught.value.field == field


@pytest.mark.parametrize(
    "request_",
    [
        (Op.BEGIN_STORE, m.BeginStore(b"k" * 31, [100])),
        (Op.BEGIN_STORE, m.BeginStore(b"k" * 64, [1, 2, 3])),
        (Op.BEGIN_STORE, m.BeginStore(b"k" * 32, [-5])),
        (Op.BEGIN_STORE, m.BeginStore(b"k" * 32, [1 << 40])),
        (Op.COMMIT_STORE, m.CommitStore(1 << 60, b"k" * 32, [])),
        (Op.ACQUIRE_READ, m.AcquireRead(b"k" * 33)),
    ],
    ids=repr,
)
def test_a_request_that_makes_no_sense_is_refused_and_the_connection_goes_on(
    healthy: World, request_: tuple[Op, object]
) -> None:
    with RawClient(healthy.cluster.connection) as raw:
        with pytest.raises(PolarKVError, match=r"key|length|checksum"):
            raw.connection.call(request_[0], request_[1], m.Empty, time.monotonic() + CALL_S)
        assert raw.extent(CHUNKS.key(NUMBERS[0]))


def test_tickets_and_leases_of_others_cannot_be_named(healthy: World) -> None:
    with RawClient(healthy.cluster.connection) as raw:
        for number in (0, 1, 1 << 31, (1 << 62) - 1):
            commit = m.CommitStore(number, b"k" * 32, [1])
            outcomes = raw.connection.call(Op.COMMIT_STORE, commit, m.Outcomes, time.monotonic() + CALL_S).outcomes
            assert outcomes == b"\x01"
            raw.release(number)


@pytest.mark.parametrize("name", ["slab tcp", "slab unix"])
@pytest.mark.parametrize("change", ["none", "flipped", "cut", "of another access"])
def test_a_slab_server_takes_only_true_grants(healthy: World, name: str, change: str) -> None:
    with RawClient(healthy.cluster.connection) as raw:
        answer = raw.acquire(CHUNKS.keys(NUMBERS[:1]))
        grant = answer.grants[0]
        raw.release(answer.lease)
    made = {
        "none": b"",
        "flipped": bytes([grant[0] ^ 1]) + grant[1:],
        "cut": grant[:-3],
        "of another access": grant,
    }[change]
    if name == "slab unix":
        if change == "of another access":
            pytest.skip("any grant of the present life opens this door")
        frame = encode_frame(Op.SLAB_ATTACH, 1, m.SlabAttach(grant=made))
    elif change == "of another access":
        frame = encode_frame(Op.SLAB_WRITE, 1, m.SlabWrite(made, [0]))
    else:
        frame = encode_frame(Op.SLAB_READ, 1, m.SlabRead(made, [0]))
    status, text = failure_in(answer_to(endpoint(healthy, name), frame))
    assert status in {Status.UNAUTHORIZED, Status.REFUSED, Status.PROTOCOL} and "grant" in text


def test_settings_that_are_wrong_are_named_at_the_start() -> None:
    with pytest.raises(ConfigurationError, match="endpoint"):
        SyncClient.connect(endpoint="nonsense")
    with pytest.raises(ConfigurationError, match="deadline_ms"):
        SyncClient.connect(endpoint="unix:///x", deadline_ms=0)
