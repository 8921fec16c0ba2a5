"""The webhook's process: /mutate over TLS, health and metrics without, certificates looked at now and then.

Whatever goes wrong, the pod is let through: by an answer where there can be one, else by ``failurePolicy: Ignore``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from polarkv_client.errors import PolarKVError
from polarkv_client.listening import bind_tcp
from polarkv_operator.clients.kube import Writer, connect
from polarkv_operator.webhooks import review
from polarkv_operator.webhooks.clusters import Clusters
from polarkv_operator.webhooks.events import Events
from polarkv_operator.webhooks.injection import Decision
from polarkv_operator.webhooks.keeper import Folder, Keeper, SharedSecret, Source
from polarkv_operator.webhooks.kube_api import KubeApi
from polarkv_operator.webhooks.metrics import Metrics
from polarkv_operator.webhooks.settings import WebhookSettings

# A pod has at most 1.5 MB in etcd; the API server sends it as JSON and with a little around it.
MOST_BODY_BYTES = 4 << 20
BODY_S = 2.0
# Below the 5 s that the API server gives (timeoutSeconds in the chart).
DECISION_S = 3.0
RETRY_S = 5.0
_log = logging.getLogger(__name__)


class TooLarge(ValueError):
    """A request's body is beyond the limit."""


def run_webhook(settings: WebhookSettings) -> None:
    """Run a webhook server until SIGTERM or SIGINT; blocks.

    Raises:
        ConfigurationError: an address is taken.
        PolarKVError: there is no Kubernetes API to talk to.
    """
    asyncio.run(serve(settings))


async def serve(
    settings: WebhookSettings,
    stop: asyncio.Event | None = None,
    ready: Callable[[tuple[int, int]], None] | None = None,
    now: Callable[[], datetime] = lambda: datetime.now(UTC),
    api: KubeApi | None = None,
) -> None:
    """A webhook server in the running loop until ``stop`` (without it: a signal). ``ready`` gets both ports.

    ``api`` is the Kubernetes API; without it, the pod's own or the kubeconfig's.

    Raises:
        As :func:`run_webhook`.
    """
    if stop is None:
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
    pauses = threading.Event()
    if api is None:
        api = Writer(connect(str(settings.kubeconfig) if settings.kubeconfig else None), pauses.wait)
    metrics = Metrics()
    folder = settings.certificate_directory
    source: Source = Folder(folder) if folder else SharedSecret(api, settings)
    keeper = Keeper(source, now)
    clusters = Clusters(api, settings.image, settings.lookup_ms / 1000, time.monotonic)
    events = Events(api, time.monotonic, lambda outcome: metrics.events.labels(outcome).inc())
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(pauses.set)
        stack.callback(clusters.close)
        stack.push_async_callback(events.close)
        health = bind_tcp("health_port", settings.host, settings.health_port)
        stack.callback(health.close)
        main = bind_tcp("port", settings.host, settings.port)
        stack.callback(main.close)
        await stack.enter_async_context(_http(health_app(keeper, metrics), health))
        looking = asyncio.create_task(_look_after(keeper, metrics, settings.check_seconds), name="certificates")
        stack.push_async_callback(_cancel, looking)
        app = admission_app(clusters, events, metrics)
        # Without a certificate a handshake fails, and the pod starts all the same: no reason to wait for one.
        await stack.enter_async_context(_http(app, main, keeper))
        if ready is not None:
            ready((main.getsockname()[1], health.getsockname()[1]))
        await stop.wait()
        _log.info("stopping")


def admission_app(clusters: Clusters, events: Events, metrics: Metrics) -> FastAPI:
    """What the API server calls."""
    app = FastAPI(title="PolarKV webhook", docs_url=None, redoc_url=None, openapi_url=None)

    @app.post("/mutate")
    async def mutate(request: Request) -> Response:
        try:
            async with asyncio.timeout(BODY_S):
                asked = review.read(json.loads(await _body(request)))
        except (ValueError, RecursionError, TimeoutError) as error:
            metrics.refused.inc()
            status = 413 if isinstance(error, TooLarge) else 408 if isinstance(error, TimeoutError) else 400
            return JSONResponse({"error": str(error)[:500] or type(error).__name__}, status)
        begun = time.monotonic()
        decision = await _decide(asked, clusters, metrics)
        if decision is not None:
            metrics.seconds.observe(time.monotonic() - begun)
            metrics.note(decision)
            _log.info("%s: %s", _pod_name(asked), decision.status)
            events.say(asked, decision)
        return JSONResponse(review.answer(asked.uid, decision))

    return app


