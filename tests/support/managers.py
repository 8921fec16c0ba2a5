"""Real managers on real sockets, and peers that speak the frame protocol to them: clients, slab and disk servers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx

from polarkv_client.keys import golden_digest, join_keys
from polarkv_client.protocol import grants
from polarkv_client.protocol.messages import (
    AcquireRead,
    Attach,
    Attached,
    BeginStore,
    CommitStore,
    DiskCommand,
    Empty,
    Heartbeat,
    HeartbeatAnswer,
    InventoryItem,
    Keys,
    Op,
    OperationDone,
    OperationResult,
    Outcomes,
    ReadGrants,
    Register,
    Registered,
    ReleaseRead,
    ReportInventory,
    StoreGrants,
)
from polarkv_client.protocol.wire import WIRE_VERSION, Connection, Frame, decode_body, encode_frame, raise_failure
from polarkv_dataplane.manager.settings import ManagerSettings
from polarkv_dataplane.manager.shell import app
from polarkv_dataplane.manager.shell.credentials import load_credentials
from polarkv_dataplane.manager.shell.metadata import make_store
from polarkv_dataplane.runtime.secrets import Secrets, derive, load
from tests.support.waiting import wait_until

T = TypeVar("T")
SECRET = b"a secret of a test cluster"
SECRETS: Secrets = derive(SECRET)
TOKEN, ADMIN_TOKEN, OTHER_TOKEN = "token-of-team-a", "token-of-the-admin", "token-of-team-b"
TIMEOUT_S = 30.0
MIB = 1 << 20
# Grants, nodes and operations outlive every pause of a busy machine between two lines of a test. Tests of how they end
# have times of their own.
LONG_MS = 30_000


def make_settings(folder: Path, **overrides: Any) -> ManagerSettings:
    """Settings of a manager whose files lie in ``folder``, on ports that the system chooses."""
    secret, tokens = folder / "secret", folder / "tokens.json"
    secret.write_bytes(SECRET)
    tenants = {"a": {"token": TOKEN}, "b": {"token": OTHER_TOKEN, "quota_bytes": 1 * MIB}}
    tokens.write_text(json.dumps({"tenants": tenants, "admin_token": ADMIN_TOKEN}), encoding="utf-8")
    values: dict[str, Any] = {
        "rpc": (f"unix://{folder}/rpc.sock", "tcp://127.0.0.1:0"), "http_port": 0, "secret_file": secret,
        "tokens_file": tokens, "heartbeat_ms": 100, "node_timeout_ms": LONG_MS, "read_lease_ms": LONG_MS,
        "write_ticket_ms": LONG_MS, "operation_timeout_ms": LONG_MS,
    }  # fmt: skip
    return ManagerSettings(**{**values, **overrides})


class Running:
    """Where a manager listens. ``pid`` is that of its process."""

    def __init__(self, addresses: dict[str, Any]) -> None:
        self.unix = next((rpc for rpc in addresses["rpc"] if rpc.startswith("unix")), "")
        self.tcp = next((rpc for rpc in addresses["rpc"] if rpc.startswith("tcp")), "")
        self.http: str = addresses["http"]
        self.epoch: int = addresses["epoch"]
        self.pid: int = addresses["pid"]


@contextmanager
def running_manager(settings: ManagerSettings) -> Iterator[Running]:
    """A manager in a thread of this process."""
    ready: queue.Queue[dict[str, Any] | BaseException] = queue.Queue()
    loops: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []
    secrets = load(settings.secret_file)

    async def serve() -> None:
        stop = asyncio.Event()
        loops.append((asyncio.get_running_loop(), stop))
        store = make_store(settings.metadata_url.get_secret_value())
        credentials = load_credentials(settings.tokens_file, secrets.node_token)
        await app.serve(settings, secrets, credentials, store, stop, ready.put)

    def run() -> None:
        try:
            with asyncio.Runner(loop_factory=app.loop_factory()) as runner:
                runner.run(serve())
        except BaseException as error:
            ready.put(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        addresses = ready.get(timeout=45)
        if isinstance(addresses, BaseException):
            raise addresses
        yield Running(addresses)
    finally:
        for loop, stop in loops:
            if not loop.is_closed():
                loop.call_soon_threadsafe(stop.set)
        thread.join(TIMEOUT_S)
        assert not thread.is_alive(), "the manager did not stop"


class ManagerProcess:
    """A manager in a process of its own, which can be killed and started again."""

    def __init__(self, settings: ManagerSettings) -> None:
        assert settings.ready_file is not None
        self.settings = settings
        self.ready_file = settings.ready_file
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> Running:
        self.ready_file.unlink(missing_ok=True)
        values = self.settings.model_dump(mode="json")
        values["metadata_url"] = self.settings.metadata_url.get_secret_value()
        code = (
            "import json, sys; from polarkv_dataplane.manager.settings import ManagerSettings as S; "
            "from polarkv_dataplane.manager.shell.app import run_manager; run_manager(S(**json.loads(sys.argv[1])))"
        )
        self.process = subprocess.Popen([sys.executable, "-c", code, json.dumps(values)], stdout=subprocess.DEVNULL)
        process = self.process
        wait_until(lambda: self.ready_file.exists() or process.poll() is not None, "the manager to be ready", 45)
        return Running(json.loads(self.ready_file.read_text(encoding="utf-8")))

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and return the exit code."""
        if self.process is None:
            return 0
        process, self.process = self.process, None
        os.kill(process.pid, number)
        return process.wait(TIMEOUT_S)

    def __enter__(self) -> ManagerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process is not None:
            self.end(signal.SIGKILL)


