"""The operator under kopf: it says which clusters changed, and keeps the process; the rest is the reconciler's.

Handlers of events, not of changes: they need no finalizer, no annotation of kopf's and no status of its own. Children
are watched beside it (:mod:`polarkv_operator.reconcile.watcher`): kopf selects by label only after it has received all.
"""

from __future__ import annotations

import asyncio
from typing import Any

import kopf

from polarkv_operator.api.cluster import GROUP, PLURAL, VERSION
from polarkv_operator.reconcile.operator import Operator
from polarkv_operator.settings import OperatorSettings


class Handlers:
    """Handlers for one operator."""

    def __init__(self, operator: Operator, registry: kopf.OperatorRegistry) -> None:
        self._operator = operator
        kopf.on.startup(registry=registry)(self.startup)
        kopf.on.cleanup(registry=registry)(self.cleanup)
        kopf.on.login(registry=registry)(self.login)
        kopf.on.probe(id="threads", registry=registry)(self.probe)
        kopf.on.event(GROUP, VERSION, PLURAL, registry=registry)(self.event)

    def login(self, **context: Any) -> kopf.ConnectionInfo | None:
        """As a pod does, or as kubectl does."""
        return kopf.login_with_service_account(**context) or kopf.login_with_kubeconfig(**context)

    async def startup(self, settings: kopf.OperatorSettings, **_: Any) -> None:
        """Begin."""
        settings.posting.enabled = False  # Events are the executor's
        settings.peering.standalone = True  # the Lease says who acts
        settings.watching.server_timeout = 240
        settings.watching.client_timeout = 300
        self._operator.start()

    async def cleanup(self, **_: Any) -> None:
        """End, within the time that the kubelet gives."""
        await asyncio.to_thread(self._operator.stop)

    async def event(self, name: str, namespace: str | None, **_: Any) -> None:
        """A cluster is new, changed or gone."""
        self._operator.changed(f"{namespace}/{name}")

    async def probe(self, **_: Any) -> str:
        """For /healthz: an operator that lost a thread is restarted."""
        if not self._operator.alive:
            raise RuntimeError("a thread of the operator has ended: see its log")
        return "leads" if self._operator.election.leads() else "waits"


def run(settings: OperatorSettings) -> None:
    """Run the operator until SIGTERM or SIGINT.

    Raises:
        PolarKVError: there is no Kubernetes API to talk to.
    """
    registry = kopf.OperatorRegistry()
    operator = Operator(settings)
    Handlers(operator, registry)
    # Without an identity kopf makes one of the user's name, and a pod's user has none.
    options: dict[str, Any] = {"identity": operator.identity}
    options |= {"namespaces": [settings.watch_namespace]} if settings.watch_namespace else {"clusterwide": True}
    if settings.health_port:
        options["liveness_endpoint"] = f"http://0.0.0.0:{settings.health_port}/healthz"
    kopf.run(registry=registry, standalone=True, **options)
