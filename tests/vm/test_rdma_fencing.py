"""A one-sided write that comes late never damages the slot's next owner; with a fence taken away it does.

The late writer is a process of its own. It is stopped, or one of its threads is, after its last look at the ticket and
before its first byte: no check of the client's own can help any more.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import pytest

from polarkv_client import errors
from polarkv_client.protocol.grants import Access, Extent
from tests.contract.peers import Bench, OwnDevices, key, payload, picks, replace_checksum, soon
from tests.support.fake_manager import FakeManager
from tests.support.guest import SLOWNESS
from tests.support.slab_process import SECRET, SlabProcess, start_slab
from tests.support.waiting import wait_until

LENGTH = 300_000
TICKET_S = 1.0 * SLOWNESS
QUARANTINE_MS = 1500 * SLOWNESS

LATE_WRITER = """
import os, signal, sys, time
import msgspec
from polarkv_client import errors
from polarkv_client.protocol import grants
from polarkv_client.protocol.messages import NodeInfo
from polarkv_client.transport.base import HeldGrant, Pick, Scope
from polarkv_client.transport.rdma import RdmaTransport
from polarkv_client.transport.verbs.lane import Lane, NEVER
from polarkv_client.transport.verbs.local import LocalDevices
from tests.support.guest import SLOWNESS

info, signed, ticket_s, how, fenced = sys.argv[1:]
info = msgspec.json.decode(info, type=NodeInfo)
grant = HeldGrant(bytes.fromhex(signed), grants.read(bytes.fromhex(signed)))
transport = RdmaTransport(info, LocalDevices(("rxe1",)), 1, 5.0 * SLOWNESS)
transport.reach(grant, Scope(time.monotonic() + 5 * SLOWNESS))
post = Lane.post

def late(lane, works):
    Lane.post = post
    if fenced == "no":
        lane.write_until = NEVER  # what the renewals go by
    print("about to write", flush=True)
    if how == "process":
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        sys.stdin.readline()
    pair, lane.broken = lane._pair, ""
    pair.post(works)  # whatever the lane itself would say by now
    scope.deadline = time.monotonic() + 10 * SLOWNESS  # and it does not even look at the time any more

Lane.post = late
extent = grant.body.extents[0]
buffer = bytes(b"!" * extent.length_bytes)
scope = Scope(time.monotonic() + float(ticket_s))
try:
    transport.write(grant, [Pick(0, extent, [memoryview(buffer)])], scope)
    print("written", flush=True)
except errors.PolarKVError as error:
    print(type(error).__name__, flush=True)
transport.close()
"""


@contextmanager
def slab_server(folder: Path, *, fenced: bool) -> Iterator[SlabProcess]:
    """A slab server on rxe0. Without its fence it takes a client's silence for ever."""
    begin = "" if fenced else "import polarkv_dataplane.slab.rdma as rdma; rdma.SESSION_SHARE = 1e5"
    manager = FakeManager(SECRET, timeout_ms=60_000)
    manager.quarantine_ms = QUARANTINE_MS
    slab = start_slab(folder, manager=manager, begin=begin, rdma_devices=["rxe0"])
    try:
        yield slab
    finally:
        slab.close()


class LateWriter:
    """The process; ``go`` lets it do what it was about to do."""

    def __init__(self, bench: Bench, extent: Extent, how: str, *, fenced: bool) -> None:
        self.how = how
        grant = bench.grant(Access.WRITE, [extent])
        info = msgspec.json.encode(bench.slab.info).decode()
        self.ticket_ends = time.monotonic() + TICKET_S  # not before the writer's own
        self.process = subprocess.Popen(
            [
                sys.executable, "-c", LATE_WRITER, info, grant.signed.hex(), str(TICKET_S), how,
                "yes" if fenced else "no",
            ],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "about to write\n"
        self.ticket_ends = time.monotonic() + TICKET_S
        if how == "process":
            stat = Path(f"/proc/{self.process.pid}/stat")
            wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", "it to stop")

    def close(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=10 * SLOWNESS)

    def go(self) -> str:
        if self.how == "process":
            os.kill(self.process.pid, signal.SIGCONT)
        said, _ = self.process.communicate("go\n", timeout=20 * SLOWNESS)
        return said.strip()


def slot_is_free(writer: LateWriter) -> bool:
    """Whether a manager may give the slot to somebody else."""
    return time.monotonic() >= writer.ticket_ends + QUARANTINE_MS / 1000


def next_owner_after_a_late_write(folder: Path, how: str, *, client: bool, slab: bool) -> tuple[str, object, bool]:
    """What the late writer said; what reading the slot's next owner gave; whether its bytes are its own."""
    with slab_server(folder, fenced=slab) as server, ExitStack() as closing:
        bench = Bench(server, OwnDevices(server.info))
        closing.callback(bench.transport.close)
        (extent,) = bench.extents([LENGTH])
        writer = LateWriter(bench, extent, how, fenced=client)
        closing.callback(writer.close)
        wait_until(lambda: slot_is_free(writer), "the ticket's end and the quarantine's")
        owned = Extent(0, key(2), extent.offset_bytes, LENGTH)
        grant = bench.grant(Access.WRITE, [owned])
        (checksum,) = bench.transport.write(grant, picks([owned], [payload(LENGTH)]), soon())
        said = writer.go()
        owned = replace_checksum(owned, checksum)
        target = bytearray(LENGTH)
        (result,) = bench.transport.read(bench.grant(Access.READ, [owned]), picks([owned], [target]), soon())
        return said, result, target == payload(LENGTH)


@pytest.mark.parametrize("how", ["process", "thread"])
def test_a_late_write_lands_nowhere(tmp_path: Path, how: str) -> None:
    said, result, whole = next_owner_after_a_late_write(tmp_path, how, client=True, slab=True)
    assert (said, result, whole) == ("Unavailable", None, True)


@pytest.mark.parametrize(("how", "client", "slab"), [("process", True, False), ("thread", False, True)])
def test_without_the_fence_it_damages_the_slots_next_owner(tmp_path: Path, how: str, client: bool, slab: bool) -> None:
    """A stopped process is fenced by the slab server's clock, a stopped thread by the renewals' word."""
    said, result, whole = next_owner_after_a_late_write(tmp_path, how, client=client, slab=slab)
    assert said == "written"
    assert isinstance(result, errors.Damaged)  # the last wall holds: nobody is given those bytes
    assert not whole


def test_a_client_that_only_reads_and_waits_is_left_alone(tmp_path: Path) -> None:
    """Renewals go on while nothing moves, and while Python is busy."""
    with slab_server(tmp_path, fenced=True) as server:
        bench = Bench(server, OwnDevices(server.info))
        (extent,) = bench.store([payload(LENGTH)])
        session = bench.transport._session  # type: ignore[attr-defined]
        busy_until = time.monotonic() + 2 * QUARANTINE_MS / 1000
        while time.monotonic() < busy_until:
            target = bytearray(LENGTH)
            grant = bench.grant(Access.READ, [extent])
            assert bench.transport.read(grant, picks([extent], [target]), soon()) == [None]
        assert bench.transport._session is session  # type: ignore[attr-defined]
        assert not session.ended
        bench.transport.close()
