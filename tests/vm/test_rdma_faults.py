"""What breaks under RDMA is a miss within its deadline, and is mended by itself. Nothing is leaked."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest

from polarkv_client import errors, layout
from polarkv_client.protocol.grants import Access, Extent
from polarkv_client.protocol.messages import RdmaRegion
from polarkv_client.transport.base import HeldGrant
from polarkv_client.transport.verbs.lane import RemoteMemory
from polarkv_client.transport.verbs.local import LocalDevices
from polarkv_client.transport.verbs.session import MovingLane
from tests.contract.peers import Bench, OwnDevices, in_time, payload, picks, soon
from tests.support.guest import SLOWNESS
from tests.support.slab_process import PROGRAM, SECRET, SlabProcess, start_slab
from tests.support.waiting import wait_until

MIB = 1 << 20


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlabProcess]:
    """A slab server on the first host, which no test may harm."""
    slab = start_slab(tmp_path_factory.mktemp("slab"), rdma_devices=["rxe0"])
    yield slab
    slab.close()


@pytest.fixture
def bench(server: SlabProcess) -> Iterator[Bench]:
    """A transport to it from the second host."""
    made = Bench(server, transport(server))
    yield made
    made.transport.close()


@pytest.fixture
def own_bench(tmp_path: Path) -> Iterator[Bench]:
    """The same, with a slab server of its own."""
    slab = start_slab(tmp_path, rdma_devices=["rxe0"])
    made = Bench(slab, transport(slab))
    yield made
    made.transport.close()
    slab.close()


def transport(server: SlabProcess) -> OwnDevices:
    return OwnDevices(server.info, LocalDevices(("rxe1",)))


def lane_of(bench: Bench, access: Access) -> MovingLane:
    """The lane that the next call takes."""
    assert isinstance(bench.transport, OwnDevices)
    return bench.transport._idle[access is Access.WRITE][0]


def attempt(bench: Bench, access: Access, grant: HeldGrant, extents: list[Extent], buffers: list[bytearray]) -> str:
    """One transfer; "" or the kind of what the last chunk's error was."""
    try:
        if access is Access.WRITE:
            bench.transport.write(grant, picks(extents, list(buffers)), soon())
            return ""
        result = bench.transport.read(grant, picks(extents, list(buffers)), soon())[-1]
    except errors.PolarKVError as error:
        result = error
    return type(result).__name__ if result is not None else ""


def works_again(bench: Bench) -> bool:
    """Whether a chunk can be stored and read over the same transport."""
    (extent,) = bench.store([payload(70_000)])
    target = bytearray(70_000)
    grant = bench.grant(Access.READ, [extent])
    return bench.transport.read(grant, picks([extent], [target]), soon()) == [None] and target == payload(70_000)


class Transfer:
    """One transfer after the other in a thread, until one fails. The first has begun."""

    def __init__(self, bench: Bench, access: Access) -> None:
        chunks = [payload(4 * MIB, seed) for seed in range(8)]
        if access is Access.READ:
            extents = bench.store(chunks)
            self.buffers = [bytearray(4 * MIB) for _ in chunks]
        else:
            extents = bench.extents([4 * MIB] * len(chunks))
            self.buffers = [bytearray(chunk) for chunk in chunks]
        grant = bench.grant(access, extents)
        bench.transport.reach(grant, soon())
        self.said = "nothing"
        lane = lane_of(bench, access)

        def run() -> None:
            while not (said := attempt(bench, access, grant, extents, self.buffers)):
                pass
            self.said = said

        self.thread = threading.Thread(target=run)
        self.thread.start()
        wait_until(lambda: lane.busy, "the transfer to begin", every_s=0.001)

    def join(self, within_s: float) -> str:
        with in_time(within_s):
            self.thread.join((within_s + 5) * SLOWNESS)
        assert not self.thread.is_alive()
        return self.said


@pytest.mark.parametrize("access", list(Access))
def test_a_peer_killed_in_the_middle_is_noticed_at_once(own_bench: Bench, access: Access) -> None:
    transfer = Transfer(own_bench, access)
    own_bench.slab.kill()
    assert transfer.join(1.5) == "Unavailable"
    for buffer in transfer.buffers:
        buffer[:] = bytes(len(buffer))
    assert own_bench.transport.peer_gone()
    assert not any(map(any, transfer.buffers))  # nothing came later


@pytest.mark.parametrize("access", list(Access))
def test_a_link_that_is_down_costs_no_more_than_the_deadline(bench: Bench, access: Access) -> None:
    transfer = Transfer(bench, access)
    try:
        run("ip", "link", "set", "host1", "down")
        assert transfer.join(5) in {"Unavailable", "DeadlineExceeded"}
    finally:
        run("ip", "link", "set", "host1", "up")
        run("ip", "route", "replace", "10.9.0.1", "dev", "host1", "src", "10.9.0.2", "table", "102")
    wait_until(lambda: Path("/sys/class/infiniband/rxe1/ports/1/state").read_text().startswith("4"), "the port")
    assert wait_until(lambda: repaired(bench), "the transport to mend itself")


