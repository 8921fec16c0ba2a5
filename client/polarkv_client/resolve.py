"""Host names of endpoints, resolved within a deadline: the system's resolver has none of its own."""

from __future__ import annotations

import ipaddress
import socket
import threading
import time

from polarkv_client import errors
from polarkv_client.endpoints import parse_endpoint


class Resolver:
    """Resolves one endpoint. Numeric addresses and ``unix://`` pass through; a name is looked up in a thread."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        target = parse_endpoint(endpoint)
        self._host, self._port = target.host, target.port
        self._literal = bool(target.path) or _is_address(self._host)
        self._lock = threading.Lock()
        self._running: _Lookup | None = None

    def resolve(self, deadline: float) -> str:
        """The endpoint with a numeric address.

        Raises:
            DeadlineExceeded: the resolver did not answer in time; the look-up goes on for the next caller.
            Unavailable: there is no such name.
        """
        if self._literal:
            return self._endpoint
        with self._lock:  # one look-up at a time, however many callers wait
            lookup = self._running
            if lookup is None:
                lookup = self._running = _Lookup(self._host)
        if not lookup.done.wait(max(deadline - time.monotonic(), 0)):
            raise errors.DeadlineExceeded(f"the name {self._host} was not resolved in time")
        with self._lock:
            if self._running is lookup:
                self._running = None
        if lookup.address is None:
            raise errors.Unavailable(f"the name {self._host} cannot be resolved: {lookup.error}")
        return f"tcp://[{lookup.address}]:{self._port}"


class _Lookup:
    def __init__(self, host: str) -> None:
        self.done = threading.Event()
        self.address: str | None = None
        self.error: OSError | None = None
        threading.Thread(target=self._run, args=(host,), name="polarkv-resolve", daemon=True).start()

    def _run(self, host: str) -> None:
        try:
            self.address = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
        except OSError as error:
            self.error = error
        finally:
            self.done.set()


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
