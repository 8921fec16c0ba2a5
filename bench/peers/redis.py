"""Redis over plain sockets: pipelined SET and GET, values received straight into the caller's buffer."""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench.peers.server import Servers, port_open, prepare_namespace
from bench.subject import Batch, Subject, SubjectError

PORT = 6379
TIMEOUT_SECONDS = 60.0
CRLF = b"\r\n"


class RedisSubject(Subject):
    """One server without persistence, one connection. The server's path comes in REDIS_SERVER."""

    def __init__(self, *, unix_socket: bool) -> None:
        super().__init__()
        self._unix_socket = unix_socket
        self._binary = os.environ.get("REDIS_SERVER", "redis-server")
        self._directory = tempfile.TemporaryDirectory(prefix="polarkv-bench-redis-")
        self._servers = Servers(Path(self._directory.name))
        self._socket: socket.socket | None = None

    def start(self, region_bytes: int) -> None:
        prepare_namespace()
        path = f"{self._directory.name}/redis.sock"
        command = [
            self._binary,
            "--bind",
            "127.0.0.1",
            "--port",
            str(PORT),
            "--unixsocket",
            path,
            "--save",
            "",
            "--appendonly",
            "no",
            "--dir",
            self._directory.name,
        ]
        self._servers.start("redis", command, lambda: port_open(PORT))
        if self._unix_socket:
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.connect(path)
        else:
            self._socket = socket.create_connection(("127.0.0.1", PORT))
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.settimeout(TIMEOUT_SECONDS)
        self.allocate(region_bytes)

    def put(self, batch: Batch) -> None:
        for key, offset in zip(batch.keys, batch.offsets, strict=True):
            head = b"*3\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n" % (len(key), key.encode(), batch.value_bytes)
            self._send_all([memoryview(head), self.source.view(offset, batch.value_bytes), memoryview(CRLF)])
        self._expect(b"+OK\r\n" * len(batch.keys))

    def get(self, batch: Batch) -> None:
        self._connection.sendall(b"".join(_command(b"GET", [key]) for key in batch.keys))
        head = b"$%d\r\n" % batch.value_bytes
        for offset in batch.offsets:
            self._receive_value(head, self.target.view(offset, batch.value_bytes))

    def forget(self, keys: Sequence[str]) -> None:
        self._connection.sendall(_command(b"DEL", keys))
        self._receive_line()

    def lookup(self, keys: Sequence[str]) -> int:
        self._connection.sendall(_command(b"EXISTS", keys))
        return int(self._receive_line()[1:])

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._servers.stop()
        self._directory.cleanup()

    def describe(self) -> dict[str, str]:
        version = subprocess.run([self._binary, "--version"], capture_output=True, text=True, check=True).stdout
        transport = "Unix" if self._unix_socket else "TCP"
        return {"version": version.split()[2].removeprefix("v="), "client": f"plain {transport} socket, pipelined"}

    @property
    def _connection(self) -> socket.socket:
        assert self._socket is not None
        return self._socket

    def _send_all(self, parts: list[memoryview]) -> None:
        while parts:
            sent = self._connection.sendmsg(parts)
            parts = _advance(parts, sent)

    def _receive_value(self, head: bytes, body: memoryview) -> None:
        """The reply's length is known, so head, body and end are received in one scatter list."""
        frame = bytearray(len(head) + len(CRLF))
        parts = [memoryview(frame)[: len(head)], body, memoryview(frame)[len(head) :]]
        total = 0
        while parts:
            received = self._connection.recvmsg_into(parts)[0]
            if received == 0:
                raise SubjectError("redis closed the connection")
            total += received
            parts = _advance(parts, received)
            # A miss or an error is shorter than a value; without this look it would be waited for until the time-out.
            known = min(total, len(head))
            if frame[:known] != head[:known]:
                raise SubjectError(f"GET answered {bytes(frame)!r}")

    def _expect(self, answer: bytes) -> None:
        received = bytearray()
        while len(received) < len(answer):
            piece = self._connection.recv(len(answer) - len(received))
            if not piece:
                raise SubjectError("redis closed the connection")
            received += piece
            if not answer.startswith(received):
                raise SubjectError(f"SET answered {bytes(received)!r}")

    def _receive_line(self) -> bytes:
        line = bytearray()
        while not line.endswith(CRLF):
            piece = self._connection.recv(64)
            if not piece:
                raise SubjectError("redis closed the connection")
            line += piece
        if line[:1] != b":":
            raise SubjectError(f"redis answered {bytes(line)!r}")
        return bytes(line[:-2])


def _command(name: bytes, keys: Sequence[str]) -> bytes:
    parts = [b"*%d\r\n$%d\r\n%s\r\n" % (len(keys) + 1, len(name), name)]
    parts += [b"$%d\r\n%s\r\n" % (len(key), key.encode()) for key in keys]
    return b"".join(parts)


def _advance(parts: list[memoryview], count: int) -> list[memoryview]:
    while parts and count >= len(parts[0]):
        count -= len(parts[0])
        parts = parts[1:]
    return [parts[0][count:], *parts[1:]] if parts else []


def tcp() -> Subject:
    return RedisSubject(unix_socket=False)


def unix() -> Subject:
    return RedisSubject(unix_socket=True)
