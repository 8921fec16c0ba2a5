"""Metadata in PostgreSQL."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import asyncpg

from polarkv_client.errors import Unavailable
from polarkv_dataplane.manager.shell.metadata.store import (
    Batch,
    MetadataStore,
    NodeRow,
    Recalled,
    Remembered,
    signed,
)

_LOCK = 0x706F6C61726B76  # of this project: two managers that start at once must not both create the tables
_TABLES = """
CREATE TABLE IF NOT EXISTS polarkv_meta (name text PRIMARY KEY, value bigint NOT NULL);
CREATE TABLE IF NOT EXISTS polarkv_nodes (name text PRIMARY KEY, number bigint NOT NULL, incarnation bigint NOT NULL);
CREATE TABLE IF NOT EXISTS polarkv_tenants (name text PRIMARY KEY, quota_bytes bigint NOT NULL);
CREATE TABLE IF NOT EXISTS polarkv_entries (
    key bytea PRIMARY KEY, node text NOT NULL, length_bytes bigint NOT NULL, checksum bigint NOT NULL,
    tenant bigint NOT NULL, recency_ms bigint NOT NULL, pinned_until_ms bigint NOT NULL, epoch bigint NOT NULL
);
"""
_UPSERT = """
INSERT INTO polarkv_entries AS old
SELECT key, node, length_bytes, checksum, tenant, recency_ms, coalesce(pinned, 0), epoch
FROM unnest($1::bytea[], $2::text[], $3::bigint[], $4::bigint[], $5::bigint[], $6::bigint[], $7::bigint[], $8::bigint[])
    AS new (key, node, length_bytes, checksum, tenant, recency_ms, pinned, epoch)
ON CONFLICT (key) DO UPDATE SET
    node = excluded.node, length_bytes = excluded.length_bytes, checksum = excluded.checksum, tenant = excluded.tenant,
    recency_ms = greatest(old.recency_ms, excluded.recency_ms), epoch = excluded.epoch
"""
_PIN = """
UPDATE polarkv_entries SET pinned_until_ms = pins.until FROM unnest($1::bytea[], $2::bigint[]) AS pins (key, until)
WHERE polarkv_entries.key = pins.key
"""
_NODES = """
INSERT INTO polarkv_nodes SELECT * FROM unnest($1::text[], $2::bigint[], $3::bigint[])
ON CONFLICT (name) DO UPDATE SET number = excluded.number, incarnation = excluded.incarnation
"""
_EPOCH = """
INSERT INTO polarkv_meta AS old VALUES ('epoch', $1)
ON CONFLICT (name) DO UPDATE SET value = greatest(old.value + 1, excluded.value) RETURNING value
"""


class PostgresStore(MetadataStore):
    """One connection; what fails on it closes it, and :meth:`open` makes another."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._connection: Any = None

    async def open(self) -> None:
        await self.close()
        connection = await asyncpg.connect(self._url, timeout=10, command_timeout=10)
        try:
            await connection.execute("SELECT pg_advisory_lock($1)", _LOCK)
            await connection.execute(_TABLES)
            await connection.execute("SELECT pg_advisory_unlock($1)", _LOCK)
        except BaseException:
            connection.terminate()
            raise
        self._connection = connection

    async def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(Exception):
                connection.terminate()

    @property
    def _opened(self) -> Any:
        if self._connection is None or self._connection.is_closed():
            raise Unavailable("not connected to PostgreSQL")
        return self._connection

    async def take_epoch(self, at_least: int) -> int:
        return int(await self._opened.fetchval(_EPOCH, at_least))

    async def remembered(self) -> Remembered:
        epoch = await self._opened.fetchval("SELECT value FROM polarkv_meta WHERE name = 'epoch'")
        nodes = await self._opened.fetch("SELECT name, number, incarnation FROM polarkv_nodes ORDER BY name")
        quotas = await self._opened.fetch("SELECT name, quota_bytes FROM polarkv_tenants")
        return Remembered(epoch or 0, [NodeRow(*row) for row in nodes], {row[0]: row[1] for row in quotas})

    async def write(self, batch: Batch) -> None:
        connection = self._opened
        async with connection.transaction():
            if batch.entries:
                rows = [row._replace(checksum=signed(row.checksum)) for row in batch.entries]
                await connection.execute(_UPSERT, *map(list, zip(*rows, strict=True)))
                pins = [(row.key, row.pinned_until_ms) for row in rows if row.pinned_until_ms is not None]
                if pins:
                    await connection.execute(_PIN, *map(list, zip(*pins, strict=True)))
            if batch.gone:
                await connection.execute("DELETE FROM polarkv_entries WHERE key = ANY($1::bytea[])", batch.gone)
            if batch.nodes:
                await connection.execute(_NODES, *map(list, zip(*batch.nodes, strict=True)))
            for name, quota in batch.quotas.items():
                await connection.execute("DELETE FROM polarkv_tenants WHERE name = $1", name)
                if quota is not None:
                    await connection.execute("INSERT INTO polarkv_tenants VALUES ($1, $2)", name, quota)

    async def look_up(self, keys: Sequence[bytes]) -> dict[bytes, Recalled]:
        query = "SELECT key, recency_ms, pinned_until_ms FROM polarkv_entries WHERE key = ANY($1::bytea[])"
        rows = await self._opened.fetch(query, list(keys))
        return {row[0]: Recalled(row[1], row[2]) for row in rows}

    async def prune(self, node: str, epoch: int) -> int:
        status = await self._opened.execute("DELETE FROM polarkv_entries WHERE node = $1 AND epoch < $2", node, epoch)
        return int(status.rpartition(" ")[2])
