"""Sessions and lanes over devices that move nothing: what is closed when, and what the other end hears of."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import msgspec
import numpy as np
import pytest

from polarkv_client import errors
from polarkv_client.buffers import flatten
from polarkv_client.endpoints import RdmaPort
from polarkv_client.protocol.grants import Access, Extent
from polarkv_client.protocol.messages import (
    Empty,
    NodeInfo,
    Op,
    QueuePair,
    RdmaConnect,
    RdmaConnected,
    RdmaRegion,
    RdmaRenew,
)
from polarkv_client.protocol.wire import Frame, decode_body, encode_frame
from polarkv_client.transport import rdma
from polarkv_client.transport.base import HeldGrant, Pick, Scope
from polarkv_client.transport.verbs import devices, seam
from polarkv_client.transport.verbs.lane import Lane
from polarkv_client.transport.verbs.local import LocalDevice, LocalDevices
from polarkv_client.transport.verbs.moves import Piece, Read
from polarkv_client.transport.verbs.session import Session
from polarkv_dataplane.runtime.counters import Counters
from polarkv_dataplane.runtime.stream import read_frame
from polarkv_dataplane.slab import rdma as slab
from tests.support.fake_rdma import FakeBinding, FakeDevice
from tests.support.waiting import wait_until

GID = devices.Gid(1, b"\0" * 10 + b"\xff\xff" + bytes([10, 0, 0, 1]), "RoCE v2")
PAIR = QueuePair(7, 1, GID.raw, 0, 5, 16)
MEMORY_BYTES = 1 << 20
CONNECTED = RdmaConnected(1, PAIR, [RdmaRegion(0, MEMORY_BYTES, 0, 1)], MEMORY_BYTES, 400)
GRANT = HeldGrant(b"signed", cast(Any, SimpleNamespace(access=Access.WRITE, incarnation=1)))


def local_of(fake: FakeDevice) -> LocalDevice:
    return LocalDevice(fake, GID, 1 << 30)


def soon(seconds: float = 5.0) -> float:
    return time.monotonic() + seconds


FORKS = """
import os, sys
from polarkv_client.transport.verbs.lane import Lane
from polarkv_client.transport.verbs.local import LocalDevice
from tests.support.fake_rdma import FakeDevice, FakePair

class Loud(FakePair):
    def close(self): os.write(1, b"closed;")
    def __del__(self): os.write(1, b"collected;")

class Device(FakeDevice):
    def pair(self, completions, port, queued): return Loud(self)

device = LocalDevice(Device(), None, 0)
lane = Lane.make(device)
if child := os.fork():
    assert os.waitpid(child, 0)[1] == 0
    os.write(1, b"child ended;")
else:
    del device, lane
"""


def test_a_child_by_fork_leaves_its_parents_devices_alone() -> None:
    """The kernel knows both by one descriptor: what the child destroys is destroyed."""
    done = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.startswith("child ended;closed;"), (done.stdout, done.stderr)


def test_nothing_is_made_of_a_device_that_was_closed_meanwhile() -> None:
    fake = FakeDevice()
    device = local_of(fake)
    device.release()
    with pytest.raises(errors.Unavailable, match="fake0 has been closed"):
        Lane.make(device)
    assert (fake.made, fake.pairs) == (0, [])


def test_a_device_whose_last_user_fails_is_closed_after_the_registrations_in_use() -> None:
    fake = FakeDevice()
    device = local_of(fake)
    lane: Lane[Piece] = Lane.make(device)
    lane.connect(lane.describe(), CONNECTED, can_write=False)
    device.release()  # the client is closed while a call is under way
    views = flatten(np.zeros(256 << 10, np.uint8), "buffer", writable=True)
    extent = Extent(0, bytes(32), 0, views[0].nbytes)
    with pytest.raises(errors.DeadlineExceeded):
        Read(lane, [Pick(0, extent, views)], Scope(soon(0.05))).run()
    assert fake.closed
    assert not fake.regions


class SlabEnd:
    """The slab server's end of one session, which connects everything."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self.listener.getsockname()[1]}"
        self.connected = 0
        self.ended: list[int] = []
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self) -> None:
        sock, _ = self.listener.accept()
        with self.listener, sock:
            while True:
                try:
                    frame = read_frame(sock, soon())
                except (EOFError, OSError, errors.PolarKVError):
                    return
                answer: object = Empty()
                if frame.op == Op.SLAB_RDMA_CONNECT:
                    self.connected += 1
                    answer = msgspec.structs.replace(CONNECTED, lane=self.connected)
                else:
                    self.ended += decode_body(frame.body, RdmaRenew).ended
                sock.sendall(encode_frame(frame.op, frame.request_id, answer))


def test_the_slab_server_hears_of_a_queue_pair_that_could_not_be_joined_here() -> None:
    """Else each try would leave one there, until the session may have no more."""
    fake = FakeDevice()
    device, end = local_of(fake), SlabEnd()
    session = Session("node-0", end.endpoint, soon())
    lane = session.connect(device, RdmaPort("x", "10.0.0.2"), GRANT, soon())

    def fail() -> None:
        raise seam.VerbsError("connecting a queue pair: No route to host", 113)

    fake.connecting = fail
    with pytest.raises(errors.Unavailable, match="No route to host"):
        session.connect(device, RdmaPort("x", "10.0.0.2"), GRANT, soon())
    wait_until(lambda: end.ended == [2] or None, "the renewal")
    assert not session.ended
    assert not lane.broken
    session.close()
    lane.close()
    device.release()
    end.thread.join(30)
    assert fake.closed