def repaired(bench: Bench) -> bool:
    try:
        return works_again(bench)
    except errors.PolarKVError:
        return False


@pytest.mark.parametrize("access", list(Access))
@pytest.mark.parametrize("fault", ["bad key", "outside the memory"])
def test_an_access_that_the_device_refuses_fails_and_is_mended(bench: Bench, access: Access, fault: str) -> None:
    (extent,) = bench.store([payload(5000)])
    grant = bench.grant(access, [extent])
    bench.transport.reach(grant, soon())
    lane = lane_of(bench, access)
    ((address, rkey, _),) = lane.remote.runs(0, 1)
    size = lane.remote.size_bytes
    bad_key = fault == "bad key"
    wrong = RdmaRegion(0, size, address + (0 if bad_key else size), rkey ^ 0x55 if bad_key else rkey)
    lane.remote = RemoteMemory([wrong], size)
    with in_time(1):
        assert attempt(bench, access, grant, [extent], [bytearray(5000)]) == "Unavailable"
    assert bench.peek(extent.offset_bytes + layout.HEADER_BYTES, 5000) == payload(5000)
    assert works_again(bench)


@pytest.mark.parametrize("access", list(Access))
def test_a_queue_pair_whose_other_end_has_gone_is_replaced(bench: Bench, access: Access) -> None:
    (extent,) = bench.store([payload(5000)])
    grant = bench.grant(access, [extent])
    bench.transport.reach(grant, soon())
    assert isinstance(bench.transport, OwnDevices)
    session = bench.transport._session
    assert session is not None
    count = 2 if access is Access.READ else 1  # beside the one that stored
    wait_until(lambda: queue_pairs(bench.slab) == count, "the queue pairs")
    session._ended.append(lane_of(bench, access).number)  # the next renewal has the slab server destroy it
    wait_until(lambda: queue_pairs(bench.slab) == count - 1, "the other end to be destroyed")
    with in_time(3):
        assert attempt(bench, access, grant, [extent], [bytearray(5000)]) == "Unavailable"
    assert works_again(bench)


@pytest.mark.parametrize("access", list(Access))
def test_a_new_incarnation_ends_every_queue_pair(own_bench: Bench, access: Access) -> None:
    bench, server = own_bench, own_bench.slab
    (extent,) = bench.store([payload(5000)])
    grant = bench.grant(access, [extent])
    bench.transport.reach(grant, soon())
    server.manager.new_incarnation_for_known = True
    earlier = server.info.incarnation
    server.manager.drop_connections()
    wait_until(lambda: server.info.incarnation != earlier, "the next life")
    wait_until(lambda: queue_pairs(server) == 0, "the queue pairs to go")
    with in_time(1):
        assert attempt(bench, access, grant, [extent], [bytearray(5000)]) in {"Unavailable", "Refused"}
    assert bench.peek(extent.offset_bytes + layout.HEADER_BYTES, 5000) == payload(5000)
    again = Bench(server, transport(server))
    assert works_again(again)
    again.transport.close()


def test_without_a_device_the_reason_is_said(server: SlabProcess) -> None:
    bench = Bench(server, OwnDevices(server.info, LocalDevices(("mlx5_7",))))
    with pytest.raises(errors.Unavailable, match="mlx5_7: there is no such device"):
        bench.transport.reach(bench.grant(Access.READ, []), soon())
    bench.transport.close()


NO_LOCKS = """
import ctypes, os, resource, sys
CAP_IPC_LOCK, PR_CAPBSET_DROP = 14, 24
assert ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, CAP_IPC_LOCK, 0, 0, 0) == 0
resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
os.execv(sys.executable, [sys.executable, "-c", *sys.argv[1:]])
"""


def test_a_client_that_may_lock_no_memory_is_told_so(bench: Bench) -> None:
    program = """
import sys, time
import msgspec
from polarkv_client import errors
from polarkv_client.protocol import grants
from polarkv_client.protocol.messages import NodeInfo
from polarkv_client.transport.base import HeldGrant, Scope
from polarkv_client.transport.rdma import RdmaTransport
from polarkv_client.transport.verbs.local import LocalDevices
from tests.support.guest import SLOWNESS
info, signed = msgspec.json.decode(sys.argv[1], type=NodeInfo), bytes.fromhex(sys.argv[2])
devices = LocalDevices(("rxe1",))
transport = RdmaTransport(info, devices, 1, 5.0 * SLOWNESS)
try:
    transport.reach(HeldGrant(signed, grants.read(signed)), Scope(time.monotonic() + 5 * SLOWNESS))
except errors.Unavailable as error:
    print(error)
transport.close(); devices.close()
"""
    info = json_of(bench.slab)
    grant = bench.grant(Access.READ, []).signed.hex()
    done = subprocess.run(
        [sys.executable, "-c", NO_LOCKS, program, info, grant],
        capture_output=True, text=True, timeout=30 * SLOWNESS, check=True,
    )  # fmt: skip
    assert "Cannot allocate memory" in done.stdout, done
    assert "ulimit -l" in done.stdout


