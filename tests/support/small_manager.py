"""A manager for the client's tests: real frames and grants, a dictionary for a directory, scripts for faults."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from polarkv_client.errors import PolarKVError, Refused, Unauthorized
from polarkv_client.keys import golden_digest, split_keys
from polarkv_client.layout import stride_bytes
from polarkv_client.protocol import messages as m
from polarkv_client.protocol.grants import Access, Extent, Grant, sign
from polarkv_client.protocol.messages import Op
from polarkv_client.protocol.wire import Connection, Frame, decode_body, encode_failure, encode_frame
from polarkv_client.states import CommitOutcome, ReadOutcome, StoreOutcome, Tier


@dataclass
class Chunk:
    """One entry. ``ready`` is cleared while it is loading."""

    node: int
    offset_bytes: int
    length_bytes: int
    checksum: int = 0
    committed: bool = False
    tier: Tier = Tier.MEMORY
    ready: threading.Event = field(default_factory=threading.Event)


@dataclass
class Node:
    """A cache node to hand out; ``sign`` overrides what the grant says."""

    info: m.NodeInfo
    secret: bytes
    now_ms: Callable[[], int]
    used_bytes: int = 0
    changes: dict[str, int] = field(default_factory=dict)


Handler = Callable[["SmallManager", Frame], object]


class SmallManager:
    """Serves clients on a TCP port of its own. Public fields may be changed while it runs."""

    def __init__(self, nodes: list[Node] | None = None, port: int = 0) -> None:
        self.nodes = {node.info.number: node for node in nodes or []}
        self.chunks: dict[bytes, Chunk] = {}
        self.lease_ms = 5000
        self.ticket_ms = 5000
        self.epoch = 1
        self.token = ""
        self.shards = [m.Shard(0, 255)]
        self.golden = golden_digest()
        self.mute = threading.Event()  # while set, nothing is answered
        self.instead: dict[int, Handler] = {}  # by op: answers in place of the rules
        self.calls: Counter[int] = Counter()
        self.seen: list[tuple[int, object]] = []
        self._holders = itertools.count(1)
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", port))
        self.port = self._listener.getsockname()[1]
        self.endpoint = f"tcp://127.0.0.1:{self.port}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Die: every connection breaks, the port refuses."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.drop_connections()

    def drop_connections(self) -> None:
        """Break the connections that stand."""
        for sock in list(self._sockets):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def requests(self, kind: type) -> list[object]:
        """The requests of one kind that have come."""
        return [request for _, request in list(self.seen) if isinstance(request, kind)]

    def grants(self, access: Access, holder: int, picks: list[tuple[int, bytes, Chunk]], lasts_ms: int) -> list[bytes]:
        """Signed grants, one a node."""
        signed = []
        for number in dict.fromkeys(chunk.node for _, _, chunk in picks):
            node = self.nodes[number]
            extents = [
                Extent(index, key, chunk.offset_bytes, chunk.length_bytes, chunk.checksum)
                for index, key, chunk in picks
                if chunk.node == number
            ]
            fields = {
                "node": number,
                "incarnation": node.info.incarnation,
                "epoch": self.epoch,
                "holder": holder,
                "deadline_ms": node.now_ms() + lasts_ms,
                "tenant": 9,
            } | node.changes
            signed.append(sign(Grant(access=access, extents=extents, **fields), node.secret))
        return signed

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self._sockets.add(sock)
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = Connection(sock)
        try:
            while True:
                frame = connection.receive(time.monotonic() + 60)
                if self.mute.is_set():
                    continue
                self.calls[frame.op] += 1
                try:
                    answer = self._answer(frame)
                except PolarKVError as error:
                    sock.sendall(encode_failure(frame.op, frame.request_id, error))
                    continue
                if answer is None:
                    continue
                sock.sendall(encode_frame(frame.op, frame.request_id, answer))
        except (OSError, PolarKVError):
            pass
        finally:
            self._sockets.discard(sock)
            sock.close()

    def _answer(self, frame: Frame) -> object:
        if (handler := self.instead.get(frame.op)) is not None:
            return handler(self, frame)
        return self.rules(frame)

    def rules(self, frame: Frame) -> object:
        """What a manager answers, without a script."""
        kind, rule = _RULES[frame.op]
        request: object = decode_body(frame.body, kind)
        answer = rule(self, request)
        self.seen.append((frame.op, request))  # once it has been done: who waits for it looks at what it did
        return answer

    def attach(self, request: m.Attach) -> m.Attached:
        if request.token != self.token:
            raise Unauthorized("the token is wrong")
        return m.Attached(
            1, self.epoch, 1, "default", 9, self.golden, self.shards, [node.info for node in self.nodes.values()],
            self.lease_ms, self.ticket_ms, 1 << 30,
        )  # fmt: skip

    def begin_store(self, request: m.BeginStore) -> m.StoreGrants:
        keys = split_keys(request.keys)
        lengths = request.lengths * len(keys) if len(request.lengths) == 1 else request.lengths
        outcomes = bytearray()
        picks = []
        with self._lock:
            for index, (key, length_bytes) in enumerate(zip(keys, lengths, strict=True)):
                if key in self.chunks:
                    known = self.chunks[key].committed
                    outcomes.append(StoreOutcome.EXISTS if known else StoreOutcome.IN_PROGRESS)
                    continue
                node = self.nodes[sorted(self.nodes)[index % len(self.nodes)]]
                chunk = self.chunks[key] = Chunk(node.info.number, node.used_bytes, length_bytes)
                node.used_bytes += stride_bytes(length_bytes)
                picks.append((index, key, chunk))
                outcomes.append(StoreOutcome.GRANTED)
            ticket = next(self._holders)
        grants = self.grants(Access.WRITE, ticket, picks, self.ticket_ms)
        return m.StoreGrants(ticket if picks else 0, self.ticket_ms, bytes(outcomes), grants)

    def commit_store(self, request: m.CommitStore) -> m.Outcomes:
        outcomes = bytearray()
        for key, checksum in zip(split_keys(request.keys), request.checksums, strict=True):
            chunk = self.chunks.get(key)
            if chunk is None or chunk.committed:
                outcomes.append(CommitOutcome.EXPIRED)
                continue
            chunk.checksum = checksum
            chunk.committed = True
            chunk.ready.set()
            outcomes.append(CommitOutcome.COMMITTED)
        return m.Outcomes(bytes(outcomes))

    def abort_store(self, request: m.AbortStore) -> m.Empty:
        for key in split_keys(request.keys):
            if key in self.chunks and not self.chunks[key].committed:
                del self.chunks[key]
        return m.Empty()

    def acquire_read(self, request: m.AcquireRead) -> m.ReadGrants:
        keys = split_keys(request.keys)
        found = [self.chunks.get(key) for key in keys]
        loading = [chunk for chunk in found if chunk is not None and chunk.committed and not chunk.ready.is_set()]
        if loading and request.wait_ms:
            deadline = time.monotonic() + request.wait_ms / 1000
            while time.monotonic() < deadline and not any(chunk.ready.wait(0.005) for chunk in loading):
                pass
        outcomes, tiers, picks = bytearray(), bytearray(), []
        for index, (key, chunk) in enumerate(zip(keys, found, strict=True)):
            if chunk is None or not chunk.committed:
                outcomes.append(ReadOutcome.MISS)
                tiers.append(Tier.NONE)
            elif not chunk.ready.is_set():
                outcomes.append(ReadOutcome.LOADING)
                tiers.append(Tier.DISK)
            else:
                outcomes.append(ReadOutcome.GRANTED)
                tiers.append(chunk.tier)
                picks.append((index, key, chunk))
        lease = next(self._holders)
        grants = self.grants(Access.READ, lease, picks, self.lease_ms)
        return m.ReadGrants(lease, self.lease_ms, bytes(outcomes), bytes(tiers), grants)

    def match_prefix(self, request: m.Keys) -> m.Outcomes:
        tiers = self.exists(request).outcomes
        return m.Outcomes(tiers[: tiers.find(0)] if 0 in tiers else tiers)

    def exists(self, request: m.Keys) -> m.Outcomes:
        found = (self.chunks.get(key) for key in split_keys(request.keys))
        return m.Outcomes(bytes(chunk.tier if chunk is not None and chunk.committed else 0 for chunk in found))

    def report_damaged(self, request: m.ReportDamaged) -> m.Empty:
        for key in split_keys(request.keys):
            self.chunks.pop(key, None)
        return m.Empty()

    def list_nodes(self, _: m.Empty) -> m.NodeList:
        return m.NodeList([node.info for node in self.nodes.values()])

    def nothing(self, _: object) -> m.Empty:
        return m.Empty()


_RULES: dict[int, tuple[type, Callable[..., object]]] = {
    Op.ATTACH: (m.Attach, SmallManager.attach),
    Op.BEGIN_STORE: (m.BeginStore, SmallManager.begin_store),
    Op.COMMIT_STORE: (m.CommitStore, SmallManager.commit_store),
    Op.ABORT_STORE: (m.AbortStore, SmallManager.abort_store),
    Op.ACQUIRE_READ: (m.AcquireRead, SmallManager.acquire_read),
    Op.RELEASE_READ: (m.ReleaseRead, SmallManager.nothing),
    Op.MATCH_PREFIX: (m.Keys, SmallManager.match_prefix),
    Op.EXISTS: (m.Keys, SmallManager.exists),
    Op.PREFETCH: (m.Prefetch, SmallManager.nothing),
    Op.REPORT_DAMAGED: (m.ReportDamaged, SmallManager.report_damaged),
    Op.LIST_NODES: (m.Empty, SmallManager.list_nodes),
}


def hang(_: SmallManager, __: Frame) -> object:
    """A handler that never answers."""
    return None


def refuse(_: SmallManager, __: Frame) -> object:
    """A handler that says no."""
    raise Refused("not today")
