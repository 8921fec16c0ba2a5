"""The supervisor: one process that starts the servers, starts again what ended, and stops everything at its own end.

It runs in its main thread alone, on one wait: for a signal, for a child's end, for the starter's end, or for the next
thing that is due. What it knows is in ``supervisor.json``; what it says goes to ``logs/supervisor.log``.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import selectors
import signal
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from polarkv_dataplane.embedded import readiness
from polarkv_dataplane.embedded.children import STABLE_S, Child, plan_children
from polarkv_dataplane.embedded.places import Held, Places, choose_port, ensure_secrets, write_private
from polarkv_dataplane.embedded.reports import Reports
from polarkv_dataplane.embedded.settings import UpSettings

STOP_S = 3.0
FAILURES_AT_START = 5
_PROBE_S = 0.1
_LOG_CHECK_S = 10.0
_USAGE_EXIT = 2
_METADATA_VARIABLE = "POLARKV_MANAGER_METADATA_URL"
_log = logging.getLogger("polarkv.supervisor")


@dataclass(frozen=True)
class Order:
    """What the starter asks for. ``attached``: the cluster ends when the starter does."""

    settings: UpSettings
    attached: bool
    config: Path | None = None
    log_level: str = "INFO"


class Supervisor:
    """Runs one cluster; :meth:`run` returns when it has been stopped."""

    def __init__(self, order: Order, places: Places, held: Held, reports: Reports) -> None:
        settings = order.settings
        self._order, self._places, self._held, self._reports = order, places, held, reports
        token, admin_token = ensure_secrets(places)
        http_port = choose_port(settings.http_port, places)
        self._admin, self._admin_token = f"http://127.0.0.1:{http_port}", admin_token
        connection = {
            "endpoint": f"unix://{places.socket('manager')}",
            "token": token,
            "admin": self._admin,
            "admin_token": admin_token,
        }
        write_private(places.connection, json.dumps(connection, indent=2) + "\n")
        self._children = plan_children(settings, places, http_port, order.config, order.log_level)
        # Not a flag: it may hold a password, and flags can be seen by every user of the machine.
        metadata_url = settings.metadata_url or os.environ.get(_METADATA_VARIABLE) or f"sqlite:///{places.metadata}"
        self._children[0].environment[_METADATA_VARIABLE] = metadata_url
        self._selector = selectors.DefaultSelector()
        self._wakeup: socket.socket | None = None
        self._started_at = time.monotonic()
        self._state, self._error, self._stop_asked = "starting", "", False
        self._next_probe = self._next_log_check = 0.0

    def run(self) -> int:
        """Start everything and watch over it until a signal, or the starter's end; return the exit code."""
        self._listen_to_signals()
        if self._order.attached:
            self._selector.register(0, selectors.EVENT_READ, "starter")
        try:
            while not self._stop_asked:
                self._start_due()
                self._wait()
                self._probe()
                self._check_logs()
        finally:
            self._stop_all()
        return 1 if self._error else 0

    def _listen_to_signals(self) -> None:
        ours, pythons = socket.socketpair()
        for end in (ours, pythons):
            end.setblocking(False)
        self._wakeup = pythons
        signal.set_wakeup_fd(pythons.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._ask_to_stop)
        self._selector.register(ours, selectors.EVENT_READ, "signal")

    def _ask_to_stop(self, *_: object) -> None:
        self._stop_asked = True

    def _start_due(self) -> None:
        now = time.monotonic()
        changed = False
        for child in self._children:
            if child.process is None and child.due_at <= now:
                self._selector.register(child.start(), selectors.EVENT_READ, child)
                _log.info("started %s: process %s (start %d)", child.name, child.pid, child.starts)
                changed = True
        if changed:
            self._save()

    def _wait(self) -> None:
        now = time.monotonic()
        due = [child.due_at for child in self._children if child.process is None]
        due += [self._next_log_check, *([self._next_probe] if self._state == "starting" else [])]
        for key, _ in self._selector.select(max(0.0, min(due) - now)):
            if isinstance(key.data, Child):
                self._selector.unregister(key.fd)
                self._child_ended(key.data)
            elif key.data == "signal":
                with contextlib.suppress(BlockingIOError):
                    assert isinstance(key.fileobj, socket.socket)
                    key.fileobj.recv(4096)
            elif not os.read(0, 4096):
                _log.info("the process that started this cluster has ended: stopping")
                self._stop_asked = True

    def _child_ended(self, child: Child) -> None:
        code = child.ended(time.monotonic())
        level = logging.ERROR if child.failures >= FAILURES_AT_START else logging.WARNING
        wait_s = max(0.0, child.due_at - time.monotonic())
        text = f"{child.name} {child.last_end}; starting it again in {wait_s:.1f} s"
        tail = child.tail()
        _log.log(level, "%s (failure %d in a row); it said last:\n%s", text, child.failures, tail)
        if self._state == "ready":
            loops = child.failures >= FAILURES_AT_START
            if loops:
                text = f"{child.name} ended {child.failures} times in a row; the last lines of {child.log}:\n{tail}"
            self._reports.send({"event": "crash loop" if loops else "restart", "text": text})
        hopeless = code == _USAGE_EXIT or child.failures >= FAILURES_AT_START
        if self._state == "starting" and hopeless:
            self._fail(f"{child.name} {child.last_end}; the last lines of {child.log}:\n{tail}")
        self._save()

    def _probe(self) -> None:
        """While starting: look whether every cache node is Active."""
        now = time.monotonic()
        if self._state != "starting" or now < self._next_probe:
            return
        wanted = {f"node-{node}" for node in range(self._order.settings.nodes)}
        missing = readiness.not_active(self._admin, self._admin_token, wanted)
        self._next_probe = time.monotonic() + _PROBE_S
        if not missing:
            self._state = "ready"
            _log.info("ready: %d cache nodes are Active", len(wanted))
            self._save()
            self._reports.send({"state": "ready", "seconds": round(time.monotonic() - self._started_at, 3)})
            if not self._order.attached:
                self._reports.hang_up()
        elif now - self._started_at > self._order.settings.wait_ready_seconds:
            tails = "\n".join(f"{child.log}:\n{child.tail(3)}" for child in self._children)
            self._fail(
                f"not ready after {self._order.settings.wait_ready_seconds:g} s ({missing}); last log lines:\n{tails}"
            )

    def _fail(self, error: str) -> None:
        self._state, self._error, self._stop_asked = "failed", error, True
        _log.error("%s", error)
        self._save()
        self._reports.send({"state": "failed", "error": error})

    def _check_logs(self) -> None:
        now = time.monotonic()
        if now < self._next_log_check:
            return
        self._next_log_check = now + _LOG_CHECK_S
        for child in self._children:
            child.trim_log()
            if child.failures and child.process is not None and now - child.started_at >= STABLE_S:
                child.failures = 0
                self._save()

    def _stop_all(self) -> None:
        """SIGTERM to all, also to those that are stopped; SIGKILL to those that have not ended in time."""
        if self._state != "failed":
            self._state = "stopping"
        self._save()
        for number, limit_s in ((signal.SIGTERM, STOP_S), (signal.SIGKILL, 1.0)):
            left = [child for child in self._children if child.process is not None]
            for child in left:
                child.signal(number)
                child.signal(signal.SIGCONT)
            deadline = time.monotonic() + limit_s
            for child in left:
                assert child.process is not None
                with contextlib.suppress(Exception):
                    child.process.wait(max(0.0, deadline - time.monotonic()))
                    child.ended(time.monotonic())
        if self._state != "failed":
            self._state = "stopped"
        self._save()
        _log.info("stopped")
        self._held.release()

    def _save(self) -> None:
        """Write down what is known, for `polarkv status`, `polarkv down` and tests."""
        children = {
            child.name: {
                "pid": child.pid,
                "starts": child.starts,
                "failures_in_a_row": child.failures,
                "last_end": child.last_end,
                "log": str(child.log),
            }
            for child in self._children
        }
        known = {"pid": os.getpid(), "state": self._state, "error": self._error, "children": children}
        write_private(self._places.state, json.dumps(known, indent=2) + "\n")
