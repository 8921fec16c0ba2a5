"""An engine in a process of its own environment, driven by one-line requests over a socket of its own.

The module that runs there calls :func:`serve`. This file imports nothing but the standard library, because both sides
import it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.engines.support.environments import Environment

ROOT = Path(__file__).parents[3]
START_S = 180.0
CALL_S = 120.0
_STOP_S = 30.0
_LAST_BYTES = 6000
_LONGEST_LINE = 1000  # engines print all of their arguments in one line


class EngineError(AssertionError):
    """The engine did not do what it was asked; shows the end of its log."""


class EngineProcess:
    """The test's end. Everything that the engine prints is in ``log``."""

    def __init__(
        self, environment: Environment, module: str, settings: Mapping[str, Any], log: Path,
        paths: Sequence[Path] = (), **variables: str,
    ) -> None:  # fmt: skip
        self.log = log
        self._socket, theirs = socket.socketpair()
        command = [str(environment.python), "-m", module, str(theirs.fileno()), json.dumps(settings)]
        with theirs, log.open("ab") as output:
            # A session of its own: what the engine starts is ended with it.
            self._process = subprocess.Popen(
                command, env=environment.variables(ROOT, *paths, **variables), stdin=subprocess.DEVNULL,
                stdout=output, stderr=subprocess.STDOUT, pass_fds=[theirs.fileno()], start_new_session=True,
            )  # fmt: skip
        self._lines = self._socket.makefile("rw", encoding="utf-8", newline="\n")

    @property
    def pid(self) -> int:
        """The process group's number too."""
        return self._process.pid

    def wait_started(self, timeout_s: float = START_S) -> Any:
        """Wait until it serves; what it said of itself."""
        return self._answer("start", timeout_s)

    def call(self, method: str, timeout_s: float = CALL_S, **arguments: Any) -> Any:
        """Have the script's ``method`` run; what it returned.

        Raises:
            EngineError: it raised, ended, or took longer than ``timeout_s``.
        """
        try:
            self._lines.write(json.dumps({"method": method, "arguments": arguments}) + "\n")
            self._lines.flush()
        except OSError as error:
            raise EngineError(f"{method}: {error}\n{self.end_of_log()}") from error
        return self._answer(method, timeout_s)

    def kill(self) -> None:
        """SIGKILL to the engine and all that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait(_STOP_S)

    def close(self) -> None:
        """End it: by its own hand when it does so in time."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_S)
        self.kill()
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


@contextlib.contextmanager
def running(
    environment: Environment, module: str, settings: Mapping[str, Any], log: Path,
    paths: Sequence[Path] = (), **variables: str,
) -> Iterator[EngineProcess]:  # fmt: skip
    """An engine that serves, until the block ends.

    Args:
        module: run in ``environment``; calls :func:`serve`.
        paths: what it can import besides the client and the tests.
        variables: of its environment.
    """
    engine = EngineProcess(environment, module, settings, log, paths, **variables)
    try:
        engine.wait_started()
        yield engine
    finally:
        engine.close()


def serve(start: Callable[[dict[str, Any]], Any]) -> None:
    """The engine's end: make it with ``start(settings)``, then answer until the other end is gone.

    ``start`` returns an object with a method for each request. ``close`` is called at the end where there is one.
    """
    lines = socket.socket(fileno=int(sys.argv[1])).makefile("rw", encoding="utf-8", newline="\n")

    def say(**answer: Any) -> None:
        lines.write(json.dumps(answer) + "\n")
        lines.flush()

    began = time.monotonic()
    try:
        engine = start(json.loads(sys.argv[2]))
    except BaseException as error:
        say(error=f"{type(error).__name__}: {error}")
        raise
    say(result={"seconds": time.monotonic() - began})
    try:
        for line in lines:
            request = json.loads(line)
            try:
                result = getattr(engine, request["method"])(**request["arguments"])
            except Exception as error:
                say(error=f"{type(error).__name__}: {error}")
            else:
                say(result=result)
    finally:
        close = getattr(engine, "close", None)
        if close is not None:
            close()
