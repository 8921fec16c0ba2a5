"""Lets go, in the background, of what leads to cache nodes that have gone.

Without it a client that asks for nothing would keep the descriptor of a dead slab's memory, and with it all of that
memory, until it is granted something of the node's next life.
"""

from __future__ import annotations

import logging
import threading
import time

from polarkv_client import errors
from polarkv_client.manager_client import ManagerClient
from polarkv_client.transport.select import Transports

SWEEP_S = 0.5  # for so long a dead slab's memory may outlive it
NODES_S = 30.0  # how often an idle client asks which cache nodes there are
_ASK_S = 1.0
_log = logging.getLogger(__name__)


class Upkeep:
    """One thread a client."""

    def __init__(self, manager: ManagerClient, transports: Transports) -> None:
        self._manager = manager
        self._transports = transports
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="polarkv-upkeep", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        """End the thread; waits for so long at most."""
        self._closing.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        nodes_at = time.monotonic() + NODES_S
        while not self._closing.wait(SWEEP_S):
            try:
                self._transports.sweep()
                if time.monotonic() >= nodes_at:
                    nodes_at = time.monotonic() + NODES_S
                    self._forget_absent()
            except errors.PolarKVError as error:
                _log.debug("not asked for the cache nodes: %s", error)
            except Exception:  # a defect must not end what keeps memory from being held for ever
                _log.exception("letting go of cache nodes that have gone failed")

    def _forget_absent(self) -> None:
        if self._transports.used and self._manager.home.connected:
            self._transports.forget_absent(self._manager.list_nodes(time.monotonic() + _ASK_S))
