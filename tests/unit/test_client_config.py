"""Where a client's settings come from, and what wrong ones are answered with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from polarkv_client.config import ClientConfig, load_config
from polarkv_client.errors import ConfigurationError

ENDPOINT = "unix:///run/polarkv.sock"


def written(folder: Path, **content: object) -> Path:
    path = folder / "connection.json"
    path.write_text(json.dumps(content))
    return path


def test_the_file_that_up_writes_is_enough(tmp_path: Path) -> None:
    content = {"endpoint": ENDPOINT, "token": "t", "admin": "http://127.0.0.1:1", "admin_token": "a", "newer": 1}
    path = written(tmp_path, **content)
    for connection in (path, str(path), tmp_path):
        config = load_config(connection, environment={})
        assert (config.endpoint, config.admin, config.deadline_ms) == (ENDPOINT, "http://127.0.0.1:1", 5000)
        assert config.token.get_secret_value() == "t"
    assert load_config(environment={"POLARKV_CONNECTION": str(tmp_path)}).endpoint == ENDPOINT


def test_precedence(tmp_path: Path) -> None:
    path = written(tmp_path, endpoint=ENDPOINT, deadline_ms=1, threads=1, batch_keys=1)
    env = {"POLARKV_DEADLINE_MS": "2", "POLARKV_THREADS": "2"}
    config = load_config(path, environment=env, threads=3)
    assert (config.deadline_ms, config.threads, config.batch_keys, config.operations) == (2, 3, 1, 16)


def test_none_means_not_given(tmp_path: Path) -> None:
    assert load_config(written(tmp_path, endpoint=ENDPOINT), environment={}, token=None).endpoint == ENDPOINT


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("endpoint", "http://x:1"), ("endpoint", "tcp://x"), ("endpoint", "unix://relative"), ("deadline_ms", 0),
        ("endpoint", "tcp://x:99999"), ("endpoint", "tcp://x:٣"), ("endpoint", "tcp://x:0"), ("endpoint", "tcp://:1"),
        ("deadline_ms", "soon"), ("transport", "rdma2"), ("threads", 0), ("inflight_bytes", 10),
    ],
)  # fmt: skip
def test_a_wrong_value_is_named(field: str, value: object) -> None:
    settings: dict[str, Any] = {"endpoint": ENDPOINT, field: value}
    with pytest.raises(ConfigurationError) as caught:
        load_config(environment={}, **settings)
    assert (caught.value.field, caught.value.value) == (field, value)
    assert caught.value.fix


def test_an_unknown_name_is_named() -> None:
    with pytest.raises(ConfigurationError, match=r"treads.*threads"):
        load_config(environment={}, endpoint=ENDPOINT, treads=3)


def test_nothing_given_says_what_to_give() -> None:
    with pytest.raises(ConfigurationError, match=r"POLARKV_ENDPOINT.*polarkv up"):
        load_config(environment={})


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="is the cluster up"):
        load_config(tmp_path / "absent", environment={})
    for text in ("{", "[]"):
        (tmp_path / "connection.json").write_text(text)
        with pytest.raises(ConfigurationError, match="JSON"):
            load_config(tmp_path, environment={})


def test_secrets_are_never_shown() -> None:
    config = load_config(environment={}, endpoint=ENDPOINT, token="hush", admin_token="hush")
    assert "hush" not in repr(config) + str(config)
    with pytest.raises(ConfigurationError) as caught:
        load_config(environment={}, endpoint=ENDPOINT, token=["hush"])
    assert "hush" not in str(caught.value)


def test_every_field_is_described() -> None:
    assert [name for name, field in ClientConfig.model_fields.items() if not field.description] == []
