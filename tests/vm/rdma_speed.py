"""What RDMA costs here: the client, one transport's call, and a bare loop of verbs, on the same device and kernel.

``python -m tests.vm.support run -- python -m tests.vm.rdma_speed``. Not a test: a machine with other work to do has no
speed. Figures are GB/s of payload, the median and the best of several rounds, and microseconds an operation.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import re
import secrets
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np

from polarkv_client.buffers import address_of
from polarkv_client.protocol.grants import Access
from polarkv_client.protocol.messages import QueuePair
from polarkv_client.transport.verbs import bindings, devices, seam
from polarkv_client.transport.verbs.local import Closes, LocalDevices
from polarkv_client.transport.verbs.seam import Opcode, Work
from tests.contract.peers import Bench, OwnDevices, picks, soon
from tests.local.support.world import running
from tests.support.slab_process import start_slab
from tests.support.waiting import wait_until

MIB = 1 << 20
TOTAL_BYTES = 64 * MIB
DEPTH = 16
FAR_BYTES = 768 * MIB  # of the cache node's memory, and of the bare loop's: a round moves to or from another part of it
OWN_BUFFERS = 12  # queue pairs
PROGRAMS = {"WRITE": "ib_write_bw", "READ": "ib_read_bw"}
BUFFERS = {"own buffers": True, "one buffer": False}
ROUNDS, TIMES = 9, 2  # rounds of everything, each time with a new cluster


Moves = dict[str, Callable[[], float]]  # by direction, GB/s of a round


def timed(move: Callable[[], None]) -> float:
    """GB/s of a round that moves all bytes once."""
    begin = time.perf_counter()
    move()
    return TOTAL_BYTES / (time.perf_counter() - begin) / 1e9


def race(ways: dict[str, Moves], found: dict[str, dict[str, list[float]]]) -> None:
    """Add GB/s of each way's rounds. Rounds alternate, so that all have the same machine, with the same processes."""
    for _ in range(ROUNDS):
        for direction in PROGRAMS:
            for way, moves in ways.items():
                found.setdefault(direction, {}).setdefault(way, []).append(moves[direction]())


def figures(of: Callable[[list[float]], float], speeds: dict[str, list[float]]) -> str:
    """One figure of each way's, and in brackets what part of it the client's is."""
    ran = {way: [speed for speed in found if speed] for way, found in speeds.items()}
    one = {way: of(found) for way, found in ran.items() if found}
    return ", ".join(f"{way} {speed:.3f} ({one['client'] / speed:.2f})" for way, speed in one.items())


class Loop:
    """Two queue pairs, one on each device, in one process; posts and polls, and does nothing else."""

    def __init__(self, binding: str, chunk_bytes: int, far_bytes: int = TOTAL_BYTES) -> None:
        made = bindings.need(binding)
        self.chunk_bytes = chunk_bytes
        self.ends = [made.open(name) for name in ("rxe0", "rxe1")]
        sizes = (far_bytes, TOTAL_BYTES)
        self.memory = [mmap.mmap(-1, size) for size in sizes]
        self.parts = {opcode: itertools.cycle(range(0, far_bytes, TOTAL_BYTES)) for opcode in Opcode}
        self.addresses = [address_of(memoryview(memory)) for memory in self.memory]
        everything = seam.Access.LOCAL_WRITE | seam.Access.REMOTE_READ | seam.Access.REMOTE_WRITE
        self.regions = [
            end.register(address, size, everything)
            for end, address, size in zip(self.ends, self.addresses, sizes, strict=True)
        ]
        self.queues = [end.completions(128, events=False) for end in self.ends]
        self.pairs = [end.pair(queue, 1, 128) for end, queue in zip(self.ends, self.queues, strict=True)]
        gids = [devices.pick_gid(seen, None) for seen in devices.seen()]
        told = [
            QueuePair(pair.number, secrets.randbelow(1 << 24), gid.raw, 0, end.port(1).mtu, 16)
            for pair, gid, end in zip(self.pairs, gids, self.ends, strict=True)
        ]
        for place, pair in enumerate(self.pairs):
            pair.connect(gids[place].number, told[place], told[1 - place], everything)

    def work(self, opcode: Opcode, number: int, size_bytes: int, part: int = 0) -> Work:
        at = number * self.chunk_bytes
        mine, theirs = self.regions[1], self.regions[0]
        far = self.addresses[0] + part + at
        return Work(number, opcode, self.addresses[1] + at, size_bytes, mine.lkey, far, theirs.rkey, True)

    def move(self, opcode: Opcode) -> None:
        count = TOTAL_BYTES // self.chunk_bytes
        part = next(self.parts[opcode])
        posted = done = 0
        while done < count:
            while posted < count and posted - done < DEPTH:
                self.pairs[1].post([self.work(opcode, posted, self.chunk_bytes, part)])
                posted += 1
            done += len(self.queues[1].poll(DEPTH))

    def operation_us(self, opcode: Opcode, count: int = 500) -> dict[str, float]:
        spent = {"post": 0.0, "poll": 0.0, "whole": 0.0}
        for _ in range(count):
            begin = time.perf_counter()
            self.pairs[1].post([self.work(opcode, 0, 64)])
            posted = looked = time.perf_counter()
            while not self.queues[1].poll(1):
                looked = time.perf_counter()
            end = time.perf_counter()
            spent["post"] += posted - begin
            spent["poll"] += end - looked
            spent["whole"] += end - begin
        return {name: round(value / count * 1e6, 1) for name, value in spent.items()}

    def close(self) -> None:
        made: list[Closes] = [*self.pairs, *self.regions, *self.queues, *self.ends]
        for each in made:
            each.close()


