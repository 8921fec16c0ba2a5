"""Watches of what belongs to clusters: metadata only, selected by the API server: others' pods cost nothing."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from polarkv_client.errors import PolarKVError
from polarkv_operator.clients.kube import Kind, Reader
from polarkv_operator.reconcile.observe import CLUSTER, POD, POD_MONITOR, child_kinds
from polarkv_operator.resources.names import CLUSTER_LABEL, MANAGED_BY

WATCH_S = 240
FIRST_S, LONGEST_S = 0.2, 10.0
SELECTOR = f"app.kubernetes.io/managed-by={MANAGED_BY}"
_log = logging.getLogger(__name__)


class Watcher(threading.Thread):
    """Follows one kind of object and says which cluster each change is about, until ``stop`` is set."""

    def __init__(
        self, api: Reader, kind: Kind, namespace: str | None, changed: Callable[[str], None], stop: threading.Event
    ) -> None:
        super().__init__(name=f"watch-{kind.plural}", daemon=True)
        self._api, self._kind, self._namespace, self._changed, self._stopping = api, kind, namespace, changed, stop

    def run(self) -> None:
        pause_s = FIRST_S
        while not self._stopping.is_set():
            try:
                self._follow()
                pause_s = FIRST_S
            except Exception as error:
                # Whatever it was: without this watch, changes are seen only by the resync.
                if not self._stopping.is_set():
                    _log.info("watch of %s: %s", self._kind.plural, error, exc_info=not isinstance(error, PolarKVError))
                self._stopping.wait(pause_s)
                pause_s = min(LONGEST_S, 2 * pause_s)

    def _follow(self) -> None:
        selector = "" if self._kind == CLUSTER else SELECTOR
        version, found = self._api.versions(self._kind, self._namespace, selector)
        for item in found:
            self._say(item)
        for event in self._api.watch(self._kind, self._namespace, selector, version, WATCH_S):
            if self._stopping.is_set() or event["type"] == "ERROR":
                return  # too old: begin again with a list
            if event["type"] != "BOOKMARK":
                self._say(event["object"])

    def _say(self, item: dict[str, Any]) -> None:
        meta = item["metadata"]
        # The owner is known even when somebody has removed the label; pods and their claims have only the label.
        owners = [owner["name"] for owner in meta.get("ownerReferences") or [] if owner["kind"] == CLUSTER.name]
        label = (meta.get("labels") or {}).get(CLUSTER_LABEL)
        name = meta["name"] if self._kind == CLUSTER else next(iter(owners), label)
        if name:
            self._changed(f"{meta['namespace']}/{name}")


def watched_kinds() -> list[Kind]:
    """Of all that the operator makes or looks at; the Prometheus operator's are left to the next resync."""
    return [*(kind for kind in child_kinds() if kind != POD_MONITOR), POD]
