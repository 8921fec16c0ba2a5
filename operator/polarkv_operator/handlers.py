"""The operator under kopf: it says which clusters changed, and keeps the process; the rest is the reconciler's.

Handlers of events, not of changes: they need no finalizer, no annotation of kopf's and no status of its own. Children
are watched beside it (:mod:`polarkv_operator.reconcile.watcher`): kopf selects by label only after it has received all.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import kopf
from aiohttp import web

from polarkv_client.listening import EVERYWHERE, bind_tcp
from polarkv_operator.api.cluster import GROUP, PLURAL, VERSION
from polarkv_operator.reconcile.operator import Operator
from polarkv_operator.settings import OperatorSettings


class Handlers:
    """Handlers for one operator; /healthz is answered at ``health``, a bound socket, if there is one."""

    def __init__(
        self, operator: Operator, registry: kopf.OperatorRegistry, health: socket.socket | None = None
    ) -> None:
        self._operator = operator
        self._health = health
        self._site: web.AppRunner | None = None
        kopf.on.startup(registry=registry)(self.startup)
        kopf.on.cleanup(registry=registry)(self.cleanup)
        kopf.on.login(registry=registry)(self.login)
        kopf.on.event(GROUP, VERSION, PLURAL, registry=registry)(self.event)

    def login(self, **context: Any) -> kopf.ConnectionInfo | None:
        """As a pod does, or as kubectl does."""
        return kopf.login_with_service_account(**context) or kopf.login_with_kubeconfig(**context)

    async def startup(self, settings: kopf.OperatorSettings, **_: Any) -> None:
        """Begin."""
        settings.posting.enabled = False  # Events are the executor's
        settings.peering.standalone = True  # the Lease says who acts
        # Told its one namespace, kopf would ask for all of them first, and be refused for a minute before it began.
        settings.scanning.disabled = bool(self._operator.settings.watch_namespace)
        settings.watching.server_timeout = 240
        settings.watching.client_timeout = 300
        self._operator.start()
        if self._health is not None:
            self._site = await serve_health(self._health, self.probe)

    async def cleanup(self, **_: Any) -> None:
        """End, within the time that the kubelet gives."""
        await asyncio.to_thread(self._operator.stop)
        if self._site is not None:
            await self._site.cleanup()

    async def event(self, name: str, namespace: str | None, **_: Any) -> None:
        """A cluster is new, changed or gone."""
        self._operator.changed(f"{namespace}/{name}")

    def probe(self) -> tuple[bool, str]:
        """For /healthz: an operator that lost a thread is restarted."""
        if not self._operator.alive:
            return False, "a thread of the operator has ended: see its log"
        return True, "leads" if self._operator.election.leads() else "waits"


async def serve_health(sock: socket.socket, probe: Callable[[], tuple[bool, str]]) -> web.AppRunner:
    """Answer /healthz at a bound socket: 200 or 503, with what ``probe`` says.

    Not kopf's own: asyncio, which it leaves the binding to, never lets one socket have both families of addresses.
    """

    async def answer(_: web.Request) -> web.Response:
        well, text = probe()
        return web.Response(text=f"{text}\n", status=200 if well else 503)

    app = web.Application()
    app.router.add_get("/healthz", answer)
    runner = web.AppRunner(app, handle_signals=False, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    await web.SockSite(runner, sock).start()
    return runner


def run(settings: OperatorSettings) -> None:
    """Run the operator until SIGTERM or SIGINT.

    Raises:
        ConfigurationError: the port of /healthz is taken.
        PolarKVError: there is no Kubernetes API to talk to.
    """
    registry = kopf.OperatorRegistry()
    operator = Operator(settings)
    health = bind_tcp("health_port", EVERYWHERE, settings.health_port) if settings.health_port else None
    Handlers(operator, registry, health)
    # Without an identity kopf makes one of the user's name, and a pod's user has none.
    options: dict[str, Any] = {"identity": operator.identity}
    options |= {"namespaces": [settings.watch_namespace]} if settings.watch_namespace else {"clusterwide": True}
    kopf.run(registry=registry, standalone=True, **options)