async def _decide(asked: review.Request, clusters: Clusters, metrics: Metrics) -> Decision | None:
    try:
        async with asyncio.timeout(DECISION_S):
            return await review.decide(asked, clusters.find)
    except Exception as error:  # a defect of ours must not keep a pod from starting
        metrics.pods.labels("error", type(error).__name__).inc()
        _log.exception("%s: let through without a decision", _pod_name(asked))
        return None


def _pod_name(asked: review.Request) -> str:
    metadata = asked.pod.get("metadata")
    metadata = metadata if isinstance(metadata, dict) else {}
    return f"{asked.namespace}/{str(metadata.get('name') or metadata.get('generateName') or '?')[:260]}"


async def _body(request: Request) -> bytes:
    """The body, read no further than the limit.

    Raises:
        TooLarge: it is longer.
    """
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > MOST_BODY_BYTES:
            raise TooLarge(f"the body has more than {MOST_BODY_BYTES} bytes")
        parts.append(part)
    return b"".join(parts)


def health_app(keeper: Keeper, metrics: Metrics) -> FastAPI:
    """What the kubelet and Prometheus ask."""
    app = FastAPI(title="PolarKV webhook", docs_url=None, redoc_url=None, openapi_url=None)

    @app.get("/healthz")
    async def healthz() -> Response:
        return Response("ok\n", media_type="text/plain")

    @app.get("/readyz")
    async def readyz() -> Response:
        if keeper.is_valid:
            return Response("ok\n", media_type="text/plain")
        ended = "it has ended" if keeper.not_after else "there is none yet"
        return Response(f"no certificate to show: {ended}; see the log\n", 503, media_type="text/plain")

    @app.get("/metrics")
    async def read_metrics() -> Response:
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    return app


async def _look_after(keeper: Keeper, metrics: Metrics, check_seconds: float) -> None:
    """Look at the certificate for ever; sooner again after a failure."""
    while True:
        pause_s = check_seconds
        try:
            keeper.show(await asyncio.to_thread(keeper.fetch))
            metrics.failures.set(0)
        except PolarKVError as error:
            metrics.failures.inc()
            pause_s = min(RETRY_S, check_seconds)
            _log.warning("the certificate cannot be looked after: %s; again in %g s", error, pause_s)
        except Exception:
            metrics.failures.inc()
            _log.exception("looking after the certificate failed")
        metrics.expiry.set(keeper.not_after.timestamp() if keeper.not_after else 0)
        await asyncio.sleep(pause_s)


class _Server(uvicorn.Server):
    """Signals are :func:`serve`'s business."""

    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        yield


@contextlib.asynccontextmanager
async def _http(app: FastAPI, sock: socket.socket, keeper: Keeper | None = None) -> AsyncIterator[None]:
    """Serve on a bound socket until the block ends; with a keeper over TLS."""
    config = uvicorn.Config(
        app, lifespan="off", log_config=None, access_log=False, timeout_graceful_shutdown=3, limit_concurrency=256,
        timeout_keep_alive=75, server_header=False, ws="none",
    )  # fmt: skip
    config.load()
    if keeper is not None:
        config.ssl = keeper.context
    server = _Server(config)
    task = asyncio.create_task(server.serve(sockets=[sock]))
    try:
        while not server.started:
            if task.done():
                task.result()
                raise RuntimeError("a server ended before it began")
            await asyncio.sleep(0.005)
        yield
    finally:
        server.should_exit = True
        # Requests under way are answered: the API server waits for them.
        done, _ = await asyncio.wait([task], timeout=5.0)
        if not done:
            await _cancel(task)


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
