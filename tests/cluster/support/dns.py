"""The cluster's DNS, for tests: what CoreDNS would answer about Services and the pods behind headless ones, over UDP.

``python -m tests.cluster.support.dns ADDRESS KUBECONFIG``. Names outside the cluster do not exist.
"""

from __future__ import annotations

import logging
import socket
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.cluster.support.layout import DOMAIN
from tests.cluster.support.objects import Objects, connect

A, ANY = 1, 255
NO_ERROR, NO_SUCH_NAME = 0, 3
ANSWER, AUTHORITATIVE, RECURSION_DESIRED, RECURSION_AVAILABLE = 0x8000, 0x0400, 0x0100, 0x0080
TTL_S = 1
SERVICE_OF_SLICE = "kubernetes.io/service-name"


class Names:
    """Addresses by name, from the API server's Services and EndpointSlices."""

    def __init__(self, services: Objects, slices: Objects) -> None:
        self._services = services
        self._slices = slices

    def lookup(self, asked: str) -> list[str] | None:
        """Return a name's IPv4 addresses; None when there is no such name."""
        suffix = f".svc.{DOMAIN}"
        bare = asked.lower().rstrip(".")
        if not bare.endswith(suffix):
            return None
        *host, service, namespace = ["", *bare.removesuffix(suffix).split(".")][-3:]
        found = self._services.get(namespace, service)
        if found is None:
            return None
        wanted = host[0] if host else ""
        address = found["spec"].get("clusterIP", "None")
        if address != "None":
            return None if wanted else [address]
        early = found["spec"].get("publishNotReadyAddresses", False)
        addresses = [
            address for host_name, address in self._pods(namespace, service, early) if wanted in ("", host_name)
        ]
        return addresses or (None if wanted else [])

    def _pods(self, namespace: str, service: str, early: bool) -> Iterator[tuple[str, str]]:
        for each in self._slices.all():
            metadata = each["metadata"]
            if metadata["namespace"] != namespace or metadata.get("labels", {}).get(SERVICE_OF_SLICE) != service:
                continue
            for endpoint in each.get("endpoints") or []:
                if early or endpoint.get("conditions", {}).get("ready", True):
                    for address in endpoint["addresses"]:
                        yield endpoint.get("hostname", address.replace(".", "-")), address


def question(query: bytes) -> tuple[str, int, int]:
    """Return the first question's name, its type, and where the question ends."""
    labels, at = [], 12
    while length := query[at]:
        labels.append(query[at + 1 : at + 1 + length].decode("ascii"))
        at += 1 + length
    (kind,) = struct.unpack_from(">H", query, at + 1)
    return ".".join(labels), kind, at + 5


def answer(query: bytes, names: Names) -> bytes:
    """Return the reply to a query. ValueError, IndexError or struct.error when it is none."""
    name, kind, end = question(query)
    found = names.lookup(name)
    addresses = found if found and kind in (A, ANY) else []
    flags = ANSWER | AUTHORITATIVE | RECURSION_DESIRED | RECURSION_AVAILABLE
    flags |= NO_SUCH_NAME if found is None else NO_ERROR
    reply = query[:2] + struct.pack(">HHHHH", flags, 1, len(addresses), 0, 0) + query[12:end]
    for address in addresses:
        # 0xC00C points back at the question's name.
        reply += struct.pack(">HHHIH", 0xC00C, A, 1, TTL_S, 4) + socket.inet_aton(address)
    return reply


def resolves(address: str, name: str) -> bool:
    """Whether the server at an address answers, and knows a name."""
    labels = b"".join(bytes([len(label)]) + label.encode("ascii") for label in name.split("."))
    query = struct.pack(">HHHHHH", 1, RECURSION_DESIRED, 1, 0, 0, 0) + labels + struct.pack(">BHH", 0, A, 1)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        asker.settimeout(1)
        asker.sendto(query, (address, 53))
        try:
            reply = asker.recv(4096)
        except OSError:
            return False
    (answers,) = struct.unpack_from(">H", reply, 6)
    return bool(answers)


def main(address: str, kubeconfig: str) -> None:
    """Answer for ever."""
    client = connect(Path(kubeconfig))
    services = Objects(client, "/api/v1/services")
    names = Names(services, Objects(client, "/apis/discovery.k8s.io/v1/endpointslices"))
    listener = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    listener.bind((address, 53))
    while True:
        query, asker = listener.recvfrom(4096)
        try:
            listener.sendto(answer(query, names), asker)
        except (ValueError, IndexError, struct.error) as error:
            logging.warning("not a query: %r", error)


if __name__ == "__main__":
    main(*sys.argv[1:])
