"""The admin API, health checks and metrics over HTTP, in the manager's own loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import uvicorn
from fastapi import Depends, FastAPI, Header, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from polarkv_dataplane.manager.shell.admin_routes import Refusal, add_routes
from polarkv_dataplane.manager.shell.api import Health, Problem
from polarkv_dataplane.manager.shell.metrics import ManagerCollector

if TYPE_CHECKING:
    from polarkv_dataplane.manager.shell.manager import Manager

MOST_BODY_BYTES = 8 << 20
_log = logging.getLogger(__name__)


class _Server(uvicorn.Server):
    """Signals are the manager's business."""

    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        yield


@contextlib.asynccontextmanager
async def run_admin(manager: Manager, sock: socket.socket) -> AsyncIterator[None]:
    """Serve on a bound socket until the block ends."""
    config = uvicorn.Config(
        make_app(manager), lifespan="off", log_config=None, access_log=False, timeout_graceful_shutdown=1,
        limit_concurrency=128, timeout_keep_alive=15,
    )  # fmt: skip
    server = _Server(config)
    task = asyncio.create_task(server.serve(sockets=[sock]), name="http")
    try:
        while not server.started:
            if task.done():
                task.result()
                raise RuntimeError("the admin API ended before it began")
            await asyncio.sleep(0.005)
        yield
    finally:
        server.should_exit = server.force_exit = True
        done, _ = await asyncio.wait([task], timeout=1.0)
        if not done:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def make_app(manager: Manager) -> FastAPI:
    """The application of one manager."""
    app = FastAPI(
        title="PolarKV manager",
        version=version("polarkv-cluster"),
        description="Administration of a PolarKV cache. Everything under /v1 needs the admin token as a bearer token.",
        responses={401: {"model": Problem}, 404: {"model": Problem}, 409: {"model": Problem}, 422: {"model": Problem}},
    )
    registry = CollectorRegistry(auto_describe=False)
    registry.register(ManagerCollector(manager))
    started = time.monotonic()

    async def admin(authorization: str = Header(default="")) -> None:
        scheme, _, token = authorization.partition(" ")
        if scheme.lower() != "bearer" or not manager.credentials.is_admin(token.strip()):
            raise Refusal(401, "Authorization", "…", "send the admin token of the tokens file as 'Bearer TOKEN'")

    @app.exception_handler(Refusal)
    async def refused(_: Request, refusal: Refusal) -> JSONResponse:
        headers = {"WWW-Authenticate": "Bearer"} if refusal.status == 401 else None
        return JSONResponse(refusal.problem.model_dump(), refusal.status, headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        return JSONResponse(_problem(error.errors()).model_dump(), 422)

    @app.middleware("http")
    async def bounded(request: Request, call: Callable[[Request], Awaitable[Response]]) -> Response:
        length = request.headers.get("content-length", "0")
        chunked = "transfer-encoding" in request.headers
        if chunked or not length.isdigit() or int(length) > MOST_BODY_BYTES:
            fix = f"send at most {MOST_BODY_BYTES} bytes, and their number as Content-Length"
            return JSONResponse(Refusal(413, "body", f"{length[:20]} bytes", fix).problem.model_dump(), 413)
        return await call(request)

    @app.get("/healthz", tags=["health"], summary="Whether the process serves")
    async def healthz() -> Health:
        return Health(status="ok", epoch=manager.epoch, active_nodes=_active(manager))

    @app.get("/readyz", tags=["health"], summary="Whether a cache node is active, so that stores and loads can work")
    async def readyz(response: Response) -> Health:
        active = _active(manager)
        response.status_code = 200 if active else 503
        return Health(status="ok" if active else "starting", epoch=manager.epoch, active_nodes=active)

    @app.get("/metrics", tags=["health"], summary="Prometheus metrics")
    async def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    add_routes(app, manager, Depends(admin), started)
    return app


def _active(manager: Manager) -> int:
    return sum(node.serving for node in manager.ledger.nodes.values())


def _problem(errors: Sequence[Any]) -> Problem:
    first = errors[0]
    place = [str(part) for part in first["loc"] if part not in ("body", "query", "path", "header")]
    value = str(first.get("input"))
    fix = str(first["msg"]).removeprefix("Value error, ")
    shown = value if len(value) <= 100 else f"{value[:100]}…"
    return Refusal(422, ".".join(place) or "body", shown, fix).problem
