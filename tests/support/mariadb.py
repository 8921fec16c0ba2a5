"""A private MariaDB server for tests: own data directory, Unix socket only, no durability, gone afterwards."""

from __future__ import annotations

import contextlib
import getpass
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pymysql
import pytest

from polarkv_dataplane.manager.shell.metadata import mysql
from tests.support.databases import DatabaseServer
from tests.support.postgres import unprivileged_user
from tests.support.waiting import wait_until

START_TIMEOUT_S = 60.0
_SEARCHED = "/usr/sbin:/usr/local/sbin:/usr/bin:/usr/local/bin"


def find_programs() -> tuple[Path, Path] | None:
    """Return the server and the program that makes its data directory."""
    names = ("mariadbd", "mariadb-install-db", "my_print_defaults")  # the second needs the third
    found = [shutil.which(name, path=_SEARCHED) for name in names]
    return (Path(str(found[0])), Path(str(found[1]))) if all(found) else None


def expect_programs() -> tuple[Path, Path]:
    """As :func:`find_programs`; without them the test is skipped, and says why."""
    programs = find_programs()
    if programs is None:
        pytest.skip("no MariaDB server programs: install Debian's mariadb-server-core and mariadb-client-core")
    return programs


@contextmanager
def running_server(programs: tuple[Path, Path]) -> Iterator[Path]:
    """Run a server until the block ends; yield its socket, on which the superuser is ``root``, without a password."""
    server_program, install_program = programs
    user = unprivileged_user() or getpass.getuser()
    folder = Path(tempfile.mkdtemp(prefix="polarkv-my-"))  # another user must be able to reach it
    data, socket = folder / "data", folder / "s"
    try:
        shutil.chown(folder, user)
        folder.chmod(0o755)
        install = [str(install_program), "--no-defaults", f"--datadir={data}", f"--user={user}", "--skip-test-db"]
        install += ["--auth-root-authentication-method=normal", "--force", "--skip-name-resolve"]
        subprocess.run(install, check=True, capture_output=True, timeout=60, cwd=folder)
        command = [str(server_program), "--no-defaults", f"--datadir={data}", f"--socket={socket}", f"--user={user}"]
        command += ["--skip-networking", f"--pid-file={folder}/pid", "--innodb-flush-log-at-trx-commit=0"]
        command += ["--innodb-buffer-pool-size=32M", "--skip-log-bin", "--plugin-maturity=gamma"]
        with (folder / "log").open("wb") as log:
            server = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
        try:
            wait_until(lambda: _answers(socket, server), "MariaDB to answer", START_TIMEOUT_S, 0.05)
            yield socket
        finally:
            server.kill()
            server.wait(30)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def a_server() -> Iterator[DatabaseServer]:
    """Run a server that a test may do anything to."""
    with running_server(expect_programs()) as socket:

        def end_connections() -> None:
            with contextlib.closing(_connect(socket)) as connection, connection.cursor() as cursor:
                cursor.execute("SELECT id FROM information_schema.processlist WHERE id <> CONNECTION_ID()")
                for (number,) in cursor.fetchall():
                    with contextlib.suppress(pymysql.MySQLError):  # one of the server's own threads, or gone
                        cursor.execute(f"KILL {number}")

        yield DatabaseServer(new_database(socket, "cache"), "mariadbd", end_connections)


def new_database(socket: Path, name: str) -> str:
    """Create a database and return its URL."""
    with contextlib.closing(_connect(socket)) as connection, connection.cursor() as cursor:
        cursor.execute(f"CREATE DATABASE `{name}`")
    return f"mysql://root@/{name}?unix_socket={socket}"


def _connect(socket: Path) -> Any:
    return mysql.connect({"unix_socket": str(socket), "user": "root"})


def _answers(socket: Path, server: subprocess.Popen[bytes]) -> bool:
    """Say whether the server accepts connections; raise what it logged when it has ended."""
    if server.poll() is not None:
        raise RuntimeError(f"MariaDB ended: {(socket.parent / 'log').read_text(errors='replace')[-2000:]}")
    try:
        _connect(socket).close()
    except (OSError, pymysql.MySQLError):
        return False
    return True
