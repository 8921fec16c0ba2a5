"""What every transport promises when its peer dies, stalls, lies or falls silent. Every wait ends in time."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import signal
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from polarkv_client import errors, layout, native
from polarkv_client.protocol.grants import Access
from polarkv_client.protocol.messages import Empty, Op, SlabAttached
from polarkv_client.protocol.wire import HEAD, encode_frame
from polarkv_client.transport.base import PIECE_BYTES, POLL_S, Scope
from tests.contract.peers import SLACK_S, Bench, black_hole, impostor, in_time, make, payload, picks, soon
from tests.support.slab_process import SlabProcess
from tests.support.waiting import wait_until


def moves(bench: Bench, access: Access, scope: Scope, count: int = 8) -> list[errors.PolarKVError | None]:
    """Read or write ``count`` chunks; the errors."""
    extents = bench.extents([1 << 20] * count)
    grant = bench.grant(access, extents)
    buffers: list[object] = [bytearray(1 << 20) for _ in extents]
    try:
        bench.transport.reach(grant, scope)
        if access is Access.READ:
            return bench.transport.read(grant, picks(extents, buffers), scope)
        bench.transport.write(grant, picks(extents, buffers), scope)
    except errors.PolarKVError as error:
        return [error] * count
    return [None] * count


@pytest.mark.parametrize("access", list(Access))
def test_a_black_hole_costs_the_deadline_and_no_more(
    slab: SlabProcess, kind: str, access: Access, tmp_path: Path
) -> None:
    with impostor(kind, black_hole, slab.info, str(tmp_path)) as info:
        bench = Bench(slab, make(kind, info))
        with in_time(0.3):
            results = moves(bench, access, soon(0.3))
        assert {type(result) for result in results} == {errors.DeadlineExceeded}
        bench.transport.close()


@pytest.mark.parametrize("access", list(Access))
def test_a_short_deadline_is_not_noticed_late(slab: SlabProcess, access: Access, tmp_path: Path) -> None:
    """Also when it is shorter than the silence after which a socket looks at the scope by itself."""
    lasted: list[float] = []
    with impostor("tcp", black_hole, slab.info, str(tmp_path)) as info:
        bench = Bench(slab, make("tcp", info))
        for _ in range(10):  # the best of them: a busy machine makes some late
            begin = time.monotonic()
            assert all(moves(bench, access, soon(0.02)))
            lasted.append(time.monotonic() - begin)
        bench.transport.close()
    assert min(lasted) < 0.02 + POLL_S / 2, lasted


@pytest.mark.parametrize("access", list(Access))
def test_a_cancellation_wakes_what_waits(slab: SlabProcess, kind: str, access: Access, tmp_path: Path) -> None:
    if kind != "tcp":
        pytest.skip("the only wait is the attach, bounded by the connect time-out")
    with impostor(kind, black_hole, slab.info, str(tmp_path)) as info:
        bench = Bench(slab, make(kind, info))
        scope = soon(30)
        threading.Timer(0.1, scope.cancel).start()
        with in_time(0.1):
            results = moves(bench, access, scope)
        assert {type(result) for result in results} == {errors.Cancelled}
        bench.transport.close()


@pytest.mark.parametrize("access", list(Access))
def test_nobody_there_is_unavailable(own_slab: SlabProcess, kind: str, access: Access) -> None:
    bench = Bench(own_slab, make(kind, own_slab.info))
    own_slab.kill()
    with in_time(0):
        results = moves(bench, access, soon())
    assert {type(result) for result in results} == {errors.Unavailable}
    bench.transport.close()


def garbage(sock: socket.socket) -> None:
    sock.recv(1 << 16)
    sock.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")


def cut_head(sock: socket.socket) -> None:
    sock.recv(1 << 16)
    sock.sendall(b"PK\1")
    sock.shutdown(socket.SHUT_RDWR)


def hang_up(sock: socket.socket) -> None:
    sock.recv(1 << 16)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()  # a reset, not an end


def endless_body(sock: socket.socket) -> None:
    sock.recv(1 << 16)
    sock.sendall(HEAD.pack(b"PK", 1, 70, 1, 0xFFFF_FFFF, 0))


@pytest.mark.parametrize("serve", [garbage, cut_head, hang_up, endless_body])
def test_a_peer_that_talks_nonsense_is_an_error(
    slab: SlabProcess, kind: str, serve: Callable[[socket.socket], None], tmp_path: Path
) -> None:
    with impostor(kind, serve, slab.info, str(tmp_path)) as info:
        for access in Access:
            bench = Bench(slab, make(kind, info))
            with in_time(3):
                results = moves(bench, access, soon(3))
            assert all(isinstance(result, errors.ProtocolError | errors.Unavailable) for result in results)
            bench.transport.close()


def test_an_attach_without_a_descriptor_is_an_error(slab: SlabProcess, tmp_path: Path) -> None:
    def serve(sock: socket.socket) -> None:
        sock.recv(1 << 16)
        sock.sendall(encode_frame(Op.SLAB_ATTACH, 1, SlabAttached("p", 7, slab.info.incarnation, 1 << 20)))

    with impostor("shm", serve, slab.info, str(tmp_path)) as info:
        bench = Bench(slab, make("shm", info))
        assert isinstance(moves(bench, Access.READ, soon())[0], errors.ProtocolError)


@pytest.mark.parametrize("extra", [0, 2])
def test_descriptors_that_are_not_kept_are_closed(slab: SlabProcess, tmp_path: Path, extra: int) -> None:
    """Of another incarnation, or too many: none may leak."""

    def serve(sock: socket.socket) -> None:
        sock.recv(1 << 16)
        answer = encode_frame(Op.SLAB_ATTACH, 1, SlabAttached("p", 7, slab.info.incarnation + 1 - extra // 2, 1 << 20))
        with open("/dev/zero", "rb") as file:
            socket.send_fds(sock, [answer], [file.fileno()] * (1 + extra))

    with impostor("shm", serve, slab.info, str(tmp_path)) as info:
        before = leaks()
        bench = Bench(slab, make("shm", info))
        assert isinstance(moves(bench, Access.READ, soon())[0], errors.Refused | errors.ProtocolError)
        assert wait_until(lambda: leaks() == before, "the descriptors to be closed")


def leaks() -> int:
    """Descriptors of this process that lead to the device the peer hands out."""
    return sum(os.path.realpath(f"/proc/self/fd/{name}") == "/dev/zero" for name in os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("after_bytes", [0, 63, 64, 3000, 5063, 5064, 9000])
def test_a_stream_that_ends_early_spoils_the_rest_only(slab: SlabProcess, after_bytes: int, tmp_path: Path) -> None:
    bench = Bench(slab, make("tcp", slab.info))
    chunks = [payload(5000, seed) for seed in range(2)]
    extents = bench.store(chunks)
    stream = b"".join(
        layout.pack_header(layout.Header(extent.key, 5000, extent.checksum, 9)) + chunk
        for extent, chunk in zip(extents, chunks, strict=True)
    )

    def serve(sock: socket.socket) -> None:
        sock.recv(1 << 16)
        sock.sendall(encode_frame(Op.SLAB_READ, 1, Empty()) + stream[:after_bytes])
        sock.shutdown(socket.SHUT_RDWR)

    with impostor("tcp", serve, slab.info, str(tmp_path)) as info:
        transport = make("tcp", info)
        targets: list[object] = [bytearray(5000), bytearray(5000)]
        results = transport.read(bench.grant(Access.READ, extents), picks(extents, targets), soon())
        whole = after_bytes >= 5064
        assert [result is None for result in results] == [whole, False]
        assert isinstance(results[1], errors.Unavailable)
        assert not whole or targets[0] == chunks[0]
        transport.close()
    bench.transport.close()


def test_a_peer_that_drips_does_not_stretch_the_deadline(slab: SlabProcess, tmp_path: Path) -> None:
    stop = threading.Event()

    def serve(sock: socket.socket) -> None:
        sock.recv(1 << 16)
        sock.sendall(encode_frame(Op.SLAB_READ, 1, Empty()))
        while not stop.wait(0.005):
            sock.sendall(b"x")

    with impostor("tcp", serve, slab.info, str(tmp_path)) as info:
        bench = Bench(slab, make("tcp", info))
        begin = time.monotonic()
        results = moves(bench, Access.READ, soon(0.3))
        elapsed_s = time.monotonic() - begin
        stop.set()
        assert {type(result) for result in results} == {errors.DeadlineExceeded}
        assert elapsed_s < 0.3 + SLACK_S
        bench.transport.close()


def test_a_stream_in_the_wrong_order_is_damage(slab: SlabProcess, tmp_path: Path) -> None:
    bench = Bench(slab, make("tcp", slab.info))
    chunks = [payload(5000, seed) for seed in range(2)]
    extents = bench.store(chunks)

    def serve(sock: socket.socket) -> None:
        sock.recv(1 << 16)
        sock.sendall(encode_frame(Op.SLAB_READ, 1, Empty()))
        for extent, chunk in reversed(list(zip(extents, chunks, strict=True))):
            sock.sendall(layout.pack_header(layout.Header(extent.key, 5000, extent.checksum, 9)) + chunk)

    with impostor("tcp", serve, slab.info, str(tmp_path)) as info:
        transport = make("tcp", info)
        results = transport.read(
            bench.grant(Access.READ, extents), picks(extents, [bytearray(5000), bytearray(5000)]), soon()
        )
        assert {type(result) for result in results} == {errors.Damaged}
        transport.close()
    bench.transport.close()


class Frozen:
    """A transfer over TCP that is stuck in the middle because the slab server was stopped."""

    def __init__(self, bench: Bench, access: Access, seconds: float) -> None:
        self.bench = bench
        count = 16
        extents = bench.extents([1 << 20] * count)
        self.buffers = [bytearray(1 << 20) for _ in extents]
        warm = bench.grant(Access.READ, extents)
        bench.transport.reach(warm, soon())
        bench.slab.freeze()
        grant = bench.grant(access, extents)
        self.scope = soon(seconds)
        self.results: list[errors.PolarKVError | None] = []
        chosen = picks(extents, list(self.buffers))

        def run() -> None:
            try:
                if access is Access.READ:
                    self.results = bench.transport.read(grant, chosen, self.scope)
                else:
                    bench.transport.write(grant, chosen, self.scope)
            except errors.PolarKVError as error:
                self.results = [error] * count

        self.thread = threading.Thread(target=run)
        self.thread.start()

    def join(self, seconds: float) -> None:
        with in_time(seconds):
            self.thread.join(seconds + SLACK_S)
        assert not self.thread.is_alive()


@pytest.mark.parametrize("access", list(Access))
def test_a_stopped_peer_costs_the_deadline_and_touches_nothing_later(own_slab: SlabProcess, access: Access) -> None:
    bench = Bench(own_slab, make("tcp", own_slab.info))
    frozen = Frozen(bench, access, 0.3)
    frozen.join(0.3)
    assert {type(result) for result in frozen.results} <= {errors.DeadlineExceeded, errors.Damaged, type(None)}
    assert isinstance(frozen.results[-1], errors.DeadlineExceeded)
    for buffer in frozen.buffers:
        buffer[:] = b"!" * len(buffer)
    os.kill(own_slab.process.pid, signal.SIGCONT)
    # The same transport goes on with a new connection, and what the old one still had to say reaches nobody.
    extents = bench.store([payload(70_000)])
    target = bytearray(70_000)
    assert bench.transport.read(bench.grant(Access.READ, extents), picks(extents, [target]), soon()) == [None]
    assert target == payload(70_000)
    assert all(set(buffer) == {ord("!")} for buffer in frozen.buffers)
    bench.transport.close()


@pytest.mark.parametrize("access", list(Access))
def test_a_peer_killed_in_the_middle_is_noticed_at_once(own_slab: SlabProcess, access: Access) -> None:
    bench = Bench(own_slab, make("tcp", own_slab.info))
    frozen = Frozen(bench, access, 30)
    own_slab.kill()
    frozen.join(1)
    assert isinstance(frozen.results[-1], errors.Unavailable)
    bench.transport.close()


def test_memory_of_a_dead_slab_server_can_be_read_until_the_lease_ends(own_slab: SlabProcess) -> None:
    """Whether that is allowed is the lease's question: the bytes are still those that were granted."""
    bench = Bench(own_slab, make("shm", own_slab.info))
    extents = bench.store([payload(70_000)])
    grant = bench.grant(Access.READ, extents)
    own_slab.kill()
    target = bytearray(70_000)
    assert bench.transport.read(grant, picks(extents, [target]), soon()) == [None]
    assert target == payload(70_000)
    bench.transport.close()


