"""The slab server's process: pool, gate, the two ways in, and the link to the manager."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator

from polarkv_client.errors import PolarKVError
from polarkv_client.host import host_id
from polarkv_client.listening import bind_tcp
from polarkv_client.protocol.messages import Carve, Op, Register
from polarkv_client.protocol.wire import WIRE_VERSION, WIRE_VERSION_MIN, Frame, decode_body
from polarkv_dataplane.runtime import secrets, stopping
from polarkv_dataplane.runtime.counters import Counters, export, labelled
from polarkv_dataplane.runtime.node_link import NodeLink
from polarkv_dataplane.runtime.serving import BACKLOG, ConnectionServer, listen_unix
from polarkv_dataplane.runtime.session import Session, report_inventory
from polarkv_dataplane.slab import pool as pools
from polarkv_dataplane.slab.carving import Carving, inventory
from polarkv_dataplane.slab.handout import Handout
from polarkv_dataplane.slab.life import Gate
from polarkv_dataplane.slab.rdma import RdmaPath
from polarkv_dataplane.slab.settings import SlabSettings
from polarkv_dataplane.slab.tcp import TcpPath

_WILDCARDS = ("0.0.0.0", "::")
_log = logging.getLogger(__name__)


class SlabServer:
    """One slab server; ``start`` and ``stop`` once each."""

    def __init__(self, settings: SlabSettings, stop: stopping.Stop) -> None:
        self._settings = settings
        self._stop = stop
        self._secrets = secrets.load(settings.secret_file)
        self.counters = Counters()
        self.pool = pools.create(settings)
        self._carving = Carving(self.pool.size_bytes, settings.slab_size_bytes)
        self._link = NodeLink(settings.manager, self, self.counters, f"slab-{settings.node}")
        self._gate = Gate(self._secrets.grant_key)
        self._rdma = RdmaPath(self.pool, self._gate, self.counters, settings)
        self._incarnation = 0
        self._servers: list[ConnectionServer] = []
        self._tcp_port = 0
        self._bound_path = ""
        self._stop_export: Callable[[], None] | None = None
        self.counters.gauge("polarkv_pool_bytes", lambda: self.pool.size_bytes)
        self.counters.gauge("polarkv_pool_prefaulted_bytes", lambda: self.pool.prefaulted_bytes)
        self.counters.set(labelled("polarkv_pool_info", "kind", self.pool.kind), 1)

    def start(self) -> None:
        """Listen, register in the background, pre-fault in the background.

        Raises:
            ConfigurationError: an address cannot be bound, or RDMA alone is to be served and cannot be.
        """
        try:
            self._listen()
            if self._settings.listen_host:
                self._rdma.open(self._stop.is_set)
        except BaseException:
            self.stop()
            raise
        for server in self._servers:
            server.start()
        self._link.start()
        self.pool.prefault_in_background(self._stop.is_set, self._stop.set)

    def _listen(self) -> None:
        settings = self._settings
        if settings.listen_host:
            path = TcpPath(self.pool, self._gate, self.counters, settings.stall_timeout_ms / 1000, self._rdma)
            listener = bind_tcp("listen", settings.listen_host, settings.listen_port)
            listener.listen(BACKLOG)
            self._tcp_port = listener.getsockname()[1]
            self._serve(listener, path.serve, "slab_tcp")
        if settings.unix_socket:
            handout = Handout(self.pool, self._gate, self._secrets.node_token, self.counters)
            self._serve(listen_unix(settings.unix_socket), handout.serve, "slab_unix")
            self._bound_path = settings.unix_socket
        if settings.metrics_port is not None:
            self._stop_export = export(
                self.counters, settings.metrics_host, settings.metrics_port, lambda: self._incarnation > 0
            )

    def _serve(self, listener: socket.socket, serve: Callable[[socket.socket], None], name: str) -> None:
        limit = self._settings.max_connections
        self._servers.append(ConnectionServer(listener, serve, limit=limit, name=name, counters=self.counters))

    def stop(self) -> None:
        """Close everything; bytes in flight are cut."""
        self._link.close(0.5)
        for server in self._servers:
            server.stop()
        self._rdma.close()
        if self._stop_export is not None:
            self._stop_export()
        if self._bound_path:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._bound_path)

    def describe(self, sock: socket.socket) -> Register:
        """What to register: with the last incarnation, if there was one, because the memory still holds its chunks."""
        settings = self._settings
        host = settings.advertise_host or settings.listen_host
        if host in _WILDCARDS:  # the address by which this machine reaches the manager is one that others can reach
            host = sock.getsockname()[0] if sock.family != socket.AF_UNIX else socket.gethostname()
        if ":" in host:
            host = f"[{host}]"
        tcp = f"tcp://{host}:{self._tcp_port}" if settings.listen_host else ""
        shm = f"unix://{settings.unix_socket}" if settings.unix_socket else ""
        rdma = self._rdma.endpoint(tcp)
        if self._rdma.alone:  # no other way is told of; the disk server knows the socket by its settings
            tcp = shm = ""
        return Register(
            WIRE_VERSION_MIN,
            WIRE_VERSION,
            self._secrets.node_token,
            "slab",
            settings.node,
            self._incarnation,
            self.pool.id,
            host_id(),
            memory_bytes=self.pool.size_bytes,
            slab_bytes=settings.slab_size_bytes,
            tcp=tcp,
            shm=shm,
            fresh=self._incarnation == 0,
            rdma=rdma,
        )

    def registered(self, session: Session) -> None:
        """Serve the new life; report what the memory holds of it."""
        life = session.life
        first = self._incarnation == 0
        slots: Iterator[tuple[int, int]] = self._carving.slots()  # as carved until now: none in a fresh one
        new_life = self._gate.enter(life, session.clock)
        self._rdma.enter(session.quarantine_s, new_life=new_life)
        if new_life:
            # The manager has forgotten all earlier grants: whoever still works by one must stop now. What lies in the
            # slots of the former life is proved to it all the same; it carves anew what it takes over.
            self._carving.clear()
            for server in self._servers:
                server.close_all()
        self._incarnation = life.incarnation
        self.counters.add("polarkv_slab_registrations_total")
        batches = inventory(slots, self.pool.view)
        threading.Thread(target=report_inventory, args=(session, batches), name="inventory", daemon=True).start()
        text = f"ready slab node={self._settings.node} incarnation={life.incarnation} pool={self.pool.kind}"
        if first:
            print(f"{text} tcp_port={self._tcp_port} unix_socket={self._settings.unix_socket or '-'}", flush=True)
        _log.info("registered: %s epoch=%s", text, life.epoch)

    def command(self, session: Session, frame: Frame) -> None:
        """CARVE is the only command that a slab server knows; commands of a newer manager are left alone."""
        if frame.op != Op.CARVE:
            _log.warning("a command with op %s is not known here", frame.op)
            return
        command = decode_body(frame.body, Carve)
        if command.incarnation != session.life.incarnation:
            return
        if not self._carving.carve(command):
            self.counters.add(labelled("polarkv_slab_errors_total", "kind", "carve"))
            _log.error("cannot carve %s: this node has slabs of %s", command, self._settings.slab_size_bytes)

    def failed(self, error: PolarKVError) -> None:
        """End the process with the error."""
        self._stop.set(error)


def run_slab(settings: SlabSettings) -> None:
    """Run a slab server until SIGTERM or SIGINT.

    Raises:
        ConfigurationError: a setting is wrong. Unauthorized, VersionMismatch: the manager does not take this process.
    """
    stop = stopping.Stop()
    stop.on_signals()
    server = SlabServer(settings, stop)
    try:
        server.start()
        stop.wait()
    finally:
        if stop.error is None:
            stopping.exit_in_time()
        server.stop()
    if stop.error is not None:
        raise stop.error
