"""Start and end of a manager process."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from polarkv_client.endpoints import parse_endpoint
from polarkv_client.errors import ConfigurationError
from polarkv_client.listening import bind_tcp
from polarkv_dataplane.manager.settings import ManagerSettings
from polarkv_dataplane.manager.shell.credentials import Credentials, load_credentials
from polarkv_dataplane.manager.shell.manager import Manager
from polarkv_dataplane.manager.shell.metadata import make_store
from polarkv_dataplane.manager.shell.metadata.recorder import Recorder
from polarkv_dataplane.manager.shell.metadata.store import MetadataStore, Remembered
from polarkv_dataplane.manager.shell.peer import Peer
from polarkv_dataplane.runtime.secrets import Secrets, load
from polarkv_dataplane.runtime.stopping import exit_in_time

BACKLOG = 1024
_STARTED_S = int(time.time())
_log = logging.getLogger(__name__)


def run_manager(settings: ManagerSettings) -> None:
    """Run a manager until SIGTERM or SIGINT; blocks.

    Raises:
        ConfigurationError: a setting is wrong, an address is taken, a file cannot be read.
    """
    secrets = load(settings.secret_file)
    credentials = load_credentials(settings.tokens_file, secrets.node_token)
    store = make_store(settings.metadata_url.get_secret_value())
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(serve(settings, secrets, credentials, store))


async def serve(
    settings: ManagerSettings,
    secrets: Secrets,
    credentials: Credentials,
    store: MetadataStore,
    stop: asyncio.Event | None = None,
    ready: Callable[[dict[str, Any]], None] | None = None,
) -> None:
    """A manager in the running loop, until ``stop`` (without it: a signal).

    Raises:
        ConfigurationError: an address is taken.
    """
    loop = asyncio.get_running_loop()
    by_signal = stop is None
    if stop is None:
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
    async with contextlib.AsyncExitStack() as stack:
        sockets = [bind_endpoint(endpoint) for endpoint in settings.rpc]
        for sock in sockets:
            stack.callback(_unbind, sock, sock.getsockname())
        http = _bind_tcp("http_port", settings.http_host, settings.http_port)
        stack.callback(http.close)
        epoch, remembered, connected = await recall(settings, store)
        recorder = Recorder(
            store, epoch, settings.metadata_timeout_ms, settings.metadata_queue_keys, connected=connected
        )
        stack.push_async_callback(recorder.finish)
        manager = Manager(settings, secrets, credentials, epoch, recorder, remembered)
        stack.callback(manager.close)
        for sock in sockets:
            if sock.family == socket.AF_UNIX:
                server = await loop.create_unix_server(lambda: Peer(manager), sock=sock, backlog=BACKLOG)
            else:
                server = await loop.create_server(lambda: Peer(manager), sock=sock, backlog=BACKLOG)
            stack.callback(server.close)
        from polarkv_dataplane.manager.shell.admin import run_admin

        tasks = [
            asyncio.create_task(manager.run(), name="tick"),
            asyncio.create_task(recorder.run(), name="metadata"),
        ]
        stack.push_async_callback(_cancel, tasks)
        await stack.enter_async_context(run_admin(manager, http))
        tune_interpreter()
        addresses = {
            "rpc": [_address(sock) for sock in sockets],
            "http": f"http://{_host(http)}",
            "epoch": epoch,
            "pid": os.getpid(),
        }
        _announce(settings.ready_file, addresses)
        if ready is not None:
            ready(addresses)
        await stop.wait()
        _log.info("stopping")
        if by_signal:
            exit_in_time()  # a thread may hang in a file system that does not answer


async def recall(settings: ManagerSettings, store: MetadataStore) -> tuple[int, Remembered, bool]:
    """This life's epoch, what earlier ones left, and whether the store is open.

    Without a store that answers, the epoch is the second after the process's start: an earlier life on this machine's
    clock had begun before, so that no two lives share one.
    """
    if store.keeps:
        try:
            async with asyncio.timeout(settings.metadata_timeout_ms / 1000):
                await store.open()
                remembered = await store.remembered()
                return await store.take_epoch(int(time.time())), remembered, True
        except Exception as error:  # whatever a driver raises: the store is an optimisation
            _log.warning("the metadata store does not answer (%s): starting without it", type(error).__name__)
    await asyncio.sleep(max(0.0, min(1.0, _STARTED_S + 1 - time.time())))
    return _STARTED_S + 1, Remembered(), False


def tune_interpreter() -> None:
    """Keep collections short with millions of entries: no full collection, and what is there now is never walked.

    Entries come and go by reference counts alone; the cycles that libraries make die young. The metadata store's
    thread computes too: a request that comes meanwhile should not wait for it as long as Python's default lets it.
    """
    sys.setswitchinterval(0.0005)
    gc.collect()
    gc.freeze()
    gc.set_threshold(5_000, 4, 1_000_000_000)


def bind_endpoint(endpoint: str) -> socket.socket:
    """A bound socket for an endpoint of ``rpc``.

    Raises:
        ConfigurationError: it cannot be bound.
    """
    target = parse_endpoint(endpoint, listening=True)
    if not target.path:
        return _bind_tcp("rpc", target.host, target.port)
    path = target.path
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if _answers(path):
            raise ConfigurationError("rpc", endpoint, "another process listens there: stop it or use another path")
        if Path(path).is_socket():
            Path(path).unlink()  # of a process that was killed
        sock.bind(path)
    except OSError as error:
        sock.close()
        raise ConfigurationError("rpc", endpoint, f"{error.strerror}: use a path that can be created") from error
    except ConfigurationError:
        sock.close()
        raise
    sock.setblocking(False)
    return sock


def _bind_tcp(field: str, host: str, port: int) -> socket.socket:
    sock = bind_tcp(field, host, port)
    sock.setblocking(False)  # the loop's
    return sock


def _answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1)
        try:
            probe.connect(path)
        except TimeoutError:
            return True
        except OSError:
            return False
    return True


def _unbind(sock: socket.socket, name: Any) -> None:
    if sock.family == socket.AF_UNIX:
        with contextlib.suppress(OSError):
            Path(name).unlink()
    sock.close()


def _address(sock: socket.socket) -> str:
    return f"unix://{sock.getsockname()}" if sock.family == socket.AF_UNIX else f"tcp://{_host(sock)}"


def _host(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _announce(ready_file: Path | None, addresses: dict[str, Any]) -> None:
    print(f"ready rpc={','.join(addresses['rpc'])} http={addresses['http']}", flush=True)
    if ready_file is not None:
        draft = ready_file.with_name(f"{ready_file.name}.{os.getpid()}")
        try:
            draft.write_text(json.dumps(addresses), encoding="utf-8")
            draft.replace(ready_file)
        except OSError as error:
            fix = f"{error.strerror}: use a path that can be written"
            raise ConfigurationError("ready_file", str(ready_file), fix) from error


async def _cancel(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """What makes the loop: uvloop where it is installed."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