class Client:
    """A client's connection; methods are one call each."""

    def __init__(self, endpoint: str, token: str = TOKEN, name: str = "test", **attach: Any) -> None:
        self.connection = Connection.open(endpoint, deadline())
        values: dict[str, Any] = {
            "wire_min": 1, "wire_max": WIRE_VERSION, "token": token, "golden": golden_digest(), "client": name,
            "host_id": "host",
        }  # fmt: skip
        try:
            self.attached = self.call(Op.ATTACH, Attach(**{**values, **attach}), Attached)
        except BaseException:
            self.connection.close()
            raise

    def call(self, op: Op, request: object, answer: type[T], timeout_s: float = TIMEOUT_S) -> T:
        return self.connection.call(op, request, answer, deadline(timeout_s))

    def exists(self, *keys: bytes) -> list[int]:
        return list(self.call(Op.EXISTS, Keys(join_keys(keys)), Outcomes).outcomes)

    def match_prefix(self, *keys: bytes) -> list[int]:
        return list(self.call(Op.MATCH_PREFIX, Keys(join_keys(keys)), Outcomes).outcomes)

    def begin(self, keys: Sequence[bytes], length_bytes: int = 1000, wait_ms: int = 0) -> StoreGrants:
        return self.call(Op.BEGIN_STORE, BeginStore(join_keys(keys), [length_bytes], wait_ms), StoreGrants)

    def commit(self, ticket: int, keys: Sequence[bytes], checksum: int = 7) -> list[int]:
        request = CommitStore(ticket, join_keys(keys), [checksum] * len(keys))
        return list(self.call(Op.COMMIT_STORE, request, Outcomes).outcomes)

    def store(self, keys: Sequence[bytes], length_bytes: int = 1000) -> None:
        """Store and expect that all of it is granted and committed."""
        granted = self.begin(keys, length_bytes, wait_ms=5000)
        assert set(granted.outcomes) == {0}, granted.outcomes
        assert set(self.commit(granted.ticket, keys)) == {0}

    def acquire(self, keys: Sequence[bytes], wait_ms: int = 0) -> ReadGrants:
        return self.call(Op.ACQUIRE_READ, AcquireRead(join_keys(keys), wait_ms), ReadGrants)

    def release(self, lease: int, clean: bool = True) -> None:
        self.call(Op.RELEASE_READ, ReleaseRead(lease, clean), Empty)

    def close(self) -> None:
        self.connection.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class NodeSide:
    """One role's connection: a thread reads it, sends heartbeats, and keeps the commands that came."""

    def __init__(self, endpoint: str, register: Register) -> None:
        self.connection = Connection.open(endpoint, deadline())
        try:
            self.registered = self.connection.call(Op.REGISTER, register, Registered, deadline())
        except BaseException:
            self.connection.close()
            raise
        self.connection.sock.settimeout(None)
        self.commands: queue.Queue[Frame] = queue.Queue()
        self.closed = threading.Event()
        self.beating = True
        self.auto: OperationResult | None = None
        self.pool = register.pool
        self.counters: dict[str, float] = {"polarkv_test_total": 1.0}
        self._lock = threading.Lock()
        self._answers: dict[int, queue.Queue[Frame]] = {}
        self._next_id = 1000
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def ask(self, op: Op, request: object, answer: type[T]) -> T:
        frame = self.post(op, request).get(timeout=TIMEOUT_S)
        raise_failure(frame)
        return decode_body(frame.body, answer)

    def post(self, op: Op, request: object) -> queue.Queue[Frame]:
        """Send without waiting."""
        with self._lock:
            self._next_id += 1
            answer = self._answers[self._next_id] = queue.Queue()
            self.connection.sock.sendall(encode_frame(op, self._next_id, request))
        return answer

    def beat(self) -> HeartbeatAnswer:
        return self.ask(Op.HEARTBEAT, Heartbeat(*self.life, self.counters), HeartbeatAnswer)

    @property
    def life(self) -> tuple[int, int]:
        return self.registered.number, self.registered.incarnation

    def inventory(self, items: Sequence[InventoryItem] = (), last: bool = True) -> None:
        self.ask(Op.REPORT_INVENTORY, ReportInventory(*self.life, list(items), last), Empty)

    def command(self) -> tuple[Op, DiskCommand]:
        frame = self.commands.get(timeout=TIMEOUT_S)
        return Op(frame.op), decode_body(frame.body, DiskCommand)

    def done(self, command: DiskCommand, result: OperationResult = OperationResult.OK, moved_bytes: int = 0) -> None:
        self.ask(Op.OPERATION_DONE, self._done(command, result, moved_bytes), Empty)

    def close(self) -> None:
        self.closed.set()
        with contextlib.suppress(OSError):
            self.connection.sock.shutdown(socket.SHUT_RDWR)
        self._thread.join(TIMEOUT_S)
        self.connection.close()

    def _done(self, command: DiskCommand, result: OperationResult, moved_bytes: int) -> OperationDone:
        return OperationDone(*self.life, command.operation, result, moved_bytes, self.pool)

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # the connection ended
            raw = bytearray()
            next_beat = 0.0
            while not self.closed.is_set():
                if self.beating and time.monotonic() >= next_beat:
                    next_beat = time.monotonic() + 0.1
                    self.post(Op.HEARTBEAT, Heartbeat(*self.life, self.counters))
                frame = self._next_frame(self.connection.sock, raw)
                if frame is not None:
                    self._take(frame)
        self.closed.set()

    def _take(self, frame: Frame) -> None:
        if frame.request_id:
            self._answers.pop(frame.request_id, queue.Queue()).put(frame)
        elif self.auto is not None and frame.op in (Op.OFFLOAD, Op.LOAD, Op.PURGE):
            command = decode_body(frame.body, DiskCommand)
            if command.operation:
                self.post(Op.OPERATION_DONE, self._done(command, self.auto, command.length_bytes))
        else:
            self.commands.put(frame)

    @staticmethod
    def _next_frame(sock: socket.socket, raw: bytearray) -> Frame | None:
        """A whole frame, or None when there is none within 20 ms. Raises OSError when the connection ended."""
        while True:
            if len(raw) >= 16:
                length_bytes = int.from_bytes(raw[8:12], "little")
                if len(raw) >= 16 + length_bytes:
                    request_id = int.from_bytes(raw[4:8], "little")
                    frame = Frame(raw[3], request_id, raw[12], bytes(raw[16 : 16 + length_bytes]))
                    del raw[: 16 + length_bytes]
                    return frame
            if not select.select([sock], [], [], 0.02)[0]:
                return None
            data = sock.recv(1 << 16)
            if not data:
                raise OSError("closed")
            raw += data


