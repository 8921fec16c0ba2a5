"""What stands between a connector and its engine."""

from __future__ import annotations

import logging

import pytest

from polarkv_client.connectors import guard
from polarkv_client.connectors.guard import Complaints, attach, harmless
from polarkv_client.connectors.settings import ConnectorConfig


class Connector:
    @harmless(lambda: (0, False))
    def matched(self, tokens: int) -> tuple[int, bool]:
        return 100 // tokens, True


def test_what_raises_is_a_miss_and_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    guard.complaints = Complaints()
    connector = Connector()
    assert connector.matched(10) == (10, True)
    with caplog.at_level(logging.ERROR):
        assert [connector.matched(0) for _ in range(5)] == [(0, False)] * 5
    assert guard.complaints.count == 5
    assert caplog.text.count("Connector.matched: a defect became misses") == 1
    assert "ZeroDivisionError" in caplog.text


def test_it_is_said_again_after_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    complaints = Complaints(lambda: now[0])
    for now[0] in (0.0, 59.0, 60.0):
        complaints.note("lookup", ValueError("x"))
    assert caplog.text.count("lookup: a defect") == 2


def test_a_cache_that_is_not_there_is_no_error() -> None:
    operations = attach(ConnectorConfig(endpoint="unix:///nowhere/polarkv.sock", connect_timeout_ms=50))
    try:
        assert operations.status().connected is False
    finally:
        operations.close()
