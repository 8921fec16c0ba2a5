"""Settings and tokens of a manager: what is wrong is named with its field and the fix, before anything starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from polarkv_client.errors import ConfigurationError, Unauthorized
from polarkv_dataplane.manager.records.model import Settings as CoreSettings
from polarkv_dataplane.manager.settings import ManagerSettings
from polarkv_dataplane.manager.shell.app import bind_endpoint, run_manager
from polarkv_dataplane.manager.shell.credentials import load_credentials
from polarkv_dataplane.manager.shell.metadata import make_store
from tests.support.managers import ADMIN_TOKEN, OTHER_TOKEN, SECRETS, TOKEN, make_settings

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"rpc": ()}, "rpc"),
    ({"rpc": ("localhost:80",)}, "rpc"),
    ({"rpc": ("tcp://127.0.0.1:70000",)}, "rpc"),
    ({"rpc": ("unix:///" + "x" * 200,)}, "rpc"),
    ({"http_port": 70000}, "http_port"),
    ({"metadata_url": "oracle://nowhere/x"}, "metadata_url"),
    ({"metadata_url": "sqlite://"}, "metadata_url"),
    ({"heartbeat_ms": 1000, "node_timeout_ms": 1500}, "node_timeout_ms"),
    ({"read_lease_ms": 0}, "read_lease_ms"),
    ({"disk_high_percent": 101}, "disk_high_percent"),
    ({"max_keys": "many"}, "max_keys"),
    ({"no_such_setting": 1}, "no_such_setting"),
]


@pytest.mark.parametrize(("values", "field"), WRONG, ids=[f"{field}-{n}" for n, (_, field) in enumerate(WRONG)])
def test_a_wrong_setting_is_named_with_its_fix(tmp_path: Path, values: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        make_settings(tmp_path, **values)
    assert caught.value.field == field
    assert caught.value.fix


def test_every_field_is_described_and_every_core_setting_is_one() -> None:
    assert all(field.description for field in ManagerSettings.model_fields.values())
    assert set(CoreSettings.__dataclass_fields__) <= set(ManagerSettings.model_fields)


def test_defaults_are_those_of_the_core(tmp_path: Path) -> None:
    settings = ManagerSettings(secret_file=tmp_path / "secret", tokens_file=tmp_path / "tokens.json")
    assert settings.core() == CoreSettings()


def test_a_database_address_may_hold_a_password_and_is_never_shown(tmp_path: Path) -> None:
    settings = make_settings(tmp_path, metadata_url="postgresql://user:hunter2@db/polarkv")
    assert "hunter2" not in f"{settings!r} {settings.model_dump_json()}"
    with pytest.raises(ConfigurationError) as caught:
        make_settings(tmp_path, metadata_url="oracle://user:hunter2@db/polarkv")
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("{", "tokens_file"),
        ("{}", "tokens_file"),
        (json.dumps({"tenants": {"a": {"token": "short"}}, "admin_token": ADMIN_TOKEN}), "tokens_file.tenants.a.token"),
        (json.dumps({"tenants": {}, "admin_token": "short"}), "tokens_file.admin_token"),
        (json.dumps({"tenants": {"a": {"token": TOKEN, "quota_bytes": -1}}, "admin_token": ADMIN_TOKEN}),
         "tokens_file.tenants.a.quota_bytes"),
        (json.dumps({"tenants": {"a": {"token": TOKEN}, "b": {"token": TOKEN}}, "admin_token": ADMIN_TOKEN}),
         "tokens_file.tenants.b.token"),
        (json.dumps({"tenants": {"a": {"token": ADMIN_TOKEN}}, "admin_token": ADMIN_TOKEN}), "tokens_file.admin_token"),
        (json.dumps({"tenants": {"a": {"tokn": TOKEN}}, "admin_token": ADMIN_TOKEN}), "tokens_file"),
    ],
)  # fmt: skip
def test_a_wrong_tokens_file_is_named_and_its_tokens_are_not(tmp_path: Path, content: str, named: str) -> None:
    path = tmp_path / "tokens.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigurationError) as caught:
        load_credentials(path, "node")
    assert caught.value.field == named
    assert TOKEN not in str(caught.value) and ADMIN_TOKEN not in str(caught.value)


def test_a_missing_tokens_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"tokens_file=.*nowhere.*No such file"):
        load_credentials(tmp_path / "nowhere", "node")


def test_tokens_tell_tenants_admin_and_nodes_apart(tmp_path: Path) -> None:
    credentials = load_credentials(make_settings(tmp_path).tokens_file, SECRETS.node_token)
    assert (credentials.tenant(TOKEN), credentials.tenant(OTHER_TOKEN)) == ("a", "b")
    assert credentials.is_admin(ADMIN_TOKEN) and not credentials.is_admin(TOKEN)
    credentials.check_node(SECRETS.node_token)
    for token in ("", ADMIN_TOKEN, SECRETS.node_token, TOKEN + " "):
        with pytest.raises(Unauthorized):
            credentials.tenant(token)
    with pytest.raises(Unauthorized):
        credentials.check_node(TOKEN)


def test_an_address_that_is_taken_is_named(tmp_path: Path) -> None:
    sock = bind_endpoint("tcp://127.0.0.1:0")
    sock.listen()
    port = sock.getsockname()[1]
    try:
        with pytest.raises(ConfigurationError, match=r"rpc=.*in use"):
            run_manager(make_settings(tmp_path, rpc=(f"tcp://127.0.0.1:{port}",)))
        with pytest.raises(ConfigurationError, match=r"http_port=.*in use"):
            run_manager(make_settings(tmp_path, http_port=port))
    finally:
        sock.close()


def test_a_unix_socket_in_use_is_named_and_a_stale_one_is_replaced(tmp_path: Path) -> None:
    endpoint = f"unix://{tmp_path}/rpc.sock"
    first = bind_endpoint(endpoint)
    first.listen()
    with pytest.raises(ConfigurationError, match="another process listens there"):
        bind_endpoint(endpoint)
    first.close()  # the file stays, as after a kill
    assert (tmp_path / "rpc.sock").exists()
    bind_endpoint(endpoint).close()
    with pytest.raises(ConfigurationError, match="path that can be created"):
        bind_endpoint(f"unix://{tmp_path}/no/such/folder/rpc.sock")


@pytest.mark.parametrize(
    "rest", ["db", "db/", "/cache", "db/a/b", "db:port/cache", "db/cache?ssl-mode=REQUIRED", "[::1/cache"]
)
def test_a_mysql_address_is_checked_before_anything_connects_and_never_quoted(rest: str) -> None:
    with pytest.raises(ConfigurationError, match=r"metadata_url=.*mysql://USER:PASSWORD@HOST:PORT/NAME") as caught:
        make_store(f"mysql://user:hunter2@{rest}" if not rest.startswith("/") else f"mysql://{rest}")
    assert "hunter2" not in str(caught.value)


def test_a_metadata_file_needs_its_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"metadata_url=.*a directory that is there"):
        make_store(f"sqlite://{tmp_path}/missing/metadata.db")
