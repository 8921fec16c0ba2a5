"""Ports that are a test's own from before its server has bound them until after that server has gone."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager


@contextmanager
def reserved_ports(count: int) -> Iterator[list[int]]:
    """Ports of the loopback that the system gives to nobody else while the block lasts.

    Each is held by a socket that is bound and never listens: connections to it are refused, and a server that sets
    SO_REUSEADDR, as servers do, binds the port all the same. A port that is only looked for is often another's by the
    time when a server wants it: tests that run side by side open hundreds.
    """
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            each.bind(("127.0.0.1", 0))
        yield [int(each.getsockname()[1]) for each in sockets]
