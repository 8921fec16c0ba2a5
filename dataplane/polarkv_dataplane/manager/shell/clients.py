"""A client's session: what it asks, as calls of the directory; what the directory grants, signed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from polarkv_client import errors
from polarkv_client.keys import KEY_BYTES, golden_digest, split_keys
from polarkv_client.layout import MAX_PAYLOAD_BYTES
from polarkv_client.protocol.grants import Access, Extent, Grant, sign
from polarkv_client.protocol.messages import (
    AbortStore,
    AcquireRead,
    Attach,
    Attached,
    BeginStore,
    CommitStore,
    Empty,
    Keys,
    NodeList,
    Op,
    Outcomes,
    Prefetch,
    ReadGrants,
    ReleaseRead,
    ReportDamaged,
    Shard,
    StoreGrants,
)
from polarkv_client.protocol.wire import decode_body, encode_frame
from polarkv_client.states import CommitOutcome, ReadOutcome, StoreOutcome, Tier
from polarkv_dataplane.manager.core.directory import Granted
from polarkv_dataplane.manager.records.model import Entry, Tenant
from polarkv_dataplane.manager.shell.versions import common_version
from polarkv_dataplane.manager.shell.waiting import must_wait_for_space

if TYPE_CHECKING:
    from polarkv_dataplane.manager.shell.manager import Manager
    from polarkv_dataplane.manager.shell.peer import Peer
    from polarkv_dataplane.manager.shell.waiting import Parked

_KEY_FRAME_BYTES = 64  # a key, its length and its checksum in MessagePack, rounded up
_MOST_LOADING = 65_536
_GOLDEN = golden_digest()


class Awaited:
    """Keys that one client process was told are loading: when they come, they came from disk."""

    def __init__(self) -> None:
        self.sessions = 0
        self._until: dict[bytes, int] = {}

    def add(self, key: bytes, until_ms: int) -> None:
        self._until[key] = until_ms
        if len(self._until) > _MOST_LOADING:
            del self._until[next(iter(self._until))]

    def take(self, key: bytes, now: int) -> bool:
        """Whether this key was awaited; it is no longer."""
        return self._until.pop(key, 0) > now if self._until else False


class Session:
    """One attached connection of a client."""

    def __init__(self, manager: Manager, peer: Peer, tenant: Tenant, client: str) -> None:
        self.manager = manager
        self.peer = peer
        self.tenant = tenant
        self.frame_bytes = manager.settings.max_keys_per_call * _KEY_FRAME_BYTES + 4096
        self.parked: set[Parked] = set()
        self._directory = manager.directory
        self._mask = manager.holder_mask(tenant.name)
        self._most_keys = manager.settings.max_keys_per_call
        self._awaited_id = (tenant.name, client) if client else None
        self.awaited = manager.awaited.setdefault(self._awaited_id, Awaited()) if self._awaited_id else Awaited()
        self.awaited.sessions += 1

    def handle(self, op: int, request_id: int, body: bytes) -> None:
        handler = _HANDLERS.get(op)
        if handler is None:
            raise errors.ProtocolError(f"a client cannot ask for {op}")
        now = self.manager.now()
        answer = handler(self, request_id, body, now)
        if answer is not None:
            self.peer.send(encode_frame(op, request_id, answer))
        if self.manager.ledger.effects:
            self.manager.settle(now)

    def gone(self) -> None:
        self.manager.waiting.forget(self)
        self.awaited.sessions -= 1
        if not self.awaited.sessions and self._awaited_id:
            self.manager.awaited.pop(self._awaited_id, None)

    # One handler an op

    def exists(self, _: int, body: bytes, now: int) -> Outcomes:
        return self._found(self._directory.exists(self._keys(decode_body(body, Keys).keys)))

    def match_prefix(self, _: int, body: bytes, now: int) -> Outcomes:
        return self._found(self._directory.match_prefix(self._keys(decode_body(body, Keys).keys)))

    def begin_store(self, request_id: int, body: bytes, now: int) -> StoreGrants | None:
        request = decode_body(body, BeginStore)
        keys = self._keys(request.keys)
        lengths = request.lengths
        if len(lengths) == 1:
            lengths = lengths * len(keys)
        if len(lengths) != len(keys):
            raise errors.ConfigurationError("lengths", f"{len(lengths)} values", f"send one, or {len(keys)}: one a key")
        if lengths and not (min(lengths) > 0 and max(lengths) <= MAX_PAYLOAD_BYTES):
            shown = f"{min(lengths)} to {max(lengths)}"
            raise errors.ConfigurationError("lengths", shown, f"use 1 to {MAX_PAYLOAD_BYTES} bytes")
        answer = self.try_store(keys, lengths, now, now)
        if request.wait_ms > 0 and must_wait_for_space(answer.outcomes):
            return self.manager.waiting.for_space(self, request_id, keys, lengths, now, request.wait_ms, answer)
        return self.count_store(answer)

    def try_store(self, keys: Sequence[bytes], lengths: Sequence[int], received: int, now: int) -> StoreGrants:
        """One attempt. The answer's time counts from when the request came, which is not before it was sent."""
        granted = self._directory.begin_store(keys, lengths, self.tenant, now)
        grants = self._sign(Access.WRITE, granted, enumerate(granted.entries)) if granted.number else []
        number = granted.number ^ self._mask if granted.number else 0
        return StoreGrants(number, max(0, granted.deadline_ms - received - 1), granted.outcomes, grants)

    def count_store(self, answer: StoreGrants) -> StoreGrants:
        """Count outcomes, once a call."""
        for outcome in StoreOutcome:
            if number := answer.outcomes.count(outcome):
                self.manager.counts.add(f"store_{outcome.name.lower()}", number)
        return answer

    def commit_store(self, _: int, body: bytes, now: int) -> Outcomes:
        request = decode_body(body, CommitStore)
        keys = self._keys(request.keys)
        if len(request.checksums) != len(keys):
            shown = f"{len(request.checksums)} values"
            raise errors.ConfigurationError("checksums", shown, f"send {len(keys)}: one a key")
        outcomes = self._directory.commit_store(request.ticket ^ self._mask, keys, request.checksums, now)
        committed = [key for key, outcome in zip(keys, outcomes, strict=True) if outcome == CommitOutcome.COMMITTED]
        entries = self.manager.ledger.entries
        sizes = _bytes_by_node(entries[key] for key in committed if key in entries)
        self.manager.counts.add("stored_bytes", sum(sizes.values()))
        self.manager.nodes.count(sizes, stored=True)
        self.manager.counts.add("commits_expired", len(keys) - len(committed))
        self.manager.recorder.used(committed)
        return Outcomes(outcomes)

    def abort_store(self, _: int, body: bytes, now: int) -> Empty:
        request = decode_body(body, AbortStore)
        self._directory.abort_store(request.ticket ^ self._mask, self._keys(request.keys), now)
        return Empty()

    def acquire_read(self, request_id: int, body: bytes, now: int) -> ReadGrants | None:
        request = decode_body(body, AcquireRead)
        keys = self._keys(request.keys)
        for lease in request.ended:
            self._directory.release_read(lease ^ self._mask, True, now)
        granted = self._directory.acquire_read(keys, now)
        outcomes = granted.outcomes
        if ReadOutcome.LOADING in outcomes:
            until = now + request.wait_ms + self.manager.settings.read_lease_ms
            for key, outcome in zip(keys, outcomes, strict=True):
                if outcome == ReadOutcome.LOADING:
                    self.awaited.add(key, until)
            # What is granted already goes out at once: the client moves it while the rest loads.
            if request.wait_ms > 0 and not granted.number:
                return self.manager.waiting.for_loads(self, request_id, keys, outcomes, now, request.wait_ms)
        return self.read_answer(outcomes, granted, range(len(keys)), now, now)

    def read_answer(
        self, outcomes: bytes, granted: Granted, places: Sequence[int], received: int, now: int
    ) -> ReadGrants:
        """Sign what was granted. ``places``: for each granted entry the place of its key in the call."""
        tiers = bytearray(len(outcomes))
        from_disk = 0
        held: list[tuple[int, Entry | None]] = list(zip(places, granted.entries, strict=True))
        used = []
        for place, entry in held:
            if entry is not None:
                disk = self.awaited.take(entry.key, now)
                tiers[place] = Tier.DISK if disk else Tier.MEMORY
                from_disk += disk
                used.append(entry.key)
        counts = self.manager.counts
        counts.add("hits_disk", from_disk)
        counts.add("hits_memory", len(used) - from_disk)
        counts.add("misses", outcomes.count(ReadOutcome.MISS))
        sizes = _bytes_by_node(entry for entry in granted.entries if entry is not None)
        counts.add("read_bytes", sum(sizes.values()))
        self.manager.nodes.count(sizes, stored=False)
        self.manager.recorder.read(used)
        grants = self._sign(Access.READ, granted, held) if granted.number else []
        number = granted.number ^ self._mask if granted.number else 0
        return ReadGrants(number, max(0, granted.deadline_ms - received - 1), outcomes, bytes(tiers), grants)

    def release_read(self, _: int, body: bytes, now: int) -> Empty:
        request = decode_body(body, ReleaseRead)
        self._directory.release_read(request.lease ^ self._mask, request.clean, now)
        return Empty()

    def prefetch(self, _: int, body: bytes, now: int) -> Outcomes:
        return Outcomes(self._directory.prefetch(self._keys(decode_body(body, Prefetch).keys), now))

    def report_damaged(self, _: int, body: bytes, now: int) -> Empty:
        request = decode_body(body, ReportDamaged)
        keys = self._keys(request.keys)
        self._directory.report_damaged(request.lease ^ self._mask, keys, request.clean, now)
        return Empty()

    def list_nodes(self, _: int, body: bytes, now: int) -> NodeList:
        return NodeList(self.manager.nodes.present())

    # Inside

    def _keys(self, blob: bytes) -> Sequence[bytes]:
        """The keys of a request. Raises ConfigurationError when they are not whole, or too many."""
        count, rest = divmod(len(blob), KEY_BYTES)
        if rest:
            return split_keys(blob)  # which says what is wrong
        if count > self._most_keys:
            fix = f"split the batch: at most {self._most_keys} a call"
            raise errors.ConfigurationError("keys", f"{count} keys", fix)
        return split_keys(blob)

    def _found(self, tiers: bytes) -> Outcomes:
        counts = self.manager.counts.counts
        counts["lookups_memory"] = counts.get("lookups_memory", 0) + tiers.count(Tier.MEMORY)
        counts["lookups_disk"] = counts.get("lookups_disk", 0) + tiers.count(Tier.DISK)
        counts["lookups"] = counts.get("lookups", 0) + 1
        return Outcomes(tiers)

    def _sign(self, access: Access, granted: Granted, held: Iterable[tuple[int, Entry | None]]) -> list[bytes]:
        """One signed grant a cache node."""
        by_node: dict[int, list[Extent]] = {}
        nodes = self.manager.ledger.nodes
        for place, entry in held:
            if entry is not None:
                extent = Extent(place, entry.key, entry.offset_bytes, entry.length_bytes, entry.checksum)
                by_node.setdefault(entry.node.number, []).append(extent)
        return [
            sign(
                Grant(access, number, nodes[number].incarnation, self.manager.epoch, granted.number ^ self._mask,
                      granted.deadline_ms, self.tenant.number, extents),
                self.manager.grant_key,
            )
            for number, extents in by_node.items()
        ]  # fmt: skip


