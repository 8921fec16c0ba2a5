"""A cluster of real processes with short times, its admin API, and what must hold of it once faults are over."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import tempfile
import time
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from polarkv_client.states import Tier
from polarkv_client.sync import SyncClient
from polarkv_dataplane.embedded import Cluster
from polarkv_dataplane.embedded.places import Places
from polarkv_dataplane.runtime import secrets
from tests.local.support.oracle import Caller, Chunks
from tests.support.guest import SLOWNESS, slower
from tests.support.waiting import wait_until

# Short, so that faults and their ends fit into a test; long enough for a machine with more work than processors.
MANAGER: Mapping[str, int] = {
    "heartbeat_ms": 100,
    "node_timeout_ms": 2000,
    "read_lease_ms": 1500,
    "write_ticket_ms": 1500,
    "quarantine_ms": 300,
    "operation_timeout_ms": 3000,
}
DISK: Mapping[str, int] = {"operation_timeout_ms": 3000}
SLAB: Mapping[str, int] = {"stall_timeout_ms": 1000}
# For tests in which none of the servers dies or hangs: no pause of a busy machine makes one of them count as lost.
PATIENT: Mapping[str, Mapping[str, int]] = {
    "manager": {"node_timeout_ms": 20_000, "operation_timeout_ms": 20_000},
    "disk": {"operation_timeout_ms": 20_000},
    "slab": {"stall_timeout_ms": 10_000},
}
RECOVERY_S = 30.0  # the specification has no time for these; a test that waits this long has found something
ADMIN_S = 30.0


class World:
    """One embedded cluster under test."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.places = Places(cluster.directory)
        known = json.loads(cluster.connection.read_text())
        self._admin, self._admin_token = known["admin"], known["admin_token"]

    def client(self, transport: str = "auto", **settings: object) -> SyncClient:
        """A client with short waits between attempts."""
        settings = slower({"breaker_longest_ms": 500, "deadline_ms": 2000, **settings})
        return SyncClient.connect(self.cluster.connection, transport=transport, **settings)

    @contextlib.contextmanager
    def caller(self, chunks: Chunks, transport: str = "auto", **settings: object) -> Iterator[Caller]:
        """A client under the oracle's eyes."""
        with self.client(transport, **settings) as client:
            yield Caller(client, chunks)

    def admin(self, path: str, body: object = None, token: str | None = None) -> Any:
        """Ask the admin API; the answer's JSON (or text)."""
        place = urllib.parse.urlsplit(self._admin)
        connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=ADMIN_S * SLOWNESS)
        headers = {"Authorization": f"Bearer {token or self._admin_token}", "Content-Type": "application/json"}
        try:
            connection.request(
                "GET" if body is None else "POST", path, None if body is None else json.dumps(body), headers
            )
            answer = connection.getresponse()
            raw = answer.read()
        finally:
            connection.close()
        if answer.status != http.client.OK:
            raise OSError(f"{path}: {answer.status} {raw[:300]!r}")
        return json.loads(raw) if "json" in (answer.getheader("Content-Type") or "") else raw.decode()

    @property
    def admin_endpoint(self) -> str:
        """Where the admin API listens, as tcp://."""
        return f"tcp://{urllib.parse.urlsplit(self._admin).netloc}"

    def metric(self, name: str) -> float:
        """The sum over all labels of one metric of the manager."""
        values = [
            float(line.rpartition(" ")[2])
            for line in self.admin("/metrics").splitlines()
            if line.startswith(name) and line[len(name) : len(name) + 1] in (" ", "{")
        ]
        assert values, f"there is no metric {name}"
        return sum(values)

    def stats(self) -> dict[str, Any]:
        """The manager's account of everything."""
        answer: dict[str, Any] = self.admin("/v1/stats")
        return answer

    def nodes(self) -> list[dict[str, Any]]:
        """The cache nodes as the admin API shows them."""
        nodes: list[dict[str, Any]] = self.admin("/v1/nodes")["nodes"]
        return nodes

    def entries(self) -> Iterator[dict[str, Any]]:
        """Every entry, page by page."""
        after = ""
        while True:
            page = self.admin(f"/v1/entries?limit=10000&after={after}")
            yield from page["entries"]
            if not page["next"]:
                return
            after = page["next"]

    def file_of(self, key: bytes, node: int = 0) -> Path:
        """Where a cache node has a chunk's file."""
        name = key.hex()
        return self.places.disk(node) / "data" / name[:2] / name[2:4] / name

    def evict(self, keys: list[bytes], *, purge: bool = False) -> Any:
        """Drop memory copies (that disk has too), or all copies."""
        return self.admin("/v1/evict", {"keys": [key.hex() for key in keys], "purge": purge})

    def wait_on_disk_too(self, keys: list[bytes], within_s: float = 30.0) -> None:
        """Wait until each of these has a copy on disk beside the one in memory: no offload looks at memory later."""
        wanted = {key.hex() for key in keys}

        def copied() -> bool:
            states = [entry["state"] for entry in self.entries() if entry["key"] in wanted]
            return states == ["MemoryAndDisk"] * len(wanted)

        wait_until(copied, "the chunks to be on disk, too", within_s)

    def forget(self, keys: Sequence[bytes] | None = None) -> None:
        """Drop chunks (all, when none is named) from memory and disk, and wait until they are gone.

        What is being copied goes later.
        """
        wanted = None if keys is None else {key.hex() for key in keys}

        def gone() -> bool:
            found = [entry["key"] for entry in self.entries() if wanted is None or entry["key"] in wanted]
            if found:
                self.evict([bytes.fromhex(key) for key in found], purge=True)
            return not found

        wait_until(gone, "the chunks to be gone")

    def leave_only_on_disk(self, client: SyncClient, keys: list[bytes], within_s: float = 30.0) -> None:
        """Have chunks copied to disk, and their memory copies dropped."""

        def evicted() -> bool:
            self.evict(keys)
            return set(client.exists(keys)) == {Tier.DISK}

        wait_until(evicted, "the chunks to be on disk alone", within_s)

    def node_token(self) -> str:
        """What cache nodes show one another."""
        return secrets.load(self.places.secret).node_token

    def ready(self, within_s: float = RECOVERY_S) -> None:
        """Wait until every cache node is Active."""
        self.cluster.wait_ready(within_s * SLOWNESS)

    def kill(self, name: str) -> int:
        """SIGKILL; the supervisor starts it again. Returns the id it had."""
        return self.cluster.signal(name, signal.SIGKILL)

    def started_again(self, name: str, former: int, within_s: float = RECOVERY_S) -> None:
        """Wait until a killed process has a successor, and every cache node is Active."""
        wait_until(lambda: self.cluster.pids().get(name, former) != former, f"{name} to be started again", within_s)
        self.ready(within_s)

    @contextlib.contextmanager
    def stopped(self, name: str) -> Iterator[int]:
        """SIGSTOP for the length of the block."""
        pid = self.cluster.signal(name, signal.SIGSTOP)
        try:
            yield pid
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def running(
    nodes: int = 1, memory: str = "16MiB", disk: str = "64MiB", *, files_at: Path | None = None,
    patient: bool = False, **sections: Mapping[str, object],
) -> Iterator[World]:  # fmt: skip
    """A cluster. ``files_at``: where node 0 has its files, also those of an earlier life.

    ``patient``: :data:`PATIENT`. ``sections`` (manager, slab, disk) change single settings.
    """
    base: dict[str, Mapping[str, object]] = {"manager": MANAGER, "slab": SLAB, "disk": DISK}
    calm: Mapping[str, Mapping[str, object]] = PATIENT if patient else {}
    merged = {name: slower({**values, **calm.get(name, {}), **sections.get(name, {})}) for name, values in base.items()}
    with tempfile.TemporaryDirectory(prefix="pkv-", ignore_cleanup_errors=True) as folder:
        config = Path(folder) / "config.json"
        config.write_text(json.dumps(merged))
        directory = Path(folder) / "c"
        if files_at is not None:
            files_at.mkdir(exist_ok=True)
            Places(directory).disk(0).parent.mkdir(parents=True)
            Places(directory).disk(0).symlink_to(files_at)
        with Cluster(nodes, memory, disk, directory, config=config, wait_ready_seconds=60 * SLOWNESS) as cluster:
            world = World(cluster)
            try:
                yield world
            except BaseException:
                show_logs(cluster.logs)
                raise


def show_logs(folder: Path, last_bytes: int = 3000) -> None:
    """Print the ends of all logs: pytest shows them with the failure."""
    for log in sorted(folder.glob("*.log")):
        print(f"--- {log.name}\n{log.read_text(errors='replace')[-last_bytes:]}")


def recovers(caller: Caller, numbers: list[int], within_s: float = RECOVERY_S) -> float:
    """Wait until the same client can store these chunks and load all of them; return the seconds that took.

    The same numbers each time: a key that stays stuck is found out.
    """
    began = time.monotonic()

    def works() -> bool:
        caller.store(numbers)
        return caller.load(numbers).complete

    wait_until(works, f"store and load to work again; so far {caller.reasons}", within_s, 0.05)
    return time.monotonic() - began
