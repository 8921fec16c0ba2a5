"""A TCP relay that can be told to swallow everything: what a dead switch or a full firewall looks like to a client."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from dataclasses import dataclass, field

from polarkv_client.protocol.wire import connect_socket

_PIECE_BYTES = 64 << 10


@dataclass(eq=False)
class _Half:
    """One direction of one connection."""

    source: socket.socket
    target: socket.socket
    upward: bool
    moved_bytes: int = 0


@dataclass(eq=False)
class Proxy:
    """Relays what comes to ``endpoint`` to ``upstream`` (``tcp://…`` or ``unix://…``).

    While :meth:`swallow` holds, connections are accepted and nothing is forwarded in either direction, nothing closed.
    """

    upstream: str
    host: str = "127.0.0.1"
    port: int = 0
    freeze_after_bytes: int | None = None  # once a connection has brought so many bytes to a client, nothing passes
    freeze_upward_after_bytes: int | None = None  # the same for bytes from a client
    _silent: threading.Event = field(default_factory=threading.Event)
    _closing: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._listener = socket.create_server((self.host, self.port), backlog=64)
        self.port = int(self._listener.getsockname()[1])
        self.endpoint = f"tcp://{self.host}:{self.port}"
        self.accepted = 0
        self.frozen = 0
        self._sockets: set[socket.socket] = set()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)
        self._thread.start()

    def swallow(self) -> None:
        """From now on nothing passes, on any connection, old or new."""
        self._silent.set()

    def pass_on(self) -> None:
        """Let everything pass again, what waited too, also on connections that had frozen."""
        self.freeze_after_bytes = self.freeze_upward_after_bytes = None
        self._silent.clear()

    def close(self) -> None:
        """Drop everything."""
        self._closing.set()
        self._thread.join(30)

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                for key, _ in self._selector.select(0.02):
                    if key.data is None:
                        self._accept()
                    elif not self._silent.is_set():
                        self._move(key.data)
                if self._silent.is_set():
                    self._closing.wait(0.02)  # what is readable stays so
        finally:
            self._selector.close()
            self._listener.close()
            for sock in self._sockets:
                sock.close()

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        self.accepted += 1
        self._sockets.add(client)
        try:
            server = connect_socket(self.upstream, time.monotonic() + 10.0)
        except OSError:
            self._drop(client)
            return
        self._sockets.add(server)
        for half in (_Half(client, server, True), _Half(server, client, False)):
            half.source.settimeout(1.0)
            self._selector.register(half.source, selectors.EVENT_READ, half)

    def _move(self, half: _Half) -> None:
        limit = self.freeze_upward_after_bytes if half.upward else self.freeze_after_bytes
        if limit is not None and half.moved_bytes >= limit:
            self.frozen += 1
            self._silent.set()
            return
        size_bytes = _PIECE_BYTES if limit is None else min(_PIECE_BYTES, limit - half.moved_bytes)
        try:
            data = half.source.recv(size_bytes)
            if not data:
                raise OSError("ended")
            half.target.sendall(data)
        except OSError:
            self._drop(half.source)
            self._drop(half.target)
            return
        half.moved_bytes += len(data)

    def _drop(self, sock: socket.socket) -> None:
        if sock in self._sockets:
            self._sockets.discard(sock)
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(sock)
            sock.close()