def _bytes_by_node(entries: Iterable[Entry]) -> dict[int, int]:
    sizes: dict[int, int] = {}
    for entry in entries:
        number = entry.node.number
        sizes[number] = sizes.get(number, 0) + entry.length_bytes
    return sizes


_Handler = Callable[[Session, int, bytes, int], object]
_HANDLERS: dict[int, _Handler] = {
    Op.BEGIN_STORE: Session.begin_store,
    Op.COMMIT_STORE: Session.commit_store,
    Op.ABORT_STORE: Session.abort_store,
    Op.ACQUIRE_READ: Session.acquire_read,
    Op.RELEASE_READ: Session.release_read,
    Op.MATCH_PREFIX: Session.match_prefix,
    Op.EXISTS: Session.exists,
    Op.PREFETCH: Session.prefetch,
    Op.REPORT_DAMAGED: Session.report_damaged,
    Op.LIST_NODES: Session.list_nodes,
}


def open_session(manager: Manager, peer: Peer, request_id: int, body: bytes) -> None:
    """A client attaches.

    Raises:
        ProtocolError, VersionMismatch, Unauthorized, GoldenMismatch: it cannot.
    """
    request = decode_body(body, Attach)
    wire = common_version(request.wire_min, request.wire_max)
    tenant = manager.tenant(manager.credentials.tenant(request.token))
    if request.golden != _GOLDEN:
        raise errors.GoldenMismatch(
            "client and manager derive different keys from the golden prompt, so every lookup would miss: "
            "run the same version of polarkv on both sides"
        )
    settings = manager.settings
    peer.become(Session(manager, peer, tenant, request.client[:256]))
    manager.counts.add("attached")
    peer.answer(
        Op.ATTACH,
        request_id,
        Attached(
            wire=wire,
            epoch=manager.epoch,
            session=manager.ledger.next_number(),
            tenant=tenant.name,
            tenant_number=tenant.number,
            golden=_GOLDEN,
            shards=[Shard(0, 255)],
            nodes=manager.nodes.present(),
            read_lease_ms=settings.read_lease_ms,
            write_ticket_ms=settings.write_ticket_ms,
            max_payload_bytes=MAX_PAYLOAD_BYTES,
        ),
    )
