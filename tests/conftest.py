"""What every suite shares: databases and a Kubernetes API server on demand, and a look at what a run leaves behind."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.cluster.support import api_server as api_servers
from tests.support import mariadb, postgres

_databases = itertools.count()
# Workers that run side by side inherit the size of a terminal that they have not got, and tables would obey it.
for _size in ("COLUMNS", "LINES"):
    os.environ.pop(_size, None)
# A run in a shell's background ignores Ctrl-C, and so would everything that it starts, also what a test interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[tuple[Path, Path]]:
    """Run one private server for the session; yield (directory of its programs, directory of its socket)."""
    binaries = postgres.expect_binaries()
    with postgres.running_server(binaries) as socket_folder:
        yield binaries, socket_folder


@pytest.fixture
def postgres_url(postgres_server: tuple[Path, Path]) -> str:
    """Return the URL of a new, empty PostgreSQL database."""
    return postgres.new_database(*postgres_server, f"test_{next(_databases)}")


@pytest.fixture(scope="session")
def mariadb_server() -> Iterator[Path]:
    """Run one private server for the session; yield its socket."""
    with mariadb.running_server(mariadb.expect_programs()) as socket:
        yield socket


@pytest.fixture
def mariadb_url(mariadb_server: Path) -> str:
    """Return the URL of a new, empty MariaDB database."""
    return mariadb.new_database(mariadb_server, f"test_{next(_databases)}")


@pytest.fixture(scope="session")
def api_server_process() -> Iterator[api_servers.ApiServer]:
    """Run an API server for the session, alone: no controllers, no nodes. It can be stopped and started by a test.

    Where its programs are not cached the test is skipped; ``make test-cluster`` builds them first. A cluster that the
    user named by KUBECONFIG is never used for this: ``make test`` must not write to it.
    """
    if not api_servers.is_cached():
        pytest.skip("no Kubernetes API server in the cache: `make test-cluster` builds it")
    with api_servers.running() as server:
        yield server


@pytest.fixture(scope="session")
def api_server(api_server_process: api_servers.ApiServer) -> Path:
    """Return the kubeconfig of a cluster administrator of a private API server, shared by the session's tests."""
    return api_server_process.kubeconfig


def orphans() -> list[psutil.Process]:
    """Return the processes that tests started and did not end (Python's own resource tracker is not one)."""
    found = []
    for child in psutil.Process().children(recursive=True):
        try:
            if "resource_tracker" not in " ".join(child.cmdline()) and child.status() != psutil.STATUS_ZOMBIE:
                found.append(child)
        except psutil.NoSuchProcess:
            continue
    return found


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a run that leaves processes behind, and end them."""
    left = orphans()
    for child in left:
        with suppress(psutil.NoSuchProcess):  # it ends right now
            command = " ".join(child.cmdline()) or child.name()
            session.config.stash.setdefault(_LEFT, []).append(f"{child.pid} {command}")
            child.kill()
    psutil.wait_procs(left, timeout=10)
    found = session.config.stash.get(_LEFT, [])
    if hasattr(session.config, "workeroutput"):  # one of several workers: it has no exit status of its own
        session.config.workeroutput["left"] = found
    elif found and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take over what a worker found left behind."""
    node.config.stash.setdefault(_LEFT, []).extend(getattr(node, "workeroutput", {}).get("left", []))


_LEFT = pytest.StashKey[list[str]]()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Name the processes that were left behind."""
    for line in config.stash.get(_LEFT, []):
        terminalreporter.write_line(f"ERROR: a test left this process running: {line}", red=True)
