"""The protocol spoken by hand: what no well-behaved client sends, and where chunks really lie."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path

from polarkv_client.errors import PolarKVError
from polarkv_client.keys import golden_digest, join_keys
from polarkv_client.protocol import grants
from polarkv_client.protocol.grants import Extent, Grant
from polarkv_client.protocol.messages import (
    AcquireRead,
    Attach,
    Attached,
    BeginStore,
    Empty,
    Failure,
    Op,
    ReadGrants,
    ReleaseRead,
    StoreGrants,
)
from polarkv_client.protocol.wire import (
    HEAD,
    WIRE_VERSION,
    WIRE_VERSION_MIN,
    Connection,
    connect_socket,
    decode_body,
    decode_head,
)
from polarkv_client.states import ReadOutcome

CALL_S = 30.0


class RawClient:
    """One attached connection to the manager, and its answers as they are."""

    def __init__(self, connection_file: Path, golden: bytes | None = None, endpoint: str | None = None) -> None:
        known = json.loads(connection_file.read_text())
        self.connection = Connection.open(endpoint or known["endpoint"], time.monotonic() + CALL_S)
        request = Attach(
            WIRE_VERSION_MIN,
            WIRE_VERSION,
            known["token"],
            golden_digest() if golden is None else golden,
            "raw",
            "nowhere",
        )
        try:
            self.attached = self.connection.call(Op.ATTACH, request, Attached, time.monotonic() + CALL_S)
        except PolarKVError:
            self.connection.close()
            raise

    def acquire(self, keys: list[bytes], wait_ms: int = 0) -> ReadGrants:
        """Lease these keys."""
        return self.connection.call(
            Op.ACQUIRE_READ,
            AcquireRead(join_keys(keys), wait_ms),
            ReadGrants,
            time.monotonic() + CALL_S + wait_ms / 1000,
        )

    def release(self, lease: int) -> None:
        """End a lease."""
        self.connection.call(Op.RELEASE_READ, ReleaseRead(lease), Empty, time.monotonic() + CALL_S)

    def begin(self, keys: list[bytes], length_bytes: int) -> StoreGrants:
        """Take tickets for these keys."""
        return self.connection.call(
            Op.BEGIN_STORE, BeginStore(join_keys(keys), [length_bytes]), StoreGrants, time.monotonic() + CALL_S
        )

    def extent(self, key: bytes) -> tuple[Grant, Extent]:
        """Where a chunk lies in memory at the moment; nothing is held afterwards.

        Raises:
            LookupError: it is not in memory.
        """
        answer = self.acquire([key])
        if answer.outcomes[0] != ReadOutcome.GRANTED:
            raise LookupError(f"{key.hex()[:12]} is not in memory: {ReadOutcome(answer.outcomes[0]).name}")
        self.release(answer.lease)
        grant = grants.read(answer.grants[0])
        return grant, grant.extents[0]

    def close(self) -> None:
        """Hang up."""
        self.connection.close()

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def answer_to(endpoint: str, data: bytes, timeout_s: float = CALL_S, *, half_close: bool = True) -> bytes:
    """Send bytes, and all that comes back until the peer hangs up.

    Raises:
        TimeoutError: the peer neither answered all nor hung up in time.
    """
    deadline = time.monotonic() + timeout_s
    sock = connect_socket(endpoint, deadline)
    received = b""
    with sock:
        try:
            sock.sendall(data)
            if half_close:
                sock.shutdown(socket.SHUT_WR)
        except (BrokenPipeError, ConnectionResetError):
            pass  # it had heard enough
        while True:
            sock.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                part = sock.recv(65536)
            except ConnectionResetError:
                return received
            if not part:
                return received
            received += part


def failure_in(answer: bytes) -> tuple[int, str]:
    """(status, text) of the failure frame that an answer ends with."""
    at = 0
    found = (0, "")
    while at + HEAD.size <= len(answer):
        _, _, length_bytes, status = decode_head(answer[at : at + HEAD.size])
        body = answer[at + HEAD.size : at + HEAD.size + length_bytes]
        if status:
            found = (status, decode_body(body, Failure).text)
        at += HEAD.size + length_bytes
    return found
