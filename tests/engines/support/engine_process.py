"""Engines in processes of their own environment, driven by one-line requests over a socket each.

Importing SGLang takes fifteen seconds of a processor, in each of an engine's three processes. So a :class:`Nursery`
imports it once, and engines, with the processes that they start, are forked from it. Nothing of an engine runs before
the fork: each has its own threads, connections and caches. This file imports nothing but the standard library, because
both sides import it.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from tests.engines.support.environments import Environment

ROOT = Path(__file__).parents[3]
# Cores for an engine. Under xdist another engine runs at the same time: each has one, lest their threads, which wait by
# spinning, wait for each other.
CORES = ["0", "1"] if "PYTEST_XDIST_WORKER" not in os.environ else [os.environ["PYTEST_XDIST_WORKER"][-1:]]
START_S = 180.0
CALL_S = 120.0
_STOP_S = 30.0
_LAST_BYTES = 6000
_LONGEST_LINE = 1000  # engines print all of their arguments in one line
_MAX_ORDER_BYTES = 1 << 16


class EngineError(AssertionError):
    """The engine did not do what it was asked; shows the end of its log."""


class EngineProcess:
    """The test's end of an engine. Everything that the engine prints is in ``log``."""

    def __init__(self, connection: socket.socket, log: Path) -> None:
        self.log = log
        self._socket = connection
        self._lines = connection.makefile("rw", encoding="utf-8", newline="\n")
        self.pid = int(self._answer("fork", START_S))  # the number of its process group, too

    def wait_started(self, timeout_s: float = START_S) -> None:
        """Wait until it serves."""
        self._answer("start", timeout_s)

    def call(self, method: str, timeout_s: float = CALL_S, **arguments: Any) -> Any:
        """Have the engine's ``method`` run; what it returned.

        Raises:
            EngineError: it raised, ended, or took longer than ``timeout_s``.
        """
        try:
            self._lines.write(json.dumps({"method": method, "arguments": arguments}) + "\n")
            self._lines.flush()
        except OSError as error:
            raise EngineError(f"{method}: {error}\n{self.end_of_log()}") from error
        return self._answer(method, timeout_s)

    def close(self) -> None:
        """End it: by its own hand when it does so in time, by SIGKILL to all that it started otherwise."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
        self._socket.settimeout(_STOP_S)
        with contextlib.suppress(OSError):
            while self._socket.recv(1024):
                continue
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(OSError):
            self._lines.close()
        self._socket.close()

    def end_of_log(self) -> str:
        """The last lines of what it printed."""
        lines = self.log.read_text(errors="replace")[-_LAST_BYTES:].splitlines()
        return "\n".join(line[:_LONGEST_LINE] for line in lines)

    def _answer(self, method: str, timeout_s: float) -> Any:
        self._socket.settimeout(timeout_s)
        try:
            line = self._lines.readline()
        except OSError as error:
            raise EngineError(f"{method}: no answer after {timeout_s} s ({error})\n{self.end_of_log()}") from error
        if not line:
            raise EngineError(f"{method}: the engine's process ended\n{self.end_of_log()}")
        answer = json.loads(line)
        if "error" in answer:
            raise EngineError(f"{method}: {answer['error']}\n{self.end_of_log()}")
        return answer["result"]


class Nursery:
    """A process that has imported an engine and starts engines.

    Args:
        module: run in ``environment``; imports the engine and calls :func:`serve_nursery`.
        paths: what it can import besides the client and the tests.
        variables: of its environment, and of all engines.
    """

    def __init__(
        self, environment: Environment, module: str, log: Path, paths: Sequence[Path] = (), **variables: str
    ) -> None:
        self.log = log
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [str(environment.python), "-m", module, str(theirs.fileno())]
        with theirs, log.open("ab") as output:
            self._process = subprocess.Popen(
                command, env=environment.variables(ROOT, *paths, **variables), stdin=subprocess.DEVNULL,
                stdout=output, stderr=subprocess.STDOUT, pass_fds=[theirs.fileno()],
            )  # fmt: skip

    @contextlib.contextmanager
    def engine(self, settings: Mapping[str, Any], log: Path, **variables: str) -> Iterator[EngineProcess]:
        """An engine that serves, until the block ends."""
        ours, theirs = socket.socketpair()
        order = json.dumps({"settings": settings, "log": str(log), "variables": variables}).encode()
        log.touch()
        with theirs:
            socket.send_fds(self._orders, [order], [theirs.fileno()])
        try:
            engine = EngineProcess(ours, log)
        except EngineError as error:
            ours.close()
            raise EngineError(f"{error}\n{self.log.read_text(errors='replace')[-_LAST_BYTES:]}") from None
        try:
            engine.wait_started()
            yield engine
        finally:
            engine.close()

    def close(self) -> None:
        """End it; engines that still run are ended by who started them."""
        self._orders.close()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(_STOP_S)


def serve_nursery(start: Callable[[dict[str, Any]], Any]) -> None:
    """Fork an engine for each order, until the other end is gone.

    ``start(settings)`` makes an engine: an object with a method for each request, and ``close``.
    """
    orders = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system reaps them
    while True:
        raw, descriptors, _, _ = socket.recv_fds(orders, _MAX_ORDER_BYTES, 1)
        if not raw:
            return
        if os.fork() == 0:
            orders.close()
            _become_engine(start, json.loads(raw), descriptors[0])
        os.close(descriptors[0])


def _become_engine(start: Callable[[dict[str, Any]], Any], order: dict[str, Any], descriptor: int) -> NoReturn:
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    log = os.open(order["log"], os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(order["variables"])
    multiprocessing.set_start_method("fork", force=True)
    # Engines ask for "spawn", by which every process would import all of it once more.
    fork = multiprocessing.get_context("fork")
    multiprocessing.set_start_method = lambda *_, **__: None
    setattr(multiprocessing, "get_context", lambda *_: fork)  # noqa: B010  (the other form is mypy's error)
    # Ranks wait for each other's messages by this. Spinning, more of them than processors, they keep all others from
    # running: Linux 6.18 was seen to run nothing else for seven seconds, neither the cache nor its own threads.
    os.sched_yield = partial(time.sleep, 0)
    try:
        _serve(start, order["settings"], socket.socket(fileno=descriptor))
    finally:
        os._exit(0)


def _serve(start: Callable[[dict[str, Any]], Any], settings: dict[str, Any], connection: socket.socket) -> None:
    lines = connection.makefile("rw", encoding="utf-8", newline="\n")

    def say(**answer: Any) -> None:
        lines.write(json.dumps(answer) + "\n")
        lines.flush()

    say(result=os.getpid())
    began = time.monotonic()
    try:
        engine = start(settings)
    except BaseException as error:
        say(error=f"{type(error).__name__}: {error}")
        raise
    say(result={"seconds": time.monotonic() - began})
    for line in lines:
        request = json.loads(line)
        try:
            result = getattr(engine, request["method"])(**request["arguments"])
        except Exception as error:
            say(error=f"{type(error).__name__}: {error}")
        else:
            say(result=result)
    engine.close()
