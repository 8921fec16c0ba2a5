"""The disk server's process: volumes, operations, the hold on the slab's memory, and the link to the manager."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable

from polarkv_client.errors import PolarKVError, Unauthorized, VersionMismatch
from polarkv_client.host import host_id
from polarkv_client.protocol.messages import DiskCommand, Op, Register
from polarkv_client.protocol.wire import WIRE_VERSION, WIRE_VERSION_MIN, Frame, decode_body
from polarkv_dataplane.disk.attachment import Attachment
from polarkv_dataplane.disk.executor import KeyedExecutor
from polarkv_dataplane.disk.files import Files
from polarkv_dataplane.disk.index import Index, Report
from polarkv_dataplane.disk.operations import Operations
from polarkv_dataplane.disk.scan import Scan, batches
from polarkv_dataplane.disk.settings import DiskSettings
from polarkv_dataplane.disk.volumes import VolumeSet
from polarkv_dataplane.runtime import secrets, stopping
from polarkv_dataplane.runtime.counters import Counters, export
from polarkv_dataplane.runtime.log import LimitedLogger
from polarkv_dataplane.runtime.node_link import NodeLink
from polarkv_dataplane.runtime.session import Session, report_inventory

_COMMANDS = (Op.OFFLOAD, Op.LOAD, Op.PURGE)
_log = logging.getLogger(__name__)


class DiskServer:
    """One disk server; :meth:`run` once."""

    def __init__(self, settings: DiskSettings, stop: stopping.Stop) -> None:
        self.settings = settings
        self.stop = stop
        self.secrets = secrets.load(settings.secret_file)
        self.counters = Counters()
        self.volumes = VolumeSet(settings.node, settings.directories, settings.require_mount)
        try:
            self.files = Files(self.volumes.folders, settings.io_depth)
        except BaseException:
            self.volumes.close()
            raise
        self.executor = KeyedExecutor(settings.io_threads, settings.queue_length)
        self.index = Index(settings.capacity_bytes)
        self.operations = Operations(
            self.files, self.index, self.executor, self.counters, settings.operation_timeout_ms / 1000
        )
        self.ready = False
        self._limited = LimitedLogger(_log, 5.0)
        gauges: dict[str, Callable[[], float]] = {
            "used_bytes": lambda: self.index.used_bytes,
            "capacity_bytes": lambda: self.index.capacity_bytes,
            "files": lambda: len(self.index),
            "queued_operations": lambda: len(self.executor),
            "direct_volumes": lambda: sum(map(bool, self.files.direct)),
        }
        for name, read in gauges.items():
            self.counters.gauge(f"polarkv_disk_{name}", read)

    def run(self) -> None:
        """Attach, register and serve, again after each loss, until the stop is set.

        Raises:
            ConfigurationError: the exporter's port is taken. Unauthorized, VersionMismatch: the first peer says no.
        """
        settings = self.settings
        stop_export = None
        if settings.metrics_port is not None:
            stop_export = export(self.counters, settings.metrics_host, settings.metrics_port, lambda: self.ready)
        scan = Scan(self.files, self.index, self.executor, self.counters, settings.io_threads)
        threading.Thread(target=scan.run, args=(self.stop.is_set,), name="scan", daemon=True).start()
        try:
            while not self.stop.is_set():
                attachment = self._attach()
                if attachment is not None:
                    self._serve(attachment)
        finally:
            self.executor.close()
            self.volumes.close()
            if stop_export is not None:
                stop_export()

    def _attach(self) -> Attachment | None:
        try:
            return Attachment.open(self.settings.slab_socket, self.secrets.node_token)
        except (Unauthorized, VersionMismatch):
            if not self.ready:
                raise
        except (PolarKVError, OSError) as error:
            self._limited.warning(type(error).__name__, "cannot attach: %s; trying again", error)
        self.stop.wait(0.1)
        return None

    def _serve(self, attachment: Attachment) -> None:
        """Serve until the slab server, or its incarnation, is another; then bring all work on its memory to an end."""
        registration = _Registration(self, attachment)
        link = NodeLink(self.settings.manager, registration, self.counters, f"disk-{self.settings.node}")
        link.start()
        try:
            while not self.stop.is_set() and not registration.over and not attachment.lost(0.1):
                pass
        finally:
            registration.over = True
            # In this order: the link's thread submits no more, then nothing runs any more, then the memory goes.
            while not link.close() and not self.stop.is_set():
                pass
            if self.executor.fence(self.stop.is_set):
                attachment.close()
        self.counters.add("polarkv_disk_attachments_total")


class _Registration:
    """What the link needs to know while one attachment lasts."""

    def __init__(self, server: DiskServer, attachment: Attachment) -> None:
        self.over = False
        self._server = server
        self._attachment = attachment

    def describe(self, sock: socket.socket) -> Register:
        """End every operation of earlier registrations: none of them may touch memory after this one."""
        server, attachment = self._server, self._attachment
        if not server.executor.fence(lambda: self.over or server.stop.is_set()):
            raise PolarKVError("stopping")
        return Register(
            WIRE_VERSION_MIN,
            WIRE_VERSION,
            server.secrets.node_token,
            "disk",
            server.settings.node,
            attachment.incarnation,
            attachment.pool,
            host_id(),
            disk_bytes=server.settings.capacity_bytes,
            disk_used_bytes=server.index.used_bytes,
            fresh=not server.ready,
            volumes=len(server.volumes.folders),
        )

    def registered(self, session: Session) -> None:
        """Report the inventory; commands are taken meanwhile."""
        server, life = self._server, session.life
        if life.incarnation != self._attachment.incarnation:
            _log.info("the manager has incarnation %s, the slab %s", life.incarnation, self._attachment.incarnation)
            self.over = True
            session.end()
            return
        report = server.index.begin_report()  # here: no command has been read yet
        threading.Thread(target=self._report, args=(session, report), name="inventory", daemon=True).start()
        text = f"ready disk node={server.settings.node} incarnation={life.incarnation}"
        if not server.ready:
            server.ready = True
            direct = "all" if all(server.files.direct) else "not-all"
            print(f"{text} volumes={len(server.files.direct)} o_direct={direct}", flush=True)
        _log.info("registered: %s epoch=%s", text, life.epoch)

    def _report(self, session: Session, report: Report) -> None:
        index = self._server.index
        try:
            report_inventory(session, batches(index, report, lambda: session.alive))
        finally:
            index.end_report(report)

    def command(self, session: Session, frame: Frame) -> None:
        """Queue a command of this incarnation; drop those of others."""
        if frame.op not in _COMMANDS:
            _log.warning("a command with op %s is not known here", frame.op)
            return
        command = decode_body(frame.body, DiskCommand)
        if command.incarnation != self._attachment.incarnation:
            self._server.counters.add("polarkv_disk_stale_commands_total")
            return
        self._server.operations.take(session, self._attachment, Op(frame.op), command)

    def failed(self, error: PolarKVError) -> None:
        """End the process if it never was registered; else attach anew, which finds out more."""
        self.over = True
        if not self._server.ready:
            self._server.stop.set(error)


def run_disk(settings: DiskSettings) -> None:
    """Run a disk server until SIGTERM or SIGINT.

    Raises:
        ConfigurationError: a setting is wrong. Unauthorized, VersionMismatch: a peer does not take this process.
    """
    stop = stopping.Stop()
    stop.on_signals()
    server = DiskServer(settings, stop)

    def watch() -> None:
        stop.wait()
        if stop.error is None:
            stopping.exit_in_time()

    threading.Thread(target=watch, name="stop", daemon=True).start()
    server.run()
    if stop.error is not None:
        raise stop.error
