"""A bounded number of connections, one thread each; nothing that a peer sends ends more than its own connection."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable

from polarkv_client.errors import ConfigurationError, PolarKVError, Refused
from polarkv_client.protocol.wire import encode_failure
from polarkv_dataplane.runtime.counters import Counters, labelled
from polarkv_dataplane.runtime.log import LimitedLogger
from polarkv_dataplane.runtime.stream import read_frame, set_send_timeout, wait_readable

BACKLOG = 256
# Threads that do nothing but tell a peer that there is no room; beyond them connections are closed without a word.
_REFUSERS = 8
_REFUSE_S = 1.0


class ConnectionServer:
    """Accepts on a listening socket and runs ``serve(sock)`` in a thread for each connection."""

    def __init__(
        self,
        listener: socket.socket,
        serve: Callable[[socket.socket], None],
        *,
        limit: int,
        name: str,
        counters: Counters,
    ) -> None:
        self._listener = listener
        self._serve = serve
        self._limit = limit
        self._name = name
        self._counters = counters
        self._limited = LimitedLogger(logging.getLogger(f"{__name__}.{name}"))
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._refusing = 0
        self._stopping = threading.Event()
        counters.gauge(f"polarkv_{name}_connections", lambda: len(self._open))
        self._thread = threading.Thread(target=self._accept, name=f"{name}-accept", daemon=True)

    def start(self) -> None:
        """Begin to accept."""
        self._thread.start()

    def stop(self) -> None:
        """Accept no more and close every connection."""
        self._stopping.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.close_all()

    def close_all(self) -> None:
        """Break every open connection; their threads notice at the next byte."""
        with self._lock:
            for sock in self._open:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while not self._stopping.is_set():
            try:
                sock, _ = self._listener.accept()
            except OSError as error:
                if self._stopping.is_set():
                    return
                # Out of descriptors, or the peer is gone already: the next one may be served.
                self._limited.warning("accept", "%s: cannot accept: %s", self._name, error)
                self._stopping.wait(0.05)
                continue
            self._begin(sock)

    def _begin(self, sock: socket.socket) -> None:
        with self._lock:
            full = len(self._open) >= self._limit
            if full:
                if self._refusing >= _REFUSERS:
                    sock.close()
                    return
                self._refusing += 1
            else:
                self._open.add(sock)
        work = self._refuse if full else self._run
        try:
            threading.Thread(target=work, args=(sock,), name=f"{self._name}-connection", daemon=True).start()
        except RuntimeError as error:  # no more threads on this machine
            self._limited.warning("thread", "%s: cannot serve a connection: %s", self._name, error)
            with self._lock:
                self._open.discard(sock)
                self._refusing -= full
            sock.close()

    def _refuse(self, sock: socket.socket) -> None:
        error = Refused(f"{self._limit} connections are open, which is this server's limit: close some, or raise it")
        self._limited.warning("full", "%s: %s", self._name, error)
        self._counters.add(labelled(f"polarkv_{self._name}_errors_total", "kind", "too_many_connections"))
        try:
            set_send_timeout(sock, _REFUSE_S)
            if wait_readable(sock, _REFUSE_S):
                frame = read_frame(sock, time.monotonic() + _REFUSE_S)
                sock.sendall(encode_failure(frame.op, frame.request_id, error))
        except (PolarKVError, EOFError, OSError):
            pass  # it is being turned away as it is
        finally:
            sock.close()
            with self._lock:
                self._refusing -= 1

    def _run(self, sock: socket.socket) -> None:
        try:
            self._serve(sock)
        except EOFError:
            pass
        except (PolarKVError, OSError) as error:
            self._note(type(error).__name__, error)
        except Exception as error:  # a fault of ours in one connection must not end the others
            self._note("internal", error)
            logging.getLogger(__name__).exception("%s: internal error", self._name)
        finally:
            with self._lock:
                self._open.discard(sock)
            sock.close()

    def _note(self, kind: str, error: BaseException) -> None:
        self._counters.add(labelled(f"polarkv_{self._name}_errors_total", "kind", kind))
        if not self._stopping.is_set():
            self._limited.warning(kind, "%s: connection closed: %s", self._name, error)


def listen_unix(path: str) -> socket.socket:
    """A listening Unix socket; one that a dead process left at ``path`` is replaced.

    Raises:
        ConfigurationError: a living process listens there, or the path cannot be bound.
    """
    probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    probe.settimeout(1.0)
    try:
        probe.connect(path)
    except (ConnectionRefusedError, FileNotFoundError):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
    except OSError as error:
        raise ConfigurationError("unix_socket", path, f"{error.strerror}: name a path for a socket") from error
    else:
        raise ConfigurationError("unix_socket", path, "another process listens there: stop it, or name another path")
    finally:
        probe.close()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(path)
        # For its group too: in a pod a cache node's servers may be two users. Who connects must show a token.
        os.chmod(path, 0o660)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigurationError(
            "unix_socket", path, f"{error.strerror}: name one in a directory that exists"
        ) from error
    return listener
