"""One rule for endpoints, wherever one is configured."""

from __future__ import annotations

from pathlib import Path

import pytest

from polarkv_client.endpoints import Endpoint, parse_endpoint
from polarkv_client.errors import ConfigurationError
from polarkv_client.protocol.wire import connect_socket
from polarkv_dataplane.manager.shell.app import bind_endpoint
from polarkv_dataplane.runtime.settings import check_endpoint
from tests.support.managers import deadline, make_settings

WRONG = [
    "", "manager:1", "http://h:1", "unix://relative", "tcp://h", "tcp://:1", "tcp://h:", "tcp://h:x", "tcp://h:-1",
    "tcp://h:65536", "tcp://h:99999", "tcp://h:٣", "tcp://h:²", "tcp://h:" + "9" * 5000,
]  # fmt: skip


@pytest.mark.parametrize(
    ("value", "parts"),
    [
        ("unix:///run/a b.sock", Endpoint(path="/run/a b.sock")),
        ("tcp://h:65535", Endpoint(host="h", port=65535)),
        ("tcp://[::1]:1", Endpoint(host="::1", port=1)),
    ],
)
def test_the_two_forms(value: str, parts: Endpoint) -> None:
    assert parse_endpoint(value) == parts


@pytest.mark.parametrize("value", WRONG)
def test_anything_else_is_named_with_the_fix(value: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"use (unix|a port)"):
        check_endpoint("manager", value)
    with pytest.raises(ConfigurationError, match=r"use (unix|a port)"):
        connect_socket(value, deadline())
    with pytest.raises(ConfigurationError, match=r"rpc=.*use (unix|a port)"):
        make_settings(tmp_path, rpc=(value,))


def test_port_0_is_for_those_who_listen() -> None:
    bind_endpoint(check_endpoint("rpc", "tcp://127.0.0.1:0", listening=True)).close()
    with pytest.raises(ConfigurationError, match="from 1 to 65535"):
        check_endpoint("manager", "tcp://127.0.0.1:0")
