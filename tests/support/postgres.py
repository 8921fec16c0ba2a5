"""A private PostgreSQL server for tests: own data directory, Unix socket only, no durability, gone afterwards."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from tests.support.databases import DatabaseServer
from tests.support.waiting import wait_until

START_TIMEOUT_S = 60.0


def find_binaries() -> Path | None:
    """Return the directory of ``initdb`` and ``postgres``: the environment's, ``pg_config``'s or Debian's newest."""
    candidates = [Path(named)] if (named := os.environ.get("POLARKV_POSTGRES_BIN")) else []
    if pg_config := shutil.which("pg_config"):
        shown = subprocess.run([pg_config, "--bindir"], capture_output=True, text=True, timeout=10, check=False).stdout
        candidates.append(Path(shown.strip() or "."))
    installed = Path("/usr/lib/postgresql").glob("*/bin")
    candidates += sorted(installed, key=lambda path: float(path.parent.name), reverse=True)
    return next((path for path in candidates if (path / "initdb").exists() and (path / "postgres").exists()), None)


def unprivileged_user() -> str | None:
    """Return the user to run the server as: PostgreSQL refuses root."""
    if os.geteuid() != 0:
        return None
    known = {entry.pw_name for entry in pwd.getpwall()}
    return "postgres" if "postgres" in known else "nobody"


@contextmanager
def running_server(binaries: Path) -> Iterator[Path]:
    """Run a server until the block ends; yield the directory of its socket, in which the superuser is ``postgres``."""
    user = unprivileged_user()
    # Not pytest's tmp_path: another user must be able to reach it, and a socket's path has at most 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix="polarkv-pg-"))
    try:
        if user:
            shutil.chown(folder, user)
        folder.chmod(0o755)
        data = folder / "data"
        initdb = [str(binaries / "initdb"), "-D", str(data), "--username=postgres", "--auth=trust"]
        initdb += ["--encoding=UTF8", "--locale=C", "--no-sync"]
        subprocess.run(initdb, user=user, check=True, capture_output=True, timeout=60, cwd=folder)
        settings = {
            "listen_addresses": "",
            "unix_socket_directories": str(folder),
            "fsync": "off",
            "shared_buffers": "16MB",
            "max_connections": "50",
        }
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        with (folder / "log").open("wb") as log:
            server = subprocess.Popen(
                [binaries / "postgres", "-D", data, *options], user=user, stdout=log, stderr=log, cwd=folder
            )
        try:
            wait_until(lambda: answers(binaries, folder, server), "PostgreSQL to answer", START_TIMEOUT_S, 0.05)
            yield folder
        finally:
            # Immediate shutdown: it also ends the sessions of a test that failed.
            server.send_signal(signal.SIGQUIT)
            try:
                server.wait(30)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait(30)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def answers(binaries: Path, socket_folder: Path, server: subprocess.Popen[bytes]) -> bool:
    """Say whether the server accepts connections; raise what it logged when it has ended."""
    if server.poll() is not None:
        raise RuntimeError(f"PostgreSQL ended: {(socket_folder / 'log').read_text(errors='replace')[-2000:]}")
    command = [str(binaries / "pg_isready"), "-q", "-h", str(socket_folder), "-U", "postgres"]
    return subprocess.run(command, check=False, timeout=10).returncode == 0


def expect_binaries() -> Path:
    """As :func:`find_binaries`; without them the test is skipped, and says why."""
    binaries = find_binaries()
    if binaries is None:
        pytest.skip("no PostgreSQL server programs: install Debian's postgresql, or set POLARKV_POSTGRES_BIN")
    return binaries


@contextmanager
def a_server() -> Iterator[DatabaseServer]:
    """Run a server that a test may do anything to."""
    binaries = expect_binaries()
    with running_server(binaries) as folder:

        def end_connections() -> None:
            for process in server.processes():
                with suppress(psutil.NoSuchProcess):
                    if process.parent() != psutil.Process():
                        process.terminate()

        server = DatabaseServer(new_database(binaries, folder, "cache"), "postgres", end_connections)
        yield server


def new_database(binaries: Path, socket_folder: Path, name: str) -> str:
    """Create a database and return its URL, as asyncpg and libpq read it."""
    command = [str(binaries / "createdb"), "-h", str(socket_folder), "-U", "postgres", name]
    subprocess.run(command, check=True, capture_output=True, timeout=30)
    return f"postgresql://postgres@/{name}?host={socket_folder}"
