"""What an endpoint looks like, for everyone who listens or connects."""

from __future__ import annotations

import ipaddress
from typing import NamedTuple

_HIGHEST_PORT = 65_535


class Endpoint(NamedTuple):
    """``path`` of a Unix socket, or ``host`` (a name or an address, without brackets) and ``port``."""

    path: str = ""
    host: str = ""
    port: int = 0


class RdmaPort(NamedTuple):
    """A device of the slab server's, and its address (IPv4 or IPv6)."""

    device: str
    address: str


class RdmaEndpoint(NamedTuple):
    """Where RDMA sessions are opened (``tcp://HOST:PORT``), and over which devices."""

    tcp: str
    ports: tuple[RdmaPort, ...]

    def __str__(self) -> str:
        ports = ",".join(f"{port.device}@{port.address}" for port in self.ports)
        return f"rdma://{self.tcp.removeprefix('tcp://')}/{ports}"


def parse_rdma_endpoint(value: str) -> RdmaEndpoint:
    """Read ``rdma://HOST:PORT/DEVICE@ADDRESS,…``.

    Raises:
        ValueError: it has another form.
    """
    scheme, _, rest = value.partition("://")
    peer, _, listed = rest.partition("/")
    if scheme != "rdma":
        raise ValueError("use rdma://HOST:PORT/DEVICE@ADDRESS,…")
    parse_endpoint(f"tcp://{peer}")
    ports = []
    for text in listed.split(","):
        device, _, address = text.partition("@")
        if not device or not address:
            raise ValueError("use rdma://HOST:PORT/DEVICE@ADDRESS,…")
        ipaddress.ip_address(address)
        ports.append(RdmaPort(device, address))
    return RdmaEndpoint(f"tcp://{peer}", tuple(ports))


def parse_endpoint(value: str, *, listening: bool = False) -> Endpoint:
    """Read ``unix:///PATH`` or ``tcp://HOST:PORT``. Who is ``listening`` may say port 0: any that is free.

    Raises:
        ValueError: it is neither; the text says what to use.
    """
    scheme, _, rest = value.partition("://")
    if scheme == "unix" and rest.startswith("/"):
        return Endpoint(path=rest)
    host, _, digits = rest.rpartition(":")
    if scheme != "tcp" or not host or not (digits.isascii() and digits.isdigit()):
        raise ValueError("use unix:///PATH or tcp://HOST:PORT")
    port, lowest = int(digits[:20]), 0 if listening else 1
    if not lowest <= port <= _HIGHEST_PORT:
        raise ValueError(f"use a port from {lowest} to {_HIGHEST_PORT}")
    return Endpoint(host=host.removeprefix("[").removesuffix("]"), port=port)