@contextmanager
def bare(chunk_bytes: int, far_bytes: int = FAR_BYTES) -> Iterator[Moves]:
    """Nothing but posts and polls."""
    loop = Loop("ibverbs", chunk_bytes, far_bytes)
    try:
        yield {opcode.name: partial(timed, partial(loop.move, opcode)) for opcode in Opcode}
    finally:
        loop.close()


@contextmanager
def one_call(chunk_bytes: int) -> Iterator[Moves]:
    """Through the transport, into and out of buffers that stay registered."""
    with tempfile.TemporaryDirectory() as folder:
        slab = start_slab(Path(folder), memory_bytes=96 * MIB, rdma_devices=["rxe0"])
        bench = Bench(slab, OwnDevices(slab.info, LocalDevices(("rxe1",))))
        payloads = [np.full(chunk_bytes, 7, np.uint8) for _ in range(TOTAL_BYTES // chunk_bytes)]
        targets = [np.zeros(chunk_bytes, np.uint8) for _ in payloads]
        stored = bench.store(payloads)  # type: ignore[arg-type]
        grants = {access: bench.grant(access, stored, deadline_ms=600_000) for access in Access}
        transport = bench.transport

        def read() -> None:
            assert set(transport.read(grants[Access.READ], picks(stored, targets), soon(60))) == {None}

        def write() -> None:
            transport.write(grants[Access.WRITE], picks(stored, payloads), soon(60))

        yield {"WRITE": partial(timed, write), "READ": partial(timed, read)}
        transport.close()
        slab.close()


@contextmanager
def whole_client(chunk_bytes: int) -> Iterator[Moves]:
    """Through the client: the manager's grants, the transfers, the commits."""
    slab = {"rdma": "only", "rdma_devices": ["rxe0"]}
    times = {"quarantine_ms": 3000, "read_lease_ms": 30_000, "write_ticket_ms": 30_000, "operation_timeout_ms": 30_000}
    # As by default. Tests have more of them, and here they take their share of the one processor.
    times |= {"heartbeat_ms": 500, "node_timeout_ms": 5000}
    with (
        running(1, "768MiB", "1GiB", manager={**times, "offload_ahead": False}, slab=slab) as world,
        world.client("auto", rdma_devices="rxe1", deadline_ms=60_000) as client,
    ):
        count = TOTAL_BYTES // chunk_bytes
        payloads = [np.full(chunk_bytes, 7, np.uint8) for _ in range(count)]
        targets = [np.zeros(chunk_bytes, np.uint8) for _ in payloads]
        written, read_back = itertools.count(), itertools.count()

        def keys(number: int) -> list[bytes]:
            return [(number * 1000 + place).to_bytes(32, "big") for place in range(count)]

        def write() -> None:
            assert client.store(keys(next(written)), payloads).stored == count

        def read() -> None:
            assert client.load(keys(next(read_back)), targets).complete

        yield {"WRITE": partial(timed, write), "READ": partial(timed, read)}
        assert {node.transport for node in client.status().nodes} == {"rdma"}


def cycles_mhz() -> float:
    """How fast the processor's counter of cycles goes, against the clock."""
    code = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    code.write(bytes.fromhex("0f3148c1e2204809d0c3"))  # rdtsc; shl $32, %rdx; or %rdx, %rax; ret
    cycles = ctypes.CFUNCTYPE(ctypes.c_uint64)(address_of(memoryview(code)))
    begin, first = time.perf_counter(), cycles()
    threading.Event().wait(0.5)
    return float(cycles() - first) / (time.perf_counter() - begin) / 1e6


@contextmanager
def processor_speed() -> Iterator[None]:
    """User-Mode Linux does not say what perftest asks it: without the cycles in a second it reports a speed of 0."""
    shown = Path("/proc/cpuinfo").read_text(encoding="ascii")
    with tempfile.NamedTemporaryFile("w", encoding="ascii") as file:
        file.write(f"{shown.rstrip()}\ncpu MHz\t\t: {cycles_mhz():.3f}\n\n")
        file.flush()
        subprocess.run(["mount", "--bind", file.name, "/proc/cpuinfo"], check=True)
        try:
            yield
        finally:
            subprocess.run(["umount", "/proc/cpuinfo"], check=True)


def perftest(chunk_bytes: int, own_buffers: bool) -> Moves:
    """``ib_write_bw`` and ``ib_read_bw`` between the two devices; 0 for a round that one of them gave up.

    A queue pair of perftest's moves one buffer again and again, out of the processor's cache. With ``own_buffers`` each
    operation under way has a queue pair, and so a buffer, of its own: closer to the others, which move every byte once.
    """
    # As the loop: so many at once, polled; and about as much as it moves in a round.
    pairs = OWN_BUFFERS if own_buffers else 1
    deep = ["-q", str(pairs), "-t", "1"] if own_buffers else ["-t", str(DEPTH)]
    each = TOTAL_BYTES // chunk_bytes // pairs
    options = ["-x", "1", "-s", str(chunk_bytes), "-n", str(max(5, each)), *deep, "-F"]  # it takes no fewer than five

    def once(program: str) -> float:
        server = subprocess.Popen(
            [program, "-d", "rxe0", *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        try:
            wait_until(lambda: listens(18515), f"the server of {program} to listen")
            done = subprocess.run(
                [program, "-d", "rxe1", *options, "127.0.0.1"], capture_output=True, text=True, check=False, timeout=60
            )
            said = re.search(rf"^ *{chunk_bytes} +\d+ +\S+ +(\S+)", done.stdout, re.MULTILINE)
            if done.returncode or said is None:  # it gives up what is late for one second, as on a busy machine
                said_last = " / ".join(f"{done.stdout}{done.stderr}".split("\n")[-4:])
                print(f"{program} gave up: {said_last}", flush=True)
                return 0.0
            return float(said[1]) * MIB / 1e9
        finally:
            server.kill()
            server.communicate()

    return {direction: partial(once, program) for direction, program in PROGRAMS.items()}


def listens(port: int) -> bool:
    """Whether something listens on a port here."""
    shown = subprocess.run(["ss", "-Hltn", f"sport = {port}"], capture_output=True, text=True, check=True)
    return bool(shown.stdout)


def main() -> None:
    for chunk_bytes in (MIB, 4 * MIB):
        # With a dozen buffers of 4 MiB ib_read_bw gives up, and leaves the others no processor before it does.
        kinds = {name: own for name, own in BUFFERS.items() if not own or chunk_bytes == MIB}
        programs = {f"perftest, {name}": perftest(chunk_bytes, own) for name, own in kinds.items()}
        found: dict[str, dict[str, list[float]]] = {}
        for _ in range(TIMES):
            with (
                processor_speed(),
                bare(chunk_bytes) as loop,
                one_call(chunk_bytes) as call,
                whole_client(chunk_bytes) as client,
            ):
                race({"bare": loop, "transport": call, "client": client, **programs}, found)
        for direction, speeds in found.items():
            for name, of in (("median", statistics.median), ("best", max)):
                print(f"{chunk_bytes // MIB} MiB {direction:5} {name:6}: {figures(of, speeds)}", flush=True)
    for binding in ("ibverbs", "pyverbs"):
        pairs = Loop(binding, 64)
        for opcode in Opcode:
            print(f"64 B {opcode.name} by {binding}, us: {pairs.operation_us(opcode)}", flush=True)
        pairs.close()


if __name__ == "__main__":
    main()