def test_a_kept_connection_that_the_peer_has_closed_costs_nothing(slab: SlabProcess, tmp_path: Path) -> None:
    bench = Bench(slab, make("tcp", slab.info))
    extents = bench.store([payload(5000)])
    stream = layout.pack_header(layout.Header(extents[0].key, 5000, extents[0].checksum, 9)) + payload(5000)
    served = threading.Semaphore(0)

    def serve(sock: socket.socket) -> None:
        sock.recv(1 << 16)
        sock.sendall(encode_frame(Op.SLAB_READ, 1, Empty()) + stream)
        sock.shutdown(socket.SHUT_RDWR)  # as a server does that is started again
        served.release()

    with impostor("tcp", serve, slab.info, str(tmp_path)) as info:
        transport = make("tcp", info)
        for _ in range(3):
            target = bytearray(5000)
            assert transport.read(bench.grant(Access.READ, extents), picks(extents, [target]), soon()) == [None]
            assert target == payload(5000)
            assert served.acquire(timeout=30)
        transport.close()
    bench.transport.close()


@pytest.mark.parametrize(("kind", "owner", "call"), [("shm-calls", os, "preadv"), ("shm", native, "scatter_all")])
def test_the_memory_outlives_the_close_while_it_is_used(
    slab: SlabProcess, monkeypatch: pytest.MonkeyPatch, kind: str, owner: object, call: str
) -> None:
    """Its descriptor's number could be another file's by then, and a touch of what was unmapped kills the process."""
    bench = Bench(slab, make(kind, slab.info))
    extents = bench.store([payload(1 << 20)])
    target = bytearray(1 << 20)
    original = getattr(owner, call)

    def closing(*arguments: object) -> object:
        bench.transport.close()
        return original(*arguments)

    monkeypatch.setattr(owner, call, closing)
    assert bench.transport.read(bench.grant(Access.READ, extents), picks(extents, [target]), soon()) == [None]
    assert target == payload(1 << 20)
    assert bench.transport._descriptor == -1  # type: ignore[attr-defined]


