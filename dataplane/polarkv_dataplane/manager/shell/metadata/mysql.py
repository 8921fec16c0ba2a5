"""Metadata in MySQL or MariaDB: one connection, in one thread of its own."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

import pymysql
from pymysql.constants import CLIENT

from polarkv_client.errors import ConfigurationError, Unavailable
from polarkv_dataplane.manager.shell.metadata.store import Batch, NodeRow, Recalled, Remembered, signed
from polarkv_dataplane.manager.shell.metadata.threaded import ThreadedStore

_TIMEOUT_S = 10
_OPTIONS = ("unix_socket", "ssl_ca", "ssl_cert", "ssl_key")  # as the driver names them
_FORM = "use mysql://USER:PASSWORD@HOST:PORT/NAME, with the options " + ", ".join(_OPTIONS)
# Without a strict mode a NULL among many rows would be stored as a zero.
_SQL_MODE = "STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION"
_NAME = "VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin"
_TABLES = (
    f"CREATE TABLE IF NOT EXISTS polarkv_meta (name {_NAME} PRIMARY KEY, value BIGINT NOT NULL) ENGINE=InnoDB",
    f"CREATE TABLE IF NOT EXISTS polarkv_nodes (name {_NAME} PRIMARY KEY, number BIGINT NOT NULL,"
    " incarnation BIGINT NOT NULL) ENGINE=InnoDB",
    f"CREATE TABLE IF NOT EXISTS polarkv_tenants (name {_NAME} PRIMARY KEY, quota_bytes BIGINT NOT NULL) ENGINE=InnoDB",
    f"CREATE TABLE IF NOT EXISTS polarkv_entries (`key` VARBINARY(32) PRIMARY KEY, node {_NAME} NOT NULL,"
    " length_bytes BIGINT NOT NULL, checksum BIGINT NOT NULL, tenant BIGINT NOT NULL, recency_ms BIGINT NOT NULL,"
    " pinned_until_ms BIGINT NOT NULL, epoch BIGINT NOT NULL) ENGINE=InnoDB",
)
# VALUES() and not a row's alias: MariaDB knows only the former.
_UPSERT = """
INSERT INTO polarkv_entries (`key`, node, length_bytes, checksum, tenant, recency_ms, pinned_until_ms, epoch)
VALUES (%s, %s, %s, %s, %s, %s, %s, %s)
ON DUPLICATE KEY UPDATE node = VALUES(node), length_bytes = VALUES(length_bytes), checksum = VALUES(checksum),
    tenant = VALUES(tenant), recency_ms = GREATEST(recency_ms, VALUES(recency_ms)), epoch = VALUES(epoch)
