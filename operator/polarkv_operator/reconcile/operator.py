"""The operator as a whole: watches fill the queue, workers empty it, an election says whether they may."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable

from polarkv_client.errors import PolarKVError
from polarkv_operator.api.cluster import PolarKVCluster
from polarkv_operator.clients.kube import Reader, Writer, connect
from polarkv_operator.clients.manager import Managers
from polarkv_operator.reconcile.execute import Executor, NotLeading
from polarkv_operator.reconcile.leader import Election
from polarkv_operator.reconcile.observe import CLUSTER, Observer
from polarkv_operator.reconcile.queue import Queue
from polarkv_operator.reconcile.reconciler import Reconciler
from polarkv_operator.reconcile.watcher import Watcher, watched_kinds
from polarkv_operator.resources import names
from polarkv_operator.resources.common import Release
from polarkv_operator.settings import OperatorSettings

# Several children change at a time: one turn for all of them.
GATHER_S = 0.1
IDLE_S = 0.5
_log = logging.getLogger(__name__)


class Operator:
    """Runs in threads of its own from :meth:`start` to :meth:`stop`."""

    def __init__(
        self,
        settings: OperatorSettings,
        admin: Callable[[PolarKVCluster], str] = names.admin_endpoint,
        kubeconfig: str | None = None,
    ) -> None:
        """``admin`` says where a cluster's admin API is.

        Raises:
            PolarKVError: there is no Kubernetes API to talk to.
        """
        self.settings = settings
        self._stop = threading.Event()
        client = connect(kubeconfig)
        self._reader = Reader(client, self._stop.wait)
        writer = Writer(client, self._stop.wait)
        self._managers = Managers()
        self.identity = settings.identity or f"{socket.gethostname()}_{os.getpid()}"
        self.election = Election(writer, settings.namespace, settings.lease_name, self.identity, time.monotonic)
        self.queue = Queue(time.monotonic)
        self.reconciler = Reconciler(
            self._reader,
            Observer(self._reader, self._managers, admin),
            Executor(writer, self._managers, self.election.leads, time.time),
            Release(settings.image, settings.namespace),
            time.monotonic,
            time.time,
        )
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Begin; returns at once."""
        self._spawn("election", lambda: self.election.run(self._stop))
        self._spawn("resync", self._resync)
        for number in range(self.settings.workers):
            self._spawn(f"worker-{number}", self._work)
        for kind in watched_kinds():
            watcher = Watcher(self._reader, kind, self.settings.watch_namespace or None, self.changed, self._stop)
            watcher.start()  # ends with the process, or with its watch

    def stop(self, timeout_s: float = 25.0) -> None:
        """Let turns under way end, give the Lease back, and return."""
        self._stop.set()
        self.queue.close()
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._managers.close()

    def changed(self, key: str) -> None:
        """Something about a cluster (``namespace/name``) has changed."""
        self.queue.add(key, GATHER_S)

    @property
    def alive(self) -> bool:
        """Whether every thread that should run does."""
        return all(thread.is_alive() for thread in self._threads)

    def _spawn(self, name: str, run: Callable[[], None]) -> None:
        thread = threading.Thread(target=run, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _resync(self) -> None:
        """Look at every cluster now and then, in case a watch missed something, and at once when leadership begins."""
        led, due_s = False, 0.0
        while not self._stop.wait(IDLE_S):
            leads, now_s = self.election.leads(), time.monotonic()
            if leads and (not led or now_s >= due_s):
                try:
                    _, found = self._reader.versions(CLUSTER, self.settings.watch_namespace or None, "")
                except PolarKVError as error:
                    _log.warning("clusters cannot be listed: %s", error)
                    continue
                for item in found:
                    self.queue.add(f"{item['metadata']['namespace']}/{item['metadata']['name']}")
                due_s = now_s + self.settings.resync_seconds
            led = leads

    def _work(self) -> None:
        while not self._stop.is_set():
            if not self.election.leads():
                self._stop.wait(IDLE_S)
                continue
            key = self.queue.take(IDLE_S)
            if key is not None:
                self._turn(key)

    def _turn(self, key: str) -> None:
        try:
            self.queue.done(key, self.reconciler.turn(key))
        except NotLeading:
            self.queue.failed(key)
        except PolarKVError as error:
            delay_s = self.queue.failed(key)
            _log.warning("%s: %s; again in %g s", key, error, delay_s)
        except Exception:
            # A defect in one cluster's turn must not end the others'.
            delay_s = self.queue.failed(key)
            _log.exception("%s: a defect of the operator; again in %g s", key, delay_s)
