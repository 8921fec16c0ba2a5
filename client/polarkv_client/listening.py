"""Binding a TCP address, for everyone who listens: one machine may have both families of addresses, or either alone."""

from __future__ import annotations

import socket

from polarkv_client.errors import ConfigurationError

# Every address of the machine: of both families, or of IPv4 alone where there is no IPv6.
EVERYWHERE = "::"
_EVERYWHERE_IPV4 = "0.0.0.0"


def bind_tcp(field: str, host: str, port: int) -> socket.socket:
    """A bound TCP socket that does not listen yet; port 0 is any that is free.

    ``::`` takes connections of both families, whatever the system's default (``net.ipv6.bindv6only``) is; every other
    host means its own address and no more.

    Raises:
        ConfigurationError: it cannot be bound; the setting ``field`` is named.
    """
    if host == EVERYWHERE and not socket.has_dualstack_ipv6():
        host = _EVERYWHERE_IPV4
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, host != EVERYWHERE)
            sock.bind(address)
        except BaseException:
            sock.close()
            raise
    except OSError as error:
        shown = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        fix = f"{error.strerror}: choose a free address of this machine"
        raise ConfigurationError(field, shown, fix) from error
    return sock