"""
_NODES = """
INSERT INTO polarkv_nodes (name, number, incarnation) VALUES (%s, %s, %s)
ON DUPLICATE KEY UPDATE number = VALUES(number), incarnation = VALUES(incarnation)
"""
_QUOTA = """
INSERT INTO polarkv_tenants (name, quota_bytes) VALUES (%s, %s)
ON DUPLICATE KEY UPDATE quota_bytes = VALUES(quota_bytes)
"""
_EPOCH = "UPDATE polarkv_meta SET value = LAST_INSERT_ID(GREATEST(value + 1, %s)) WHERE name = 'epoch'"


class MysqlStore(ThreadedStore):
    """A server that speaks MySQL's protocol. What fails on the connection closes it; :meth:`open` makes another."""

    def __init__(self, url: str) -> None:
        """Raises ConfigurationError when the URL cannot be one of such a server."""
        self._arguments = _arguments(url)
        super().__init__("MySQL")
        self._connection: Any = None

    def _open(self) -> None:
        self._close()
        self._connection = connect(self._arguments)
        with self._connection.cursor() as cursor:
            for table in _TABLES:
                cursor.execute(table)

    def _close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(Exception):  # whatever has become of it
                connection.close()

    @property
    def _opened(self) -> Any:
        if self._connection is None or not self._connection.open:
            raise Unavailable("not connected to MySQL")
        return self._connection

    def _take_epoch(self, at_least: int) -> int:
        # Two statements, each whole by itself: in one transaction two managers could each wait for the other's lock.
        with self._opened.cursor() as cursor:
            cursor.execute("INSERT IGNORE INTO polarkv_meta (name, value) VALUES ('epoch', %s)", (at_least - 1,))
            cursor.execute(_EPOCH, (at_least,))
            cursor.execute("SELECT LAST_INSERT_ID()")
            return int(cursor.fetchone()[0])

    def _remembered(self) -> Remembered:
        with self._opened.cursor() as cursor:
            cursor.execute("SELECT value FROM polarkv_meta WHERE name = 'epoch'")
            epoch = cursor.fetchone()
            cursor.execute("SELECT name, number, incarnation FROM polarkv_nodes ORDER BY name")
            nodes = [NodeRow(*row) for row in cursor.fetchall()]
            cursor.execute("SELECT name, quota_bytes FROM polarkv_tenants")
            return Remembered(epoch[0] if epoch else 0, nodes, dict(cursor.fetchall()))

    def _write(self, batch: Batch) -> None:
        connection = self._opened
        connection.begin()
        try:
            with connection.cursor() as cursor:
                _write_entries(cursor, batch)
                cursor.executemany(_NODES, batch.nodes)
                for name, quota in batch.quotas.items():
                    if quota is None:
                        cursor.execute("DELETE FROM polarkv_tenants WHERE name = %s", (name,))
                    else:
                        cursor.execute(_QUOTA, (name, quota))
            connection.commit()
        except BaseException:
            with contextlib.suppress(pymysql.MySQLError):
                connection.rollback()
            raise

    def _look_up(self, keys: Sequence[bytes]) -> dict[bytes, Recalled]:
        if not keys:
            return {}
        query = "SELECT `key`, recency_ms, pinned_until_ms FROM polarkv_entries WHERE `key` IN %s"
        with self._opened.cursor() as cursor:
            cursor.execute(query, (list(keys),))
            return {key: Recalled(recency, pinned) for key, recency, pinned in cursor.fetchall()}

    def _prune(self, node: str, epoch: int) -> int:
        with self._opened.cursor() as cursor:
            return int(cursor.execute("DELETE FROM polarkv_entries WHERE node = %s AND epoch < %s", (node, epoch)))


def _write_entries(cursor: Any, batch: Batch) -> None:
    rows = [row._replace(checksum=signed(row.checksum)) for row in batch.entries]
    cursor.executemany(_UPSERT, [row._replace(pinned_until_ms=row.pinned_until_ms or 0) for row in rows])
    pins = [(row.pinned_until_ms, row.key) for row in rows if row.pinned_until_ms is not None]
    cursor.executemany("UPDATE polarkv_entries SET pinned_until_ms = %s WHERE `key` = %s", pins)
    if batch.gone:
        cursor.execute("DELETE FROM polarkv_entries WHERE `key` IN %s", (list(batch.gone),))


def connect(arguments: dict[str, Any]) -> Any:
    """A connection. The socket is made here, because the driver leaves its own open when nobody answers."""
    connection = pymysql.connect(
        **arguments,
        charset="utf8mb4",
        autocommit=True,
        sql_mode=_SQL_MODE,
        client_flag=CLIENT.FOUND_ROWS,
        read_timeout=_TIMEOUT_S,
        write_timeout=_TIMEOUT_S,
        defer_connect=True,
    )
    path = arguments.get("unix_socket")
    if path:
        sock = socket.socket(socket.AF_UNIX)
    else:
        sock = socket.create_connection((arguments["host"], arguments["port"]), _TIMEOUT_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    try:
        if path:
            sock.settimeout(_TIMEOUT_S)
            sock.connect(path)
        sock.settimeout(None)  # the driver sets its own for each exchange
        connection.connect(sock)
    except BaseException:
        sock.close()
        raise
    return connection


def _arguments(url: str) -> dict[str, Any]:
    """What the driver takes. Errors never quote the URL: it holds a password."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigurationError("metadata_url", "mysql://…", f"{_FORM} ({error})") from None
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    name = unquote(parts.path.removeprefix("/"))
    if unknown := sorted(options.keys() - set(_OPTIONS)):
        raise ConfigurationError("metadata_url", f"mysql://…?{unknown[0]}=…", _FORM)
    if not name or "/" in name or not (parts.hostname or "unix_socket" in options):
        raise ConfigurationError("metadata_url", "mysql://…", _FORM)
    arguments: dict[str, Any] = {**options, "database": name}
    arguments |= {"user": unquote(parts.username or ""), "password": unquote(parts.password or "")}
    if parts.hostname:
        arguments |= {"host": parts.hostname, "port": port or 3306}
    return arguments
