"""One TCP stream over loopback between two processes, as `iperf3 --length SIZE --congestion NAME` drives it: the same
buffer is sent again and again, and what arrives is received into one buffer and dropped."""

from __future__ import annotations

import contextlib
import multiprocessing
import socket
import time
from multiprocessing.connection import Connection
from pathlib import Path

from bench.subject import SubjectError

TIMEOUT_SECONDS = 30.0
DEFAULT_BLOCK_BYTES = 128 * 1024


def _available_algorithms() -> list[str]:
    """Those that this process may choose, of cubic, reno and bbr."""
    chosen = []
    for name in ("cubic", "reno", "bbr"):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())
            chosen.append(name)
    return chosen


def _send_forever(orders: Connection) -> None:
    """The sender process: one stream for each order (port, algorithm, block_bytes, total_bytes)."""
    while True:
        order = orders.recv()
        if order is None:
            return
        port, algorithm, block_bytes, total_bytes = order
        with socket.socket() as sender:
            sender.settimeout(TIMEOUT_SECONDS)
            sender.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, algorithm.encode())
            sender.connect(("127.0.0.1", port))
            block = memoryview(bytearray(block_bytes))
            for _ in range(total_bytes // block_bytes):
                sender.sendall(block)


class TcpStream:
    """Single-stream TCP; every congestion control that this machine offers."""

    name = "TCP stream"

    def __init__(self) -> None:
        self._orders: Connection | None = None
        self._process: multiprocessing.process.BaseProcess | None = None
        self._algorithms: list[str] = []
        self._total_bytes = 0

    def start(self, total_bytes: int, directory: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._orders, child = context.Pipe()
        self._process = context.Process(target=_send_forever, args=(child,), daemon=True)
        self._process.start()
        child.close()
        self._algorithms = _available_algorithms()
        self._total_bytes = total_bytes

    def measure(self, value_bytes: int) -> dict[str, float]:
        rates = {name: self._stream(name, value_bytes) for name in self._algorithms}
        return rates | {"cubic, 128 KiB blocks": self._stream("cubic", DEFAULT_BLOCK_BYTES)}

    def _stream(self, algorithm: str, block_bytes: int) -> float:
        assert self._orders is not None
        buffer = bytearray(block_bytes)
        with socket.socket() as listener:
            listener.settimeout(TIMEOUT_SECONDS)
            listener.bind(("127.0.0.1", 0))
            listener.listen(1)
            self._orders.send((listener.getsockname()[1], algorithm, block_bytes, self._total_bytes))
            connection, _ = listener.accept()
        with connection:
            connection.settimeout(TIMEOUT_SECONDS)
            received = connection.recv_into(buffer)
            began, first = time.perf_counter(), received
            while received < self._total_bytes:
                count = connection.recv_into(buffer)
                if count == 0:
                    raise SubjectError("TCP sender ended early")
                received += count
            return (received - first) / (time.perf_counter() - began) / 1e9

    def describe(self) -> dict[str, str]:
        return {"congestion control": ", ".join(self._algorithms), "block": "the chunk size"}

    def close(self) -> None:
        if self._orders is None or self._process is None:
            return
        with contextlib.suppress(OSError):
            self._orders.send(None)
        self._process.join(TIMEOUT_SECONDS)
        self._process.kill()
