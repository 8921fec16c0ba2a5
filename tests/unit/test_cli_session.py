"""Where a subcommand's client settings come from, and the longer waits of what people wait for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from polarkv_client.cli.common import Session, parse_chunk
from polarkv_client.config import ClientConfig
from polarkv_client.errors import ConfigurationError


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[ClientConfig]:
    """The settings of every client that a session is asked for."""
    found: list[ClientConfig] = []
    monkeypatch.setattr(Session, "client", lambda self, **flags: found.append(self.settings(**flags)))
    for name in ("DEADLINE_MS", "WAIT_FOR_SPACE_MS", "ENDPOINT", "CONNECTION"):
        monkeypatch.delenv(f"POLARKV_{name}", raising=False)
    return found


def session(folder: Path, file: str = "", **connection: object) -> Session:
    place = folder / "connection.json"
    place.write_text(json.dumps({"endpoint": "unix:///x.sock", **connection}))
    config = folder / "polarkv.toml"
    config.write_text(file)
    return Session(False, place, config)


def test_people_wait_longer_than_engines(tmp_path: Path, asked: list[ClientConfig]) -> None:
    session(tmp_path).patient_client()
    assert (asked[0].deadline_ms, asked[0].wait_for_space_ms) == (30_000, 10_000)


def test_longer_waits_give_way_to_whatever_is_set(
    tmp_path: Path, asked: list[ClientConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    session(tmp_path, "[client]\ndeadline_ms = 700\n").patient_client()
    session(tmp_path, deadline_ms=800).patient_client()
    monkeypatch.setenv("POLARKV_DEADLINE_MS", "900")
    session(tmp_path, "[client]\ndeadline_ms = 700\n").patient_client(transport="tcp")
    assert [config.deadline_ms for config in asked] == [700, 800, 900]
    assert {config.wait_for_space_ms for config in asked} == {10_000}
    assert asked[-1].transport == "tcp"


def test_a_batch_that_no_machine_bears_is_refused() -> None:
    assert parse_chunk("1MiB", 1024) == 1 << 20
    with pytest.raises(ConfigurationError, match="--batch=1024"):
        parse_chunk("1GiB", 1024)


@pytest.mark.parametrize("text", ["0", "1025MiB", "much"])
def test_a_chunk_of_no_possible_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="--chunk"):
        parse_chunk(text)
