"""Listening: one socket for both families of addresses, one family where the machine has no more."""

from __future__ import annotations

import socket

import pytest

from polarkv_client.errors import ConfigurationError
from polarkv_client.listening import EVERYWHERE, bind_tcp
from tests.support.families import needs_ipv6


def reaches(host: str, sock: socket.socket) -> bool:
    try:
        with socket.create_connection((host, sock.getsockname()[1]), 5):
            return True
    except ConnectionRefusedError:
        return False


@needs_ipv6
@pytest.mark.parametrize(
    ("host", "reached"),
    [(EVERYWHERE, ["127.0.0.1", "::1"]), ("0.0.0.0", ["127.0.0.1"]), ("127.0.0.1", ["127.0.0.1"]), ("::1", ["::1"])],
)
def test_everywhere_is_both_families_and_any_other_host_is_itself(host: str, reached: list[str]) -> None:
    with bind_tcp("listen", host, 0) as sock:
        sock.listen()
        assert [peer for peer in ("127.0.0.1", "::1") if reaches(peer, sock)] == reached


def test_a_machine_without_ipv6_is_listened_on_by_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    with bind_tcp("listen", EVERYWHERE, 0) as sock:
        sock.listen()
        assert sock.family == socket.AF_INET
        assert reaches("127.0.0.1", sock)


@pytest.mark.parametrize("host", ["127.0.0.1", EVERYWHERE])
def test_an_address_that_is_taken_is_named(host: str) -> None:
    with bind_tcp("listen", host, 0) as sock:
        sock.listen()
        with pytest.raises(ConfigurationError, match=r"metrics_port=.*in use: choose a free address"):
            bind_tcp("metrics_port", host, sock.getsockname()[1])


def test_a_host_that_does_not_exist_is_named() -> None:
    with pytest.raises(ConfigurationError, match=r"listen_host='203\.0\.113\.7:0'"):
        bind_tcp("listen_host", "203.0.113.7", 0)
