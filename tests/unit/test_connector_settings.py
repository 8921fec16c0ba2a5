"""The one configuration of all connectors: its three ways, and what wrong ones are answered with."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from polarkv_client.connectors.settings import ConnectorConfig, load_connector_config
from polarkv_client.errors import ConfigurationError

ENDPOINT = "unix:///run/polarkv.sock"


def test_flag_then_environment_then_file(tmp_path: Path) -> None:
    content = {"endpoint": ENDPOINT, "chunk_tokens": 1, "load_deadline_ms": 1, "lookup_deadline_ms": 1}
    (tmp_path / "connection.json").write_text(json.dumps(content))
    env = {"POLARKV_CONNECTION": str(tmp_path), "POLARKV_CHUNK_TOKENS": "2", "POLARKV_LOAD_DEADLINE_MS": "2"}
    config = load_connector_config({"chunk_tokens": 3}, env)
    assert config
    assert (config.endpoint, config.chunk_tokens) == (ENDPOINT, 3)
    assert (config.load_deadline_ms, config.lookup_deadline_ms, config.store_deadline_ms) == (2, 1, 10_000)
    by_flag = load_connector_config({"connection": str(tmp_path)}, {"POLARKV_CONNECTION": "/nowhere"})
    assert by_flag and by_flag.chunk_tokens == 1


def test_sizes_are_text_or_numbers() -> None:
    flags = {"endpoint": ENDPOINT, "local_cache_bytes": "64MiB", "store_queue_bytes": 1 << 30}
    config = load_connector_config(flags, {})
    assert config and (config.local_cache_bytes, config.store_queue_bytes) == (64 << 20, 1 << 30)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("chunk_tokens", 0), ("chunk_tokens", "many"), ("load", "later"), ("store", "perhaps"), ("endpoint", "http://x"),
        ("lookup_deadline_ms", 0), ("store_queue_bytes", "1"), ("local_cache_bytes", "lots"), ("enabled", "perhaps"),
        ("connection", 5), ("deadline_ms", -1),
    ],
)  # fmt: skip
def test_a_wrong_value_is_named_with_the_fix(field: str, value: object) -> None:
    flags: dict[str, Any] = {"endpoint": ENDPOINT, field: value}
    with pytest.raises(ConfigurationError) as caught:
        load_connector_config(flags, {})
    assert (caught.value.field, caught.value.value) == (field, value)
    assert caught.value.fix


@pytest.mark.parametrize("where", ["flag", "file"])
def test_a_slip_in_a_name_is_an_error(where: str, tmp_path: Path) -> None:
    content = {"endpoint": ENDPOINT, "chunk_token": 64}
    (tmp_path / "connection.json").write_text(json.dumps(content))
    flags = content if where == "flag" else {"connection": str(tmp_path)}
    with pytest.raises(ConfigurationError, match=r"chunk_token\b.*did you mean chunk_tokens\?"):
        load_connector_config(flags, {})


def test_what_a_newer_version_wrote_is_said_and_ignored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "connection.json").write_text(json.dumps({"endpoint": ENDPOINT, "quorum": 3}))
    with caplog.at_level(logging.WARNING):
        assert load_connector_config({"connection": str(tmp_path)}, {})
    assert "quorum is no setting of this version" in caplog.text


def test_nothing_said_about_where_the_cache_is() -> None:
    with pytest.raises(ConfigurationError, match="POLARKV_ENDPOINT"):
        load_connector_config({}, {})


def test_switched_off_needs_nothing_else() -> None:
    assert load_connector_config({"enabled": False}, {}) is None
    assert load_connector_config({}, {"POLARKV_ENABLED": "false", "POLARKV_CONNECTION": "/nowhere"}) is None
    assert load_connector_config({"enabled": True}, {"POLARKV_ENABLED": "0", "POLARKV_ENDPOINT": ENDPOINT})


def test_every_setting_says_what_it_is_and_secrets_stay_hidden() -> None:
    assert [name for name, field in ConnectorConfig.model_fields.items() if not field.description] == []
    config = load_connector_config({"endpoint": ENDPOINT, "token": "hush"}, {})
    assert "hush" not in repr(config)
    with pytest.raises(ConfigurationError) as caught:
        load_connector_config({"endpoint": ENDPOINT, "token": ["hush"]}, {})
    assert "hush" not in str(caught.value)
