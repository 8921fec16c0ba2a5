"""The embedded cluster's directory: which file lies where, who may read it, and who holds it.

<dir>/lock              held (flock) by the supervisor that runs the cluster; holds its process id
<dir>/supervisor.json   what the supervisor says of itself and its children
<dir>/connection.json   how to connect: endpoint, token, admin address, admin token (mode 0600)
<dir>/secret            the cluster's secret, made at the first start (mode 0600)
<dir>/tokens.json       the manager's tokens file: tenants and admin, made at the first start (mode 0600)
<dir>/metadata.db       the manager's SQLite database
<dir>/run/*.sock        Unix sockets
<dir>/logs/*.log        one log a process
<dir>/node-N/disk       files of the disk tier of one cache node
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polarkv_client.config import CONNECTION_FILE
from polarkv_client.errors import ConfigurationError
from polarkv_dataplane.runtime.settings import check_unix_path

DEFAULT_TENANT = "default"
_TOKEN_BYTES = 24
_LOOKING_S = 0.5


@dataclass(frozen=True)
class Places:
    """Paths in a cluster's directory."""

    root: Path

    @property
    def lock(self) -> Path:
        """The lock's file."""
        return self.root / "lock"

    @property
    def state(self) -> Path:
        """The supervisor's account of itself."""
        return self.root / "supervisor.json"

    @property
    def connection(self) -> Path:
        """How to connect."""
        return self.root / CONNECTION_FILE

    @property
    def secret(self) -> Path:
        """The cluster's secret."""
        return self.root / "secret"

    @property
    def tokens(self) -> Path:
        """The manager's tokens file."""
        return self.root / "tokens.json"

    @property
    def metadata(self) -> Path:
        """The manager's SQLite database."""
        return self.root / "metadata.db"

    def socket(self, name: str) -> Path:
        """A Unix socket."""
        return self.root / "run" / f"{name}.sock"

    def log(self, name: str) -> Path:
        """A process's log."""
        return self.root / "logs" / f"{name}.log"

    def disk(self, node: int) -> Path:
        """The disk tier's files of a cache node."""
        return self.root / f"node-{node}" / "disk"

    def prepare(self, nodes: int) -> None:
        """Make the folders.

        Raises:
            ConfigurationError: they cannot be made or written, or their paths are too long for sockets.
        """
        check_unix_path("up.dir (--dir)", str(self.socket("manager-00")))
        try:
            self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
            for folder in (self.root / "run", self.root / "logs", *(self.disk(node) for node in range(nodes))):
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise ConfigurationError(
                "up.dir (--dir)", str(self.root), f"{error.strerror}: name a writable directory"
            ) from error


class Held:
    """The right to run the cluster of a directory; ends with :meth:`release` or with the process."""

    def __init__(self, places: Places) -> None:
        """Take it.

        Raises:
            ConfigurationError: a live supervisor has it.
        """
        self._descriptor = os.open(places.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        deadline = time.monotonic() + _LOOKING_S
        while True:
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                # Who only looks (holder_of) holds it for microseconds.
                holder = holder_of(places)
                if holder is None and time.monotonic() < deadline:
                    time.sleep(0.01)
                    continue
            os.close(self._descriptor)
            raise in_use(places, holder) from None
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Give it up."""
        os.close(self._descriptor)


def in_use(places: Places, holder: int | None) -> ConfigurationError:
    """What is wrong with starting a second cluster in a directory."""
    stop = f"polarkv down --dir {places.root}"
    fix = f"a cluster runs here (process {holder}): stop it with '{stop}', or use another --dir"
    return ConfigurationError("up.dir (--dir)", str(places.root), fix)


def holder_of(places: Places) -> int | None:
    """The process id of the live supervisor of a directory; None when there is none."""
    try:
        descriptor = os.open(places.lock, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        text = os.pread(descriptor, 32, 0).strip()
        return int(text) if text.isdigit() else None
    finally:
        os.close(descriptor)
    return None


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner may read, as a whole or not at all."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(text)
    fresh.rename(path)


def read_json(path: Path) -> dict[str, Any]:
    """What a JSON file holds; nothing when there is no such file or it is no object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def ensure_secrets(places: Places) -> tuple[str, str]:
    """Make the cluster's secret and tokens where there are none; return (the default tenant's token, the admin's)."""
    if not places.secret.exists():
        write_private(places.secret, secrets.token_hex(32) + "\n")
    known = read_json(places.tokens)
    tenants = dict(known.get("tenants") or {})
    if DEFAULT_TENANT not in tenants:
        tenants[DEFAULT_TENANT] = {"token": secrets.token_urlsafe(_TOKEN_BYTES), "quota_bytes": 0}
    admin_token = known.get("admin_token") or secrets.token_urlsafe(_TOKEN_BYTES)
    wanted = {"tenants": tenants, "admin_token": admin_token}
    if wanted != known:
        write_private(places.tokens, json.dumps(wanted, indent=2) + "\n")
    return str(tenants[DEFAULT_TENANT]["token"]), str(admin_token)


def choose_port(wanted: int, places: Places) -> int:
    """A port of 127.0.0.1 that is free now: the wanted one, that of last time, or any.

    Raises:
        ConfigurationError: the wanted one is taken.
    """
    if wanted:
        if not _is_free(wanted):
            raise ConfigurationError(
                "up.http_port (--http-port)", wanted, "is in use: choose another, or 0 for a free one"
            )
        return wanted
    earlier = str(read_json(places.connection).get("admin", "")).rpartition(":")[2]
    if earlier.isdigit() and _is_free(int(earlier)):
        return int(earlier)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def _is_free(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except (OSError, OverflowError):
        return False
    return True
