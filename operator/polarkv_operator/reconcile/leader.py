"""One operator acts at a time: the holder of a Lease. The others watch and wait.

The official client's election cannot be stopped, and its calls have no time-outs: a leader whose API server hangs would
go on believing. Here leadership ends by the holder's own clock, well before anybody else may take it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from datetime import UTC, datetime

from polarkv_client.errors import PolarKVError
from polarkv_operator.clients.kube import Conflict, Kind, Object, Writer

LEASE = Kind("coordination.k8s.io/v1", "Lease")
DURATION_S, RENEW_WITHIN_S, PERIOD_S = 15, 10.0, 2.0
_log = logging.getLogger(__name__)


class Election:
    """A candidate. Call :meth:`turn` every :data:`PERIOD_S`; ``clock`` is monotonic, in seconds."""

    def __init__(self, api: Writer, namespace: str, name: str, identity: str, clock: Callable[[], float]) -> None:
        self._api, self._namespace, self._name, self._identity, self._clock = api, namespace, name, identity, clock
        self._held_until = float("-inf")
        self._seen: tuple[str, float] = ("", clock())  # resource version, since when by our clock

    def leads(self) -> bool:
        """Whether this one may act now."""
        return self._clock() < self._held_until

    def turn(self) -> bool:
        """Take, renew or wait for the Lease; return whether this one leads."""
        asked_s = self._clock()
        try:
            if self._take(asked_s):
                if not self.leads():
                    _log.info("%s leads", self._identity)
                self._held_until = asked_s + RENEW_WITHIN_S
        except Conflict:
            self._held_until = float("-inf")
        except PolarKVError as error:
            _log.warning("the Lease cannot be renewed: %s", error)
        return self.leads()

    def release(self) -> None:
        """Let another one lead at once."""
        if not self.leads():
            return
        self._held_until = float("-inf")
        try:
            lease = self._api.get(LEASE, self._namespace, self._name)
            if lease is not None and lease["spec"].get("holderIdentity") == self._identity:
                lease["spec"] |= {"holderIdentity": "", "leaseDurationSeconds": 1}
                self._api.replace(lease)
        except PolarKVError as error:
            _log.info("the Lease is not released and runs out: %s", error)

    def run(self, stop: threading.Event) -> None:
        """Take turns until ``stop`` is set."""
        while not stop.is_set():
            self.turn()
            stop.wait(PERIOD_S)
        self.release()

    def _take(self, now_s: float) -> bool:
        lease = self._api.get(LEASE, self._namespace, self._name)
        if lease is None:
            self._api.create(self._mine({
                "apiVersion": LEASE.api_version, "kind": LEASE.name,
                "metadata": {"namespace": self._namespace, "name": self._name}, "spec": {},
            }))  # fmt: skip
            return True
        spec, version = lease["spec"], str(lease["metadata"]["resourceVersion"])
        if version != self._seen[0]:
            self._seen = (version, now_s)
        holder = spec.get("holderIdentity")
        # By our own clock, from when we saw it last change: clocks of machines need not agree.
        if holder not in ("", None, self._identity) and now_s - self._seen[1] < spec.get("leaseDurationSeconds", 0):
            self._held_until = float("-inf")
            return False
        self._api.replace(self._mine(lease))
        return True

    def _mine(self, lease: Object) -> Object:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec = lease["spec"]
        if spec.get("holderIdentity") != self._identity:
            spec["acquireTime"], spec["leaseTransitions"] = now, spec.get("leaseTransitions", -1) + 1
        spec |= {"holderIdentity": self._identity, "leaseDurationSeconds": DURATION_S, "renewTime": now}
        return lease