def test_rails_follow_a_device_that_was_opened_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lasting:
        ended = ""

        def __init__(self, *_: object) -> None:
            pass

        def close(self) -> None:
            pass

    monkeypatch.setattr(rdma, "Session", Lasting)
    node = cast(NodeInfo, SimpleNamespace(name="node-0", rdma="rdma://10.0.1.1:7/x@10.0.1.1"))
    transport = rdma.RdmaTransport(node, LocalDevices(), 1, 1.0)
    before, after = local_of(FakeDevice()), local_of(FakeDevice())
    session = transport._open_session([before], soon())
    assert transport._open_session([after], soon()) is session
    assert [device for device, _ in transport._rails] == [after]
    for device in (before, after):
        device.release()


def test_a_rail_that_cannot_be_connected_is_left_out_and_costs_the_others_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Lasting:
        ended = ""
        asked: ClassVar[list[str]] = []

        def connect(self, device: LocalDevice, port: RdmaPort, *_: object) -> str:
            self.asked.append(port.device)
            if port.device == "dead":
                raise seam.VerbsError("10.0.1.2 cannot be sent to", 110)
            return port.device

    node = cast(NodeInfo, SimpleNamespace(name="node-0", rdma="rdma://10.0.1.1:7/x@10.0.1.1"))
    transport = rdma.RdmaTransport(node, LocalDevices(), 1, 1.0)
    device, session = local_of(FakeDevice()), cast(Session, Lasting())
    good, dead = (device, RdmaPort("good", "10.0.1.1")), (device, RdmaPort("dead", "10.0.1.2"))
    transport._rails = [good, dead]
    assert [transport._connect_rail(session, GRANT, soon()) for _ in range(4)] == ["good"] * 4
    assert Lasting.asked == ["good", "dead", "good", "good", "good"]
    transport._resting[dead] = 0.0  # it has rested: it is tried again
    assert [transport._connect_rail(session, GRANT, soon()) for _ in range(2)] == ["good"] * 2
    assert Lasting.asked[5:] in (["good", "dead", "good"], ["dead", "good", "good"])
    transport._rails = [dead]  # the only one is tried each time
    for _ in range(2):
        with pytest.raises(errors.Unavailable, match="cannot be sent to"):
            transport._connect_rail(session, GRANT, soon())
    device.release()


@pytest.mark.parametrize(
    "wrong",
    [{"gid": b"abc"}, {"number": 1 << 24}, {"number": -1}, {"psn": 1 << 32}, {"mtu": 0}, {"mtu": 9}, {"reads": -1}],
)
def test_a_queue_pair_that_cannot_be_is_refused_by_its_form(wrong: dict[str, Any]) -> None:
    request = RdmaConnect(b"signed", "x", msgspec.structs.replace(PAIR, **wrong))
    body = encode_frame(Op.SLAB_RDMA_CONNECT, 1, request)[16:]
    with pytest.raises(errors.ProtocolError, match="not a valid RdmaConnect"):
        decode_body(body, RdmaConnect)


def test_a_silent_client_is_fenced_in_time_although_it_is_being_connected_once_more() -> None:
    """An address that nobody has is asked for on the network for seconds, which is longer than most quarantines."""
    fake = FakeDevice()
    gate = SimpleNamespace(admit=lambda _signed, _access: SimpleNamespace(access=Access.WRITE))
    pool = SimpleNamespace(size_bytes=MEMORY_BYTES)
    counters = Counters()
    path = slab.RdmaPath(cast(Any, pool), cast(Any, gate), counters, cast(Any, SimpleNamespace(rdma="auto")))
    seen = devices.Seen("fake0", "active", "Ethernet", (GID,), "")
    path._devices["fake0"] = slab._Device(FakeBinding(fake), seen, GID)
    path.enter(1.5, new_life=True)
    ours, theirs = socket.socketpair()
    body = msgspec.msgpack.encode(RdmaConnect(b"signed", "fake0", PAIR))
    ended: list[BaseException] = []

    def serve() -> None:
        try:
            path.serve(theirs, Frame(Op.SLAB_RDMA_CONNECT, 1, 0, body))
        except errors.Unavailable as error:
            ended.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    assert decode_body(read_frame(ours, soon()).body, RdmaConnected).lane == 1
    answers = threading.Event()
    fake.connecting = lambda: cast(None, answers.wait(30))
    ours.sendall(encode_frame(Op.SLAB_RDMA_CONNECT, 2, RdmaConnect(b"signed", "fake0", PAIR)))
    try:
        wait_until(lambda: len(fake.pairs) == 2 or None, "the second queue pair")
        wait_until(lambda: fake.pairs[0].closed or None, "the fence")
        assert not answers.is_set()
    finally:
        answers.set()
        thread.join(30)
    assert "did not renew its session in time" in str(ended[0])
    assert fake.pairs[1].closed
    assert counters.snapshot()["polarkv_slab_rdma_fenced_total"] == 1
    path.close()
    for sock in (ours, theirs):
        sock.close()