class FakeNode:
    """A cache node that holds nothing: it registers, obeys, and says what it is told to say."""

    def __init__(
        self, endpoint: str, name: str = "n1", memory_bytes: int = 16 * MIB, slab_bytes: int = MIB,
        disk_bytes: int = 64 * MIB, *, auto: OperationResult | None = OperationResult.OK, incarnation: int = 0,
        fresh: bool = True, memory: Sequence[InventoryItem] = (), disk: Sequence[InventoryItem] = (), join: bool = True,
    ) -> None:  # fmt: skip
        self.endpoint, self.name = endpoint, name
        self.memory_bytes, self.slab_bytes, self.disk_bytes = memory_bytes, slab_bytes, disk_bytes
        self.slab = NodeSide(endpoint, self.register("slab", incarnation, fresh=fresh))
        self.disk: NodeSide | None = None
        if join:
            self.attach_disk(auto)
            self.slab.inventory(memory)
            self.on_disk.inventory(disk)

    @property
    def on_disk(self) -> NodeSide:
        assert self.disk is not None
        return self.disk

    def attach_disk(self, auto: OperationResult | None = None, **overrides: Any) -> NodeSide:
        incarnation = self.slab.registered.incarnation
        register = self.register("disk", overrides.pop("incarnation", incarnation), **overrides)
        self.disk = NodeSide(self.endpoint, register)
        self.disk.auto = auto
        return self.disk

    def register(self, role: str, incarnation: int, **overrides: Any) -> Register:
        values: dict[str, Any] = {
            "wire_min": 1, "wire_max": WIRE_VERSION, "token": SECRETS.node_token, "role": role, "node": self.name,
            "incarnation": incarnation, "pool": f"pool-{self.name}", "host_id": "host",
            "memory_bytes": self.memory_bytes, "slab_bytes": self.slab_bytes, "disk_bytes": self.disk_bytes,
            "tcp": "tcp://127.0.0.1:1", "fresh": True,
        }  # fmt: skip
        return Register(**{**values, **overrides})

    def close(self) -> None:
        for side in (self.slab, self.disk):
            if side is not None:
                side.close()

    def __enter__(self) -> FakeNode:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def admin(manager: Running, token: str = ADMIN_TOKEN) -> httpx.Client:
    """An HTTP client with the admin token."""
    headers = {"Authorization": f"Bearer {token}"}
    return httpx.Client(base_url=manager.http, headers=headers, timeout=TIMEOUT_S, trust_env=False)


def stats(manager: Running) -> dict[str, Any]:
    """What GET /v1/stats answers."""
    with admin(manager) as http:
        answer: dict[str, Any] = http.get("/v1/stats").raise_for_status().json()
    return answer


def deadline(timeout_s: float = TIMEOUT_S) -> float:
    return time.monotonic() + timeout_s


def key(number: int) -> bytes:
    """A key that a test can name."""
    return number.to_bytes(4, "big") * 8


def extents(signed: Sequence[bytes]) -> list[grants.Extent]:
    """Every extent of an answer's grants."""
    return [extent for grant in signed for extent in grants.read(grant).extents]
