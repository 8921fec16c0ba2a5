"""RDMA: the pool registered with this machine's devices, and the sessions of clients that access it by themselves.

A session is a TCP connection. Its queue pairs are destroyed when it ends, before anything else is done about it; when
the client has not said in time that no write of its is overdue; and when a new incarnation begins. The arithmetic is in
docs/design/rdma.md.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

from polarkv_client.buffers import address_of
from polarkv_client.endpoints import RdmaEndpoint, RdmaPort
from polarkv_client.errors import (
    ConfigurationError,
    PolarKVError,
    ProtocolError,
    Refused,
    Unavailable,
)
from polarkv_client.protocol.grants import Access as GrantAccess
from polarkv_client.protocol.messages import (
    Empty,
    Op,
    QueuePair,
    RdmaConnect,
    RdmaConnected,
    RdmaRegion,
    RdmaRenew,
)
from polarkv_client.protocol.wire import Frame, decode_body, encode_failure, encode_frame
from polarkv_client.transport.verbs import bindings, devices, neighbours, seam
from polarkv_client.transport.verbs.seam import Access
from polarkv_dataplane.runtime.counters import Counters, labelled
from polarkv_dataplane.runtime.stream import read_frame, set_send_timeout, wait_readable
from polarkv_dataplane.slab.life import Gate
from polarkv_dataplane.slab.pool import Pool
from polarkv_dataplane.slab.settings import SlabSettings

_REGION_BYTES = 1 << 30  # registered at once; a stop is looked at in between
_MOST_LANES = 64  # of one session
_CONNECT_S = 5.0  # the kernel gives an address up after one
# Of the quarantine, so long may pass until a silent client's queue pairs are destroyed: the rest is for doing it.
SESSION_SHARE = 0.75
LEAST_SESSION_S = 0.1
_MAX_REQUEST_BYTES = 4 << 20
_REMOTE = Access.LOCAL_WRITE | Access.REMOTE_READ | Access.REMOTE_WRITE
_log = logging.getLogger(__name__)


class _Device:
    """One device with the pool registered on it."""

    def __init__(self, binding: seam.Binding, seen: devices.Seen, gid: devices.Gid) -> None:
        self.seen = seen
        self.gid = gid
        self.device = binding.open(seen.name)
        self.regions: list[RdmaRegion] = []
        self._registered: list[seam.Region] = []
        try:
            # Nothing ever completes here: this side posts nothing. A queue pair must have one all the same.
            self.completions = self.device.completions(16, events=False)
        except BaseException:
            self.device.close()
            raise

    def register(self, pool: Pool, stopping: Callable[[], bool]) -> None:
        """Register the pool, in pieces that the device takes.

        Raises:
            ConfigurationError: no more memory may be locked. Unavailable: it failed otherwise.
        """
        address = address_of(pool.view)
        piece_bytes = min(_REGION_BYTES, self.device.limits.region_bytes // 4096 * 4096 or _REGION_BYTES)
        for offset in range(0, pool.size_bytes, piece_bytes):
            if stopping():
                return
            size_bytes = min(piece_bytes, pool.size_bytes - offset)
            try:
                region = self.device.register(address + offset, size_bytes, _REMOTE)
            except seam.VerbsError as error:
                raise ConfigurationError(
                    "memory_bytes",
                    pool.size_bytes,
                    f"RDMA locks all of it, and after {offset} bytes: {error}",
                ) from error
            self._registered.append(region)
            self.regions.append(RdmaRegion(offset, size_bytes, address + offset, region.rkey))

    def pair(self, theirs: QueuePair, access: Access, deadline: float) -> tuple[seam.Pair, QueuePair]:
        """A queue pair joined to a client's. Raises Unavailable, also when nobody is found at its address in time."""
        neighbours.reach(self.seen.name, self.gid.number, theirs.gid, deadline)
        pair = self.device.pair(self.completions, devices.PORT, 1)
        try:
            mine = self.device.describe(pair, devices.PORT, self.gid.raw)
            pair.connect(self.gid.number, mine, theirs, access)
        except BaseException:
            pair.close()
            raise
        return pair, mine

    def close(self) -> None:
        for region in self._registered:
            region.close()
        self._registered.clear()
        self.completions.close()
        self.device.close()


