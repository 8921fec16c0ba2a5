"""PolarKV itself: an embedded cluster of one cache node, real processes, driven through the blocking client."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.subject import MIB, WORKING_SET_BYTES, Batch, Subject, SubjectError
from polarkv_client.cli.admin_api import AdminClient
from polarkv_client.config import load_config
from polarkv_client.sync import SyncClient
from polarkv_dataplane.embedded.cluster import Cluster

DEADLINE_MS = 30_000
SETTLE_SECONDS = 60.0
POLL_SECONDS = 0.005
# Every size class holds the working set in slabs of its own until they are given back.
MEMORY_BYTES = 6 * WORKING_SET_BYTES
DISK_BYTES = 8 * WORKING_SET_BYTES
# Memory subjects do not write ahead to disk: 256 MiB a round would flow while the next subject is measured. The disk
# subject does, as a cluster does by default.
MEMORY_ONLY = "[manager]\noffload_ahead = false\n"


def _evict_all(admin: AdminClient, keys: Sequence[str], *, purge: bool) -> None:
    """Ask until it is done, within a deadline: what is being copied at the moment can go a moment later."""
    raw = _raw(keys)
    deadline = time.monotonic() + SETTLE_SECONDS
    while admin.evict(raw, purge=purge).not_now:
        if time.monotonic() > deadline:
            what = "purged" if purge else "on disk"
            raise SubjectError(f"not all of {len(keys)} keys were {what} after {SETTLE_SECONDS:.0f} s")
        time.sleep(POLL_SECONDS)


class PolarKVSubject(Subject):
    """`transport` is the client's setting. `on_disk`: a put ends when the value is on disk, a get reads it there."""

    def __init__(self, transport: str, *, on_disk: bool = False) -> None:
        super().__init__()
        self._transport = transport
        self._on_disk = on_disk
        self._cluster: Cluster | None = None
        self._client: Any = None
        self._admin: Any = None
        self._directory = Path()

    def start(self, region_bytes: int) -> None:
        parent = Path(os.environ["POLARKV_BENCH_DIRECTORY"])
        self._directory = parent / f"cluster-{self._transport}-{'disk' if self._on_disk else 'memory'}"
        self._directory.mkdir()
        config = None
        if not self._on_disk:
            config = self._directory / "bench.toml"
            config.write_text(MEMORY_ONLY)
        self._cluster = Cluster(1, MEMORY_BYTES, DISK_BYTES, self._directory / "data", config=config)
        self._cluster.start()
        self._admin = AdminClient(load_config(self._cluster.connection))
        self._client = SyncClient.connect(
            self._cluster.connection, transport=self._transport, deadline_ms=DEADLINE_MS, wait_for_space_ms=DEADLINE_MS
        )
        self.allocate(region_bytes)

    def put(self, batch: Batch) -> None:
        views = [self.source.view(offset, batch.value_bytes) for offset in batch.offsets]
        result = self._client.store(_raw(batch.keys), views)
        if result.stored != len(batch.keys):
            raise SubjectError(f"store: {next(one for one in result.chunks if one.outcome != 'stored')}")

    def finish_put(self, batches: Sequence[Batch]) -> None:
        if self._on_disk:
            _evict_all(self._admin, [key for batch in batches for key in batch.keys], purge=False)

    def get(self, batch: Batch) -> None:
        views = [self.target.view(offset, batch.value_bytes) for offset in batch.offsets]
        result = self._client.load(_raw(batch.keys), views)
        if not result.complete:
            raise SubjectError(f"load: {next(one for one in result.chunks if not one.hit)}")
        wanted = 2 if self._on_disk else 1
        if any(chunk.tier != wanted for chunk in result.chunks):
            raise SubjectError(f"load: a chunk came from tier {result.chunks[0].tier.name}")

    def forget(self, keys: Sequence[str]) -> None:
        _evict_all(self._admin, keys, purge=True)

    def native_keys(self, keys: Sequence[str]) -> list[bytes]:
        return _raw(keys)

    def lookup(self, keys: Any) -> int:
        return sum(map(bool, self._client.exists(keys)))

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
        if self._admin is not None:
            self._admin.close()
        if self._cluster is not None:
            self._cluster.stop()
            self._cluster = None
        if self._directory != Path():
            shutil.rmtree(self._directory, ignore_errors=True)

    def describe(self) -> dict[str, str]:
        nodes = self._client.status().nodes
        return {
            "version": importlib.metadata.version("polarkv-cluster"),
            "client": f"SyncClient, transport {', '.join(f'{node.transport} ({node.why})' for node in nodes)}",
            "memory": f"{MEMORY_BYTES // MIB} MiB",
        }


def _raw(keys: Sequence[str]) -> list[bytes]:
    return [bytes.fromhex(key) for key in keys]


def shm() -> Subject:
    return PolarKVSubject("shm")


def tcp() -> Subject:
    return PolarKVSubject("tcp")


def disk() -> Subject:
    return PolarKVSubject("shm", on_disk=True)
