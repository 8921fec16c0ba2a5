"""A client process that stops itself (SIGSTOP) right before a chosen system call: a pause at the worst possible moment.

Orders come as JSON in ``argv[1]``. Only the call is wrapped; everything else is the product as it is.
What became of the operation goes to standard output, as one JSON object.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from polarkv_client import native
from polarkv_client.layout import unpack_header
from polarkv_client.sync import SyncClient
from polarkv_client.transport import copies
from tests.local.support.oracle import Chunks

_after = {"calls": 0}


# What can be stopped before: where it is kept, and its name there.
CALLS: dict[str, tuple[Any, str]] = {
    "preadv": (os, "preadv"),
    "pwritev": (os, "pwritev"),
    "scatter": (native.Move, "scatter"),
    "gather": (native.Move, "gather"),
    "put": (copies, "_put_mapped"),
    "sendmsg": (socket.socket, "sendmsg"),
    "recv_into": (socket.socket, "recv_into"),
    "recvmsg_into": (socket.socket, "recvmsg_into"),
}


def halting(original: Callable[..., Any], nth: int) -> Callable[..., Any]:
    """``original``, but the process stops right before its ``nth`` call (0: the one that writes a chunk's header).

    Calls from then on are counted.
    """
    lock = threading.Lock()
    count = 0

    def wrapped(*arguments: Any, **named: Any) -> Any:
        nonlocal count
        with lock:
            count += 1
            here = count == nth if nth else writes_header(arguments)
        if here:
            os.kill(os.getpid(), signal.SIGSTOP)
        result = original(*arguments, **named)
        if here or _after["calls"]:
            _after["calls"] += 1
        return result

    return wrapped


def writes_header(arguments: tuple[Any, ...]) -> bool:
    """Whether a vectored write begins with a valid header."""
    return unpack_header(arguments[1][0]) is not None


def main() -> int:
    """Run one operation."""
    orders = json.loads(sys.argv[1])
    owner, name = CALLS[orders["call"]]
    client = SyncClient.connect(
        Path(orders["connection"]),
        transport=orders["transport"],
        copy_threads=1,
        tcp_connections=1,
        shm_copies="calls" if owner is os else "auto",
    )
    setattr(owner, name, halting(getattr(owner, name), orders["nth"]))
    chunks = Chunks(orders["family"], tuple(orders["lengths"]))
    numbers, deadline_ms = orders["numbers"], orders["deadline_ms"]
    keys = chunks.keys(numbers)
    wrong = 0
    if orders["operation"] == "store":
        stored = client.store(keys, chunks.payloads(numbers), deadline_ms=deadline_ms)
        outcomes = [f"{chunk.outcome.value}: {chunk.reason.value}" for chunk in stored.chunks]
    else:
        buffers = chunks.blanks(numbers)
        loaded = client.load(keys, buffers, deadline_ms=deadline_ms)
        outcomes = [f"{'hit' if chunk.hit else 'miss'}: {chunk.reason.value}" for chunk in loaded.chunks]
        try:
            chunks.verify(numbers, buffers, loaded)
        except AssertionError:
            wrong = 1
    print(json.dumps({"outcomes": outcomes, "calls_after": _after["calls"], "wrong": wrong}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