class _Session:
    """The queue pairs of one client, by lane."""

    def __init__(self, path: RdmaPath) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._lanes: dict[int, seam.Pair] = {}
        self._next = 1
        self._ended = False

    @property
    def count(self) -> int:
        """How many queue pairs there are."""
        return len(self._lanes)

    def connect(self, request: RdmaConnect, deadline: float) -> RdmaConnected:
        """One more. Raises Refused, Unauthorized, ProtocolError, Unavailable."""
        path = self._path
        grant = path.gate.admit(request.grant, None)
        session_s = path.session_s()
        device = path.device(request.device)
        if self.count >= _MOST_LANES:
            raise Refused(f"an RDMA session has at most {_MOST_LANES} queue pairs")
        access = Access.REMOTE_READ
        if grant.access == GrantAccess.WRITE:
            access |= Access.REMOTE_WRITE
        pair, mine = device.pair(request.pair, access, deadline)
        with self._lock:
            if not self._ended:
                lane, self._next = self._next, self._next + 1
                self._lanes[lane] = pair
                path.counters.add("polarkv_slab_rdma_connects_total")
                return RdmaConnected(lane, mine, device.regions, path.pool_bytes, int(session_s * 1000))
        pair.close()
        raise Refused("the session has ended: the slab server has begun a new life, or is stopping")

    def drop(self, lanes: list[int]) -> None:
        """Destroy these."""
        with self._lock:
            for lane in lanes:
                pair = self._lanes.pop(lane, None)
                if pair is not None:
                    self._destroy(pair)

    def end(self) -> None:
        """Destroy all of them; there will be no more."""
        with self._lock:
            self._ended = True
            lanes, self._lanes = self._lanes, {}
            for pair in lanes.values():
                self._destroy(pair)

    def _destroy(self, pair: seam.Pair) -> None:
        try:
            pair.close()
        except seam.VerbsError as error:  # the others must go all the same
            self._path.counters.add(labelled("polarkv_slab_errors_total", "kind", "rdma_destroy"))
            _log.error("RDMA: a queue pair stays: %s", error)