def test_a_slab_server_that_may_lock_no_memory_serves_the_other_ways(tmp_path: Path) -> None:
    slab = start_slab(tmp_path, begin=without_locks(), rdma="auto")
    try:
        assert slab.info.rdma == ""
        assert slab.info.tcp
    finally:
        slab.close()


@pytest.mark.parametrize(
    ("settings", "text"),
    [({}, "ulimit -l"), ({"rdma_devices": ["mlx5_7"]}, "there is no such device"), ({"rdma_gid_index": 77}, "no GID")],
)
def test_with_rdma_alone_a_slab_server_that_cannot_does_not_start(
    tmp_path: Path, settings: dict[str, object], text: str
) -> None:
    (tmp_path / "secret").write_bytes(SECRET)
    begin = "" if settings else without_locks()
    said = json.dumps({"rdma": "only", **settings})
    command = [sys.executable, "-c", f"{begin}\n{PROGRAM}", "node-0", "tcp://127.0.0.1:1", str(tmp_path / "secret")]
    done = subprocess.run(
        [*command, str(64 * MIB), str(tmp_path / "s"), "off", said],
        capture_output=True, text=True, timeout=30 * SLOWNESS, check=False,
    )  # fmt: skip
    assert done.returncode
    assert text in done.stderr


def without_locks() -> str:
    """What starts the process that runs it anew, without the right to lock memory."""
    lines = NO_LOCKS.strip().splitlines()[:-1]
    again = ["if 'UNLOCKED' not in os.environ:", *(f"    {line}" for line in lines[1:])]
    again += ["    os.environ['UNLOCKED'] = '1'", "    os.execv(sys.executable, sys.orig_argv)"]
    return "\n".join([lines[0], *again])


@pytest.mark.timeout(180)
def test_two_hundred_reconnects_leak_nothing(server: SlabProcess) -> None:
    """Queue pairs, registrations, completion queues and domains of the whole kernel; descriptors of both processes."""
    Bench(server, transport(server)).transport.close()
    with ExitStack() as closing:
        first = Bench(server, transport(server))
        closing.callback(first.transport.close)
        assert works_again(first)
        before = resources(server)
        for _ in range(200):
            made = Bench(server, transport(server), next_bytes=32 * MIB)
            made.store([payload(5000)])
            made.transport.close()
        gc.collect()
        wait_until(lambda: resources(server) == before, f"what there was before: {before}", every_s=0.1)


@pytest.mark.parametrize("binding", ["ibverbs", "pyverbs"])
@pytest.mark.parametrize("ending", ["closed", "forgotten", "in a cycle"])
def test_a_process_ends_cleanly(server: SlabProcess, binding: str, ending: str) -> None:
    """Both bindings crash when the collector comes upon their objects in an order of its own."""
    program = f"""
import gc, sys, time
import msgspec
from polarkv_client.protocol import grants
from polarkv_client.protocol.messages import NodeInfo
from polarkv_client.transport.base import HeldGrant, Scope
from polarkv_client.transport.rdma import RdmaTransport
from polarkv_client.transport.verbs.local import LocalDevices
from tests.support.guest import SLOWNESS
info, signed = msgspec.json.decode(sys.argv[1], type=NodeInfo), bytes.fromhex(sys.argv[2])
devices = LocalDevices(("rxe1",), binding={binding!r})
transport = RdmaTransport(info, devices, 1, 5.0 * SLOWNESS)
transport.reach(HeldGrant(signed, grants.read(signed)), Scope(time.monotonic() + 5 * SLOWNESS))
if {ending!r} == "closed":
    transport.close(); devices.close()
if {ending!r} == "in a cycle":
    cycle = [transport, devices, devices._opened["rxe1"].device]
    cycle.append(cycle)
    del cycle
del transport, devices
gc.collect()
"""
    grant = Bench(server, transport(server)).grant(Access.READ, []).signed.hex()
    command = [sys.executable, "-X", "faulthandler", "-c", program, json_of(server), grant]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30 * SLOWNESS, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def json_of(server: SlabProcess) -> str:
    return msgspec.json.encode(server.info).decode()


def run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=30 * SLOWNESS, check=True).stdout


def queue_pairs(server: SlabProcess) -> int:
    """Those of the slab server, as it counts them."""
    beats = [channel for channel in server.manager.channels if channel.register.role == "slab"][-1].heartbeats
    return int(beats[-1].counters["polarkv_slab_rdma_queue_pairs"]) if beats else -1


def resources(server: SlabProcess) -> dict[str, object]:
    """What the kernel counts for both devices, and the slab server's and this process's descriptors."""
    found: dict[str, object] = {each["ifname"]: each for each in json.loads(run("rdma", "-j", "resource", "show"))}
    for name, pid in (("slab", server.process.pid), ("client", os.getpid())):
        found[name] = len(os.listdir(f"/proc/{pid}/fd"))
    return found
