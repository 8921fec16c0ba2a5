"""Starting and stopping a supervisor from another process: what `polarkv up`, `polarkv down` and tests share."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

from polarkv_client.errors import ConfigurationError, PolarKVError
from polarkv_dataplane.embedded.places import Places, holder_of, in_use
from polarkv_dataplane.embedded.settings import UpSettings, check_machine

_GRACE_S = 15.0
STOP_TIMEOUT_S = 6.0


class StartFailed(PolarKVError):
    """The cluster did not come up; the text holds the last log lines of what failed."""


def start_supervisor(
    settings: UpSettings, *, attached: bool, config: Path | None = None, log_level: str = "INFO"
) -> subprocess.Popen[bytes]:
    """Start a supervisor and wait until every cache node is Active.

    Attached, the cluster ends when this process does (its standard input is the sign) or when ``stdin`` is closed, and
    ``stdout`` has a line of JSON (event, text) for each server that ended; it need not be read.

    Raises:
        ConfigurationError: a setting does not fit this machine, or the directory is in use. StartFailed: anything else.
    """
    places = Places(settings.dir)
    # What can be refused at once is; the supervisor looks again once it alone has the directory.
    places.prepare(settings.nodes)
    if (holder := holder_of(places)) is not None:
        raise in_use(places, holder)
    check_machine(settings)
    order = {
        "settings": settings.model_dump(mode="json"),
        "attached": attached,
        "config": str(config.absolute()) if config else None,
        "log_level": log_level,
    }
    command = [sys.executable, "-m", "polarkv_dataplane.embedded"]
    # A session of its own: a Ctrl-C in the terminal must not reach the servers before the supervisor has decided.
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, cwd="/", env=os.environ
    )
    try:
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(order).encode() + b"\n")
            process.stdin.flush()
        answer = _read_answer(process, settings.wait_ready_seconds + _GRACE_S)
        if answer.get("state") != "ready":
            process.wait(STOP_TIMEOUT_S)
            _raise(answer, settings)
        if not attached:
            process.stdin.close()
            process.stdout.close()
    except BaseException:
        end_supervisor(process)
        raise
    return process


def _read_answer(process: subprocess.Popen[bytes], limit_s: float) -> dict[str, object]:
    assert process.stdout is not None
    deadline = time.monotonic() + limit_s
    raw = b""
    while not raw.endswith(b"\n"):
        ready, _, _ = select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return {"error": f"the supervisor did not answer within {limit_s:g} s"}
        part = os.read(process.stdout.fileno(), 65536)
        if not part:
            return {"error": "the supervisor ended without a word; see logs/supervisor.log there"}
        raw += part
    answer = json.loads(raw)
    assert isinstance(answer, dict)
    return answer


def _raise(answer: dict[str, object], settings: UpSettings) -> None:
    if answer.get("configuration"):
        raise ConfigurationError(str(answer["field"]), answer["value"], str(answer["fix"]))
    raise StartFailed(f"the cluster in {settings.dir} did not start: {answer['error']}")


def end_supervisor(process: subprocess.Popen[bytes]) -> None:
    """Stop a supervisor that this process started, and all its servers; returns when they have ended."""
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()
    if process.poll() is None:
        process.terminate()
        # It may be stopped itself.
        process.send_signal(signal.SIGCONT)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            # Its children go with it: the kernel sees to that.
            process.kill()
            process.wait(STOP_TIMEOUT_S)


def stop_directory(directory: Path) -> bool:
    """Stop the cluster of a directory, whoever started it. Returns whether one ran.

    Raises:
        PolarKVError: it is still there although it was killed.
    """
    places = Places(directory)
    holder = holder_of(places)
    if holder is None:
        return False
    try:
        process = os.pidfd_open(holder)
    except ProcessLookupError:
        return True  # it ended just now
    try:
        for number, limit_s in ((signal.SIGTERM, STOP_TIMEOUT_S), (signal.SIGKILL, 2.0)):
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(process, number)
                signal.pidfd_send_signal(process, signal.SIGCONT)
            if select.select([process], [], [], limit_s)[0]:
                return True
    finally:
        os.close(process)
    raise PolarKVError(f"process {holder} still holds {directory}")