@pytest.mark.parametrize(("kind", "owner", "call"), [("shm-calls", os, "pwritev"), ("shm", native.Move, "gather")])
def test_the_ticket_is_looked_at_before_every_piece(
    slab: SlabProcess, monkeypatch: pytest.MonkeyPatch, kind: str, owner: object, call: str
) -> None:
    bench = Bench(slab, make(kind, slab.info))
    extents = bench.extents([5 * PIECE_BYTES])
    grant = bench.grant(Access.WRITE, extents)
    bench.transport.reach(grant, soon())
    scope = soon().until(time.monotonic() + 4)
    original, written = getattr(owner, call), []

    def slow(*arguments: object) -> object:
        written.append(arguments)
        scope.deadline = time.monotonic() - 1  # the ticket ends while a piece is written
        return original(*arguments)

    monkeypatch.setattr(owner, call, slow)
    with pytest.raises(errors.LeaseEnded):
        bench.transport.write(grant, picks(extents, [bytes(5 * PIECE_BYTES)]), scope)
    assert len(written) == 1
    monkeypatch.undo()
    assert layout.unpack_header(bench.peek(extents[0].offset_bytes, 64)) is None
    bench.transport.close()


def test_a_file_system_without_write_is_mapped(slab: SlabProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """As hugetlbfs, which few machines have reserved pages for."""

    def refusing(descriptor: int, vector: list[bytes], offset: int) -> int:
        raise OSError(errno.EINVAL, "no write here")

    monkeypatch.setattr(os, "pwritev", refusing)
    bench = Bench(slab, make("shm-calls", slab.info))
    chunks = [payload(5000, 1), payload((1 << 20) + 5, 2)]
    extents = bench.store(chunks)
    targets = [bytearray(len(chunk)) for chunk in chunks]
    assert bench.transport.read(bench.grant(Access.READ, extents), picks(extents, list(targets)), soon()) == [None] * 2
    assert targets == chunks
    bench.transport.close()


def test_the_end_of_a_slab_server_is_seen_without_asking_it(own_slab: SlabProcess) -> None:
    bench = Bench(own_slab, make("shm", own_slab.info))
    assert not bench.transport.peer_gone()
    bench.store([payload(5000)])
    assert not bench.transport.peer_gone()
    own_slab.kill()
    assert wait_until(bench.transport.peer_gone, "its end to be seen")
    bench.transport.close()
    assert not bench.transport.peer_gone()


def test_memory_that_cannot_be_mapped_leaks_no_descriptor(slab: SlabProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    def descriptors() -> Counter[int]:
        """Which files are open, how often."""
        found = Counter[int]()
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):
                found[os.stat(f"/proc/self/fd/{name}").st_ino] += 1
        return found

    def refusing(*_: object) -> int:
        raise OSError(errno.ENOMEM, "no room for it")

    before = descriptors()
    monkeypatch.setattr(os, "pwritev", refusing)
    monkeypatch.setattr(mmap, "mmap", refusing)
    bench = Bench(slab, make("shm", slab.info))
    with pytest.raises(errors.Unavailable, match="cannot be mapped"):
        bench.transport.reach(bench.grant(Access.READ, []), soon())
    assert not descriptors() - before  # threads of other tests may still be closing something
    bench.transport.close()
