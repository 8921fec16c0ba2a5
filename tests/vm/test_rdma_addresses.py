"""An address that nobody has costs whoever connects to it a second at most, and nobody else anything."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import msgspec
import pytest

from polarkv_client import errors
from polarkv_client.protocol import wire
from polarkv_client.protocol.grants import Access
from polarkv_client.protocol.messages import Op, QueuePair, RdmaConnect, RdmaConnected
from polarkv_client.transport.verbs import devices
from polarkv_client.transport.verbs.local import LocalDevices
from tests.contract.peers import Bench, OwnDevices, payload, picks, soon
from tests.support.guest import SLOWNESS
from tests.support.slab_process import SlabProcess, start_slab
from tests.support.waiting import wait_until

BINDINGS = ["ibverbs", "pyverbs"]
NOBODY = "10.9.0.77"
TEXT = r"10\.9\.0\.77 cannot be sent to: .*: is that host up, and does a route lead there"
BEAT_S = 0.005
# Run in the slab server: begins to beat, and keeps in a file for how long it was stopped, as its clock goes.
BEATING = f"""
import threading, time
def beat(path):
    last = time.monotonic()
    with open(path, "w", 1) as file:
        while True:
            time.sleep({BEAT_S})
            now = time.monotonic()
            file.write(f"[{{now}}, {{now - last}}]\\n")
            last = now
threading.Thread(target=beat, args=(PATH,), daemon=True).start()
"""


class Beats:
    """When the beats of a process were, by the clock that all processes have, and how long after the one before."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, float]] = []

    def stopped(self, begin: float, end: float) -> float:
        """For which part of this time it was stopped at once: the kernel waits for a second, and beats go on."""
        inside = [gap for at, gap in self.seen if begin < at and at - gap < end]
        assert end - begin > 0.9, "the kernel did not wait for an answer: nothing could have been stopped"
        return max(inside) / (end - begin)


def expect_one_that_stops_nobody(attempt: Callable[[], float]) -> None:
    """One attempt of three: a busy machine may stop a process for as long, the kernel would do so each time."""
    parts: list[float] = []
    while len(parts) < 3 and min(parts, default=1.0) >= 0.5:
        parts.append(attempt())
    assert min(parts) < 0.5, f"parts of the time that it was stopped: {parts}"


@contextmanager
def beating() -> Iterator[Beats]:
    """This process beats while the body runs."""
    beats, over = Beats(), threading.Event()

    def run() -> None:
        last = time.monotonic()
        while not over.wait(BEAT_S):
            now = time.monotonic()
            beats.seen.append((now, now - last))
            last = now

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield beats
    finally:
        over.set()
        thread.join()


def beats_of(path: Path, until: float) -> Beats:
    """Those of the slab server, when it has beaten later than this."""

    def read() -> list[tuple[float, float]]:
        lines = path.read_text().splitlines()[:-1]
        found = [(float(at), float(gap)) for at, gap in map(json.loads, lines)]
        return found if found and found[-1][0] > until else []

    beats = Beats()
    beats.seen = wait_until(read, "the slab server's next beat")
    return beats


@pytest.fixture(params=BINDINGS)
def slab(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SlabProcess]:
    """A slab server that beats, by each binding; it is on the first host."""
    begin = BEATING.replace("PATH", repr(str(tmp_path / "beats")))
    made = start_slab(tmp_path, begin=begin, rdma_devices=["rxe0"], rdma_binding=request.param)
    yield made
    made.close()


def test_a_client_that_shows_such_an_address_stops_nobody_in_the_slab_server(slab: SlabProcess, tmp_path: Path) -> None:
    bench = Bench(slab, OwnDevices(slab.info, LocalDevices(("rxe1",))))
    bench.transport.reach(bench.grant(Access.WRITE, []), soon())  # an honest one, which is served meanwhile
    request = RdmaConnect(
        bench.grant(Access.WRITE, []).signed, "rxe0", QueuePair(17, 1, devices.raw_gid(NOBODY), 0, 5, 16)
    )

    def attempt() -> float:
        with closing(wire.Connection.open(slab.info.tcp, soon().deadline)) as connection:
            begin = time.monotonic()
            with pytest.raises(errors.Unavailable, match=TEXT):
                connection.call(Op.SLAB_RDMA_CONNECT, request, RdmaConnected, soon().deadline)
            end = time.monotonic()
        return beats_of(tmp_path / "beats", end).stopped(begin, end)

    expect_one_that_stops_nobody(attempt)
    session = bench.transport._session  # type: ignore[attr-defined]
    assert session is not None
    assert not session.ended
    bench.transport.close()


@pytest.mark.parametrize("binding", BINDINGS)
def test_a_slab_server_at_such_an_address_stops_nobody_in_the_client(slab: SlabProcess, binding: str) -> None:
    info = msgspec.structs.replace(slab.info, rdma=slab.info.rdma.replace("10.9.0.1", NOBODY))
    bench = Bench(slab, OwnDevices(info, LocalDevices(("rxe1",), binding=binding)))
    grant = bench.grant(Access.READ, [])

    def attempt() -> float:
        with beating() as beats:
            begin = time.monotonic()
            with pytest.raises(errors.Unavailable, match=TEXT):
                bench.transport.reach(grant, soon())
            end = time.monotonic()
        return beats.stopped(begin, end)

    expect_one_that_stops_nobody(attempt)
    lasted: list[float] = []
    for _ in range(3):  # the best of them: a busy machine makes some late, the kernel's own second all of them
        begin = time.monotonic()
        with pytest.raises(errors.PolarKVError, match="has not answered the question who has it in time"):
            bench.transport.reach(grant, soon(0.1))
        lasted.append(time.monotonic() - begin)
    assert min(lasted) < 0.8 * SLOWNESS, lasted
    bench.transport.close()


def test_a_dead_rail_ends_neither_the_session_nor_a_call(slab: SlabProcess) -> None:
    """Two ways to one slab server, one of them to an address that nobody has."""
    info = msgspec.structs.replace(slab.info, rdma=f"{slab.info.rdma},rxe0@{NOBODY}")
    transport = OwnDevices(info, LocalDevices(("rxe1",)))
    bench = Bench(slab, transport)
    chunks = [payload(70_000, seed) for seed in range(3)]
    stored = [bench.store([chunk], seed)[0] for seed, chunk in enumerate(chunks)]
    session = transport._session
    assert session is not None
    grant = bench.grant(Access.READ, stored)
    with ExitStack() as held:  # lanes of both rails, if there were two
        for _ in range(3):
            held.enter_context(transport._lane(grant, soon()))
    assert [port.address for _, port in transport._resting] == [NOBODY]
    targets = [bytearray(70_000) for _ in chunks]
    assert transport.read(grant, picks(stored, targets), soon()) == [None] * len(chunks)
    assert targets == chunks
    assert transport._session is session
    assert not session.ended
    transport.close()