@contextmanager
def _ended_at(ends_at: float, session: _Session) -> Iterator[None]:
    """End a session in time although its thread is at work on one more queue pair.

    Connecting asks the network for the other end's address: for seconds, if nobody has it.
    """
    if not session.count:
        yield
        return
    timer = threading.Timer(max(0.0, ends_at - time.monotonic()), session.end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _traffic(device: str, what: str) -> float:
    return devices.traffic(device).get(what, 0)


class RdmaPath:
    """Serves sessions on connections that the TCP path hands over."""

    def __init__(self, pool: Pool, gate: Gate, counters: Counters, settings: SlabSettings) -> None:
        self.gate = gate
        self.counters = counters
        self.pool_bytes = pool.size_bytes
        self._settings = settings
        self._pool = pool
        self._quarantine_s = 0.0
        self._lock = threading.Lock()
        self._devices: dict[str, _Device] = {}
        self._sessions: set[_Session] = set()
        self.alone = settings.rdma == "only"
        self.why = ""  # why it is not offered
        counters.gauge("polarkv_slab_rdma_sessions", lambda: len(self._sessions))
        counters.gauge("polarkv_slab_rdma_queue_pairs", lambda: sum(each.count for each in list(self._sessions)))
        for name in ("connects", "fenced", "renewals"):
            counters.add(f"polarkv_slab_rdma_{name}_total", 0)

    def open(self, stopping: Callable[[], bool]) -> None:
        """Open the devices and register the pool with them, as the settings say; :attr:`why` says why not.

        Raises:
            ConfigurationError: RDMA alone is to be served, and cannot be.
        """
        settings = self._settings
        if settings.rdma == "off":
            self.why = "turned off"
            return
        try:
            self._open(stopping)
        except PolarKVError as error:
            self.close()
            self.why = str(error)
        if not self._devices and not stopping():
            if self.alone:
                raise ConfigurationError("rdma", "only", f"{self.why}; or use auto or off")
            _log.info("RDMA is not offered: %s", self.why)

    def _open(self, stopping: Callable[[], bool]) -> None:
        seen = {device.name: device for device in devices.seen(self._settings.rdma_gid_index)}
        wanted = self._settings.rdma_devices or tuple(sorted(seen))
        if not wanted:
            raise Unavailable("this machine has no RDMA device")
        binding = bindings.need(self._settings.rdma_binding)
        reasons = []
        for name in wanted:
            if name not in seen:
                raise ConfigurationError("rdma_devices", name, f"there is no such device; there are {sorted(seen)}")
            if seen[name].state != devices.ACTIVE:
                reasons.append(f"{name}: its port is {seen[name].state}")
                continue
            try:
                gid = devices.pick_gid(seen[name], self._settings.rdma_gid_index)
                self._devices[name] = made = _Device(binding, seen[name], gid)
                made.register(self._pool, stopping)
            except Unavailable as error:
                reasons.append(str(error))
            else:
                self._show(name, f"{binding.name} {binding.version}", gid)
        if not self._devices:
            raise Unavailable("; ".join(reasons))

    def _show(self, name: str, binding: str, gid: devices.Gid) -> None:
        _log.info("RDMA: %s, GID %d (%s), by %s", name, gid.number, gid.text, binding)
        for what in devices.traffic(name):
            total = labelled(f"polarkv_slab_rdma_device_{what}_total", "device", name)
            self.counters.gauge(total, partial(_traffic, name, what))

    def endpoint(self, tcp: str) -> str:
        """What to tell clients; ``tcp`` is where sessions are opened. Empty: RDMA is not offered."""
        if not self._devices or not tcp:
            return ""
        ports = tuple(RdmaPort(name, made.gid.text) for name, made in self._devices.items())
        return str(RdmaEndpoint(tcp, ports))

    def enter(self, quarantine_s: float, *, new_life: bool) -> None:
        """A registration: how long slots rest from now on. In a new life no queue pair of the former one is left."""
        self._quarantine_s = quarantine_s
        if new_life:
            with self._lock:
                sessions = list(self._sessions)
            for session in sessions:
                session.end()

    def session_s(self) -> float:
        """How long a client may be silent. Raises Refused: the quarantine is too short to fence within it."""
        session_s = self._quarantine_s * SESSION_SHARE
        if session_s < LEAST_SESSION_S:
            raise Refused(
                f"RDMA needs a quarantine of at least {LEAST_SESSION_S / SESSION_SHARE * 1000:.0f} ms, the manager "
                f"says {self._quarantine_s * 1000:.0f}: raise its quarantine_ms, or upgrade it"
            )
        return session_s

    def device(self, name: str) -> _Device:
        """One of those offered. Raises Refused."""
        try:
            return self._devices[name]
        except KeyError:
            raise Refused(f"RDMA device {name!r} is not offered here") from None

    def serve(self, sock: socket.socket, frame: Frame) -> None:
        """Serve a session until it ends; ``frame`` opens it. Raises as ``TcpPath.serve``."""
        session = _Session(self)
        with self._lock:
            self._sessions.add(session)
        try:
            self._run(sock, frame, session)
        finally:
            session.end()
            with self._lock:
                self._sessions.discard(session)

    def _run(self, sock: socket.socket, frame: Frame, session: _Session) -> None:
        ends_at = answered_at = float("inf")
        while True:
            self._check(session, ends_at)
            renews = frame.op == Op.SLAB_RDMA_RENEW
            if renews:
                session.drop(decode_body(frame.body, RdmaRenew).ended)
                # The client made this after it had the answer before, which left here at ``answered_at``.
                ends_at = answered_at + self.session_s()
                self.counters.add("polarkv_slab_rdma_renewals_total")
            answer = self._answer(frame, session, ends_at)
            self._check(session, ends_at)
            if renews or answered_at == float("inf"):
                answered_at = time.monotonic()
                ends_at = min(ends_at, answered_at + self._quarantine_s * SESSION_SHARE)
                set_send_timeout(sock, max(self._quarantine_s, LEAST_SESSION_S))
            sock.sendall(answer)
            if not session.count and not renews:
                raise EOFError("nothing was connected")
            if not wait_readable(sock, ends_at - time.monotonic()):
                self._fence(session)
            frame = read_frame(sock, ends_at, _MAX_REQUEST_BYTES)

    def _answer(self, frame: Frame, session: _Session, ends_at: float) -> bytes:
        try:
            if frame.op == Op.SLAB_RDMA_CONNECT:
                # An address that nobody answers for must not cost the client the queue pairs that it has: in half of
                # the time that is left it hears of it, in the other half it can renew.
                now = time.monotonic()
                deadline = now + min(_CONNECT_S, (ends_at - now) / 2 if session.count else _CONNECT_S)
                with _ended_at(ends_at, session):
                    answer: object = session.connect(decode_body(frame.body, RdmaConnect), deadline)
            elif frame.op == Op.SLAB_RDMA_RENEW:
                answer = Empty()
            else:
                raise ProtocolError(f"op {frame.op} is not served in an RDMA session")
            return encode_frame(frame.op, frame.request_id, answer)
        except PolarKVError as error:
            self.counters.add(labelled("polarkv_slab_refusals_total", "kind", type(error).__name__))
            return encode_failure(frame.op, frame.request_id, error)

    def _check(self, session: _Session, ends_at: float) -> None:
        if time.monotonic() >= ends_at:
            self._fence(session)

    def _fence(self, session: _Session) -> None:
        """The client was silent for too long: nothing of it may land any more."""
        session.end()
        self.counters.add("polarkv_slab_rdma_fenced_total")
        raise Unavailable("an RDMA client did not renew its session in time: its queue pairs are destroyed")

    def close(self) -> None:
        """Close everything, after the connections."""
        with self._lock:
            sessions = list(self._sessions)
        for session in sessions:
            session.end()
        opened, self._devices = self._devices, {}
        with ExitStack() as closing:
            for made in opened.values():
                closing.callback(made.close)
