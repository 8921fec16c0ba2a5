"""Mooncake Store, over TCP and through its same-host client. Runs in the peer's own environment and network namespace:
it listens on every interface whatever it is told."""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import os
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.buffers import Region
from bench.peers.server import Servers, port_open, prepare_namespace
from bench.subject import MIB, WORKING_SET_BYTES, Batch, Subject, SubjectError

MASTER_PORT, METADATA_PORT, STORE_PORT = 50051, 8080, 50052
METADATA_URL = f"http://127.0.0.1:{METADATA_PORT}/metadata"
# Room for the working set four times over: eviction starts at 90 % and freed space returns late.
SEGMENT_BYTES = 4 * WORKING_SET_BYTES + 64 * MIB
LOCAL_BUFFER_BYTES = 64 * MIB
SETTINGS = {
    "MC_TCP_BIND_ADDRESS": "127.0.0.1",
    # A connection for each transfer otherwise.
    "MC_TCP_ENABLE_CONNECTION_POOL": "1",
    # 64 KiB by default.
    "MC_TCP_SLICE_SIZE": str(MIB),
    # The same-host daemon copies into its own segment instead of sending to itself over TCP.
    "MC_STORE_MEMCPY": "1",
    "MC_LOG_LEVEL": "ERROR",
}


class MooncakeSubject(Subject):
    """Master, one storage process that owns the memory, and a client without memory of its own."""

    def __init__(self, *, shared_memory: bool) -> None:
        super().__init__()
        self._shared_memory = shared_memory
        self._store: Any = None
        self._directory = tempfile.TemporaryDirectory(prefix="polarkv-bench-mooncake-")
        self._servers = Servers(Path(self._directory.name))

    def start(self, region_bytes: int) -> None:
        for name, value in SETTINGS.items():
            os.environ.setdefault(name, value)
        prepare_namespace()
        self._start_servers()
        # Imported after the environment is set: the library reads it when it is loaded.
        self._store = importlib.import_module("mooncake.store").MooncakeDistributedStore()
        if self._shared_memory:
            status = self._store.setup_dummy(2 * region_bytes, LOCAL_BUFFER_BYTES, f"127.0.0.1:{STORE_PORT}")
        else:
            # No segment in this process: otherwise a get would be a copy inside the client.
            status = self._store.setup(
                "127.0.0.1", METADATA_URL, 0, LOCAL_BUFFER_BYTES, "tcp", "", f"127.0.0.1:{MASTER_PORT}"
            )
        self._expect("setup", status == 0, status)
        self._set_buffers(region_bytes)

    def _start_servers(self) -> None:
        package = Path(sysconfig.get_path("purelib")) / "mooncake"
        master = [
            str(package / "mooncake_master"),
            f"-rpc_port={MASTER_PORT}",
            "-rpc_address=127.0.0.1",
            "-enable_http_metadata_server=true",
            "-http_metadata_server_host=127.0.0.1",
            f"-http_metadata_server_port={METADATA_PORT}",
            "-default_kv_lease_ttl=5000",
        ]
        self._servers.start("master", master, lambda: port_open(MASTER_PORT) and port_open(METADATA_PORT))
        storage = [
            str(package / "mooncake_client"),
            "-host=127.0.0.1",
            f"-port={STORE_PORT}",
            "-protocol=tcp",
            f"-master_server_address=127.0.0.1:{MASTER_PORT}",
            f"-metadata_server={METADATA_URL}",
            f"-global_segment_size={SEGMENT_BYTES}",
            "-threads=2",
        ]
        self._servers.start("storage", storage, lambda: port_open(STORE_PORT))

    def _set_buffers(self, region_bytes: int) -> None:
        if not self._shared_memory:
            self.allocate(region_bytes)
            for region in (self.source, self.target):
                status = self._store.register_buffer(region.address, region.size_bytes)
                self._expect("register_buffer", status == 0, status)
            return
        address = self._store.alloc_from_mem_pool(2 * region_bytes)
        self._expect("alloc_from_mem_pool", address != 0, address)
        ctypes.memset(address, 1, 2 * region_bytes)
        status = self._store.register_buffer(address, 2 * region_bytes)
        self._expect("register_buffer", status == 0, status)
        self.source = Region(address, region_bytes, "Mooncake shared pool", self._store)
        self.target = Region(address + region_bytes, region_bytes, "Mooncake shared pool", self._store)

    def put(self, batch: Batch) -> None:
        base = self.source.address
        sizes = [batch.value_bytes] * len(batch.keys)
        codes = self._store.batch_put_from(batch.keys, [base + offset for offset in batch.offsets], sizes)
        self._expect("batch_put_from", not any(codes), codes)

    def get(self, batch: Batch) -> None:
        base = self.target.address
        sizes = [batch.value_bytes] * len(batch.keys)
        codes = self._store.batch_get_into(batch.keys, [base + offset for offset in batch.offsets], sizes)
        self._expect("batch_get_into", codes == sizes, codes)

    def forget(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._store.remove(key, True)

    def lookup(self, keys: Sequence[str]) -> int:
        if len(keys) == 1:
            return int(self._store.is_exist(keys[0]))
        return sum(code == 1 for code in self._store.batch_is_exist(keys))

    def close(self) -> None:
        if self._store is not None:
            self._store.close()
        self._servers.stop()
        self._directory.cleanup()

    def describe(self) -> dict[str, str]:
        client = "setup_dummy of the storage daemon" if self._shared_memory else "setup(protocol=tcp)"
        return {
            "version": importlib.metadata.version("mooncake-transfer-engine-non-cuda"),
            "client": f"{client}, batch_put_from / batch_get_into",
            "settings": " ".join(f"{name}={os.environ[name]}" for name in SETTINGS),
        }

    @staticmethod
    def _expect(call: str, good: bool, answer: object) -> None:
        if not good:
            raise SubjectError(f"{call} answered {answer}")


def tcp() -> Subject:
    return MooncakeSubject(shared_memory=False)


def same_host() -> Subject:
    return MooncakeSubject(shared_memory=True)
