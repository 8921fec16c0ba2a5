"""Metadata in an SQLite file: one connection, in one thread of its own."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from polarkv_client.errors import ConfigurationError, Unavailable
from polarkv_dataplane.manager.shell.metadata.store import Batch, NodeRow, Recalled, Remembered, signed
from polarkv_dataplane.manager.shell.metadata.threaded import T, ThreadedStore

_BUSY_S = 2.0
_VARIABLES = 500  # in one statement
_TABLES = """
CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS nodes (
    name TEXT PRIMARY KEY, number INTEGER NOT NULL, incarnation INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS tenants (name TEXT PRIMARY KEY, quota_bytes INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS entries (
    key BLOB PRIMARY KEY, node TEXT NOT NULL, length_bytes INTEGER NOT NULL, checksum INTEGER NOT NULL,
    tenant INTEGER NOT NULL, recency_ms INTEGER NOT NULL, pinned_until_ms INTEGER NOT NULL, epoch INTEGER NOT NULL
) WITHOUT ROWID;
"""
_UPSERT = """
INSERT INTO entries VALUES (?1, ?2, ?3, ?4, ?5, ?6, coalesce(?7, 0), ?8)
ON CONFLICT (key) DO UPDATE SET node = ?2, length_bytes = ?3, checksum = ?4, tenant = ?5,
    recency_ms = max(recency_ms, ?6), pinned_until_ms = coalesce(?7, pinned_until_ms), epoch = ?8
"""


class SqliteStore(ThreadedStore):
    """A file in write-ahead mode."""

    def __init__(self, path: str) -> None:
        """Raises ConfigurationError when the file's directory is not there."""
        self._path = Path(path)
        if not self._path.is_absolute() or not self._path.parent.is_dir():
            fix = "use sqlite:///PATH of a file in a directory that is there"
            raise ConfigurationError("metadata_url", f"sqlite://{path}", fix)
        super().__init__(path)
        self._connection: sqlite3.Connection | None = None

    def _open(self) -> None:
        self._close()
        connection = sqlite3.connect(self._path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
        try:
            _use_wal(connection)
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.executescript(_TABLES)
        except BaseException:
            connection.close()
            raise
        self._connection = connection

    def _close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    @property
    def _opened(self) -> sqlite3.Connection:
        if self._connection is None:
            raise Unavailable(f"{self._path} is not open")
        return self._connection

    def _in_transaction(self, work: Callable[[sqlite3.Connection], T]) -> T:
        connection = self._opened
        connection.execute("BEGIN IMMEDIATE")
        try:
            result = work(connection)
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
        return result

    def _take_epoch(self, at_least: int) -> int:
        def work(connection: sqlite3.Connection) -> int:
            row = connection.execute("SELECT value FROM meta WHERE name = 'epoch'").fetchone()
            epoch = max(at_least, row[0] + 1 if row else 0)
            connection.execute("INSERT OR REPLACE INTO meta VALUES ('epoch', ?)", (epoch,))
            return epoch

        return self._in_transaction(work)

    def _remembered(self) -> Remembered:
        connection = self._opened
        epoch = connection.execute("SELECT value FROM meta WHERE name = 'epoch'").fetchone()
        rows = connection.execute("SELECT name, number, incarnation FROM nodes ORDER BY name")
        nodes = [NodeRow(*row) for row in rows]
        quotas: dict[str, int] = dict(connection.execute("SELECT name, quota_bytes FROM tenants").fetchall())
        return Remembered(epoch[0] if epoch else 0, nodes, quotas)

    def _write(self, batch: Batch) -> None:
        def work(connection: sqlite3.Connection) -> None:
            connection.executemany(_UPSERT, [row._replace(checksum=signed(row.checksum)) for row in batch.entries])
            connection.executemany("DELETE FROM entries WHERE key = ?", [(key,) for key in batch.gone])
            connection.executemany("INSERT OR REPLACE INTO nodes VALUES (?, ?, ?)", batch.nodes)
            for name, quota in batch.quotas.items():
                if quota is None:
                    connection.execute("DELETE FROM tenants WHERE name = ?", (name,))
                else:
                    connection.execute("INSERT OR REPLACE INTO tenants VALUES (?, ?)", (name, quota))

        self._in_transaction(work)

    def _look_up(self, keys: Sequence[bytes]) -> dict[bytes, Recalled]:
        found: dict[bytes, Recalled] = {}
        for at in range(0, len(keys), _VARIABLES):
            part = list(keys[at : at + _VARIABLES])
            marks = ",".join("?" * len(part))
            query = f"SELECT key, recency_ms, pinned_until_ms FROM entries WHERE key IN ({marks})"
            found.update((key, Recalled(recency, pinned)) for key, recency, pinned in self._opened.execute(query, part))
        return found

    def _prune(self, node: str, epoch: int) -> int:
        return self._opened.execute("DELETE FROM entries WHERE node = ? AND epoch < ?", (node, epoch)).rowcount


def _use_wal(connection: sqlite3.Connection) -> None:
    """Switch to the write-ahead log. SQLite does not wait here: it refuses at once while another has the file."""
    deadline = time.monotonic() + _BUSY_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(0.02)
