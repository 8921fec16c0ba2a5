"""What clients ask: the protocol's face. One method a request, batched over keys, one outcome a key."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from polarkv_client.layout import stride_bytes
from polarkv_client.states import READABLE, CommitOutcome, ReadOutcome, StoreOutcome, Tier
from polarkv_client.states import EntryState as S
from polarkv_dataplane.manager.core.ledger import Ledger
from polarkv_dataplane.manager.core.membership import Membership
from polarkv_dataplane.manager.core.table import Event
from polarkv_dataplane.manager.core.tiering import Tiering
from polarkv_dataplane.manager.records.model import CacheNode, Entry, Lease, Settings, Tenant, Ticket
from polarkv_dataplane.manager.records.ring import Ring

# By state: where a lookup finds an entry. Writing and Purging are not visible.
_TIER_BY_STATE = bytes((Tier.NONE, Tier.NONE, *3 * [Tier.MEMORY], *2 * [Tier.DISK], Tier.NONE)).ljust(256, b"\0")


class Granted(NamedTuple):
    """A ticket or lease (number 0: nothing was granted), its entries in the order asked, and one outcome a key."""

    number: int
    deadline_ms: int
    entries: list[Entry | None]
    outcomes: bytes


class Directory:
    """The manager's core as its shell sees it. Every call takes ``now``, which never goes back."""

    def __init__(self, settings: Settings, first_number: int = 0) -> None:
        self.settings = settings
        self.ledger = Ledger(settings, first_number)
        self.tiering = Tiering(self.ledger)
        self.members = Membership(self.ledger, self.tiering)
        self.tickets: dict[int, Ticket] = {}
        self.leases: dict[int, Lease] = {}
        self._ends: list[tuple[int, int]] = []  # (deadline, ticket or lease), a heap

    def match_prefix(self, keys: Sequence[bytes]) -> bytes:
        """The tier of each key up to the first that is not there. Takes no lock and renews none."""
        tiers = b""
        for start in range(0, len(keys), 64):
            tiers += self.exists(keys[start : start + 64])
            if 0 in tiers:
                break
        return tiers.partition(b"\0")[0]

    def exists(self, keys: Sequence[bytes]) -> bytes:
        """The tier of each key (0: not there). Takes no lock and renews none."""
        found = map(self.ledger.entries.get, keys)
        if all(node.serving for node in self.ledger.nodes.values()):  # a third of the time
            return bytes([0 if entry is None else entry.state or 0 for entry in found]).translate(_TIER_BY_STATE)
        return bytes(map(_tier, found))

    def begin_store(self, keys: Sequence[bytes], lengths: Sequence[int], tenant: Tenant, now: int) -> Granted:
        """Reserve a slot for each key that is not there yet; the second writer of a key gets EXISTS or IN_PROGRESS."""
        ticket = Ticket(self.ledger.next_number(), now + self.settings.write_ticket_ms, {})
        outcomes = bytearray()
        placed: list[Entry | None] = []
        ring = Ring(self.ledger.nodes.values())
        for key, length in zip(keys, lengths, strict=True):
            entry = self.ledger.entries.get(key)
            if entry is not None:
                busy = entry.state in (S.WRITING, S.PURGING) or not entry.node.serving
                outcomes.append(StoreOutcome.IN_PROGRESS if busy else StoreOutcome.EXISTS)
                placed.append(None)
                continue
            outcome, entry = self._place(ring, key, length, tenant, now)
            if entry is not None:
                entry.operation = ticket.number
                ticket.entries[key] = entry
            outcomes.append(outcome)
            placed.append(entry)
        if ticket.entries:
            self.tickets[ticket.number] = ticket
            heappush(self._ends, (ticket.deadline_ms, ticket.number))
        return Granted(ticket.number if ticket.entries else 0, ticket.deadline_ms, placed, bytes(outcomes))

    def commit_store(self, number: int, keys: Sequence[bytes], checksums: Sequence[int], now: int) -> bytes:
        """Make written chunks visible; EXPIRED when the ticket ended before, or the entry is another's by now."""
        self.expire(now)
        ticket = self.tickets.get(number)
        outcomes = bytearray()
        nodes: dict[int, CacheNode] = {}
        for key, checksum in zip(keys, checksums, strict=True):
            entry = ticket.entries.pop(key, None) if ticket else None
            if entry is None or entry.state is not S.WRITING or entry.operation != number:
                outcomes.append(CommitOutcome.EXPIRED)
                continue
            entry.checksum = checksum
            self.ledger.change(entry, Event.COMMIT, now)
            self.ledger.stats.add("stored")
            outcomes.append(CommitOutcome.COMMITTED)
            nodes[entry.node.number] = entry.node
        for node in nodes.values():
            self.tiering.pump(node, now)
        if ticket and not ticket.entries:
            del self.tickets[number]
        return bytes(outcomes)

    def abort_store(self, number: int, keys: Sequence[bytes], now: int) -> None:
        """Give slots back. A write may still be on its way, so they are quarantined from the ticket's end on."""
        ticket = self.tickets.get(number)
        if ticket is None:
            return
        for key in keys:
            entry = ticket.entries.pop(key, None)
            if entry is not None and entry.state is S.WRITING and entry.operation == number:
                entry.fence_ms = ticket.deadline_ms + self.settings.quarantine_ms
                self.ledger.change(entry, Event.ABORT, now)
        if not ticket.entries:
            del self.tickets[number]

    def acquire_read(self, keys: Sequence[bytes], now: int) -> Granted:
        """Lease each readable key; a key on disk begins to load. LOADING means: ask again."""
        self.expire(now)
        lease = Lease(self.ledger.next_number(), now + self.settings.read_lease_ms, [])
        outcomes = bytearray()
        granted: list[Entry | None] = []
        for key in keys:
            entry = self.ledger.entries.get(key)
            held = None
            if entry is None or not entry.node.serving:
                outcomes.append(ReadOutcome.MISS)
            elif entry.state in READABLE:
                entry.holds += 1
                entry.node.holds += 1
                entry.node.memory.touch(entry)
                lease.entries.append(entry)
                held = entry
                outcomes.append(ReadOutcome.GRANTED)
            else:
                if entry.state is S.DISK:
                    self.tiering.load(entry, now)
                loading = entry.state in (S.DISK, S.LOADING)
                outcomes.append(ReadOutcome.LOADING if loading else ReadOutcome.MISS)
            granted.append(held)
        if lease.entries:
            self.leases[lease.number] = lease
            heappush(self._ends, (lease.deadline_ms, lease.number))
        return Granted(lease.number if lease.entries else 0, lease.deadline_ms, granted, bytes(outcomes))

    def release_read(self, number: int, clean: bool, now: int) -> None:
        """End a lease. Not ``clean``: bytes may still be on their way, so the slots are fenced past the lease's end."""
        lease = self.leases.pop(number, None)
        if lease is not None:
            self._end_lease(lease, fenced=not clean)
            for node in {entry.node.number: entry.node for entry in lease.entries}.values():
                self.members.advance_drain(node, now)

    def report_damaged(self, number: int, keys: Sequence[bytes], clean: bool, now: int) -> None:
        """A reader found bytes that do not match: end its lease and drop these memory copies.

        ``clean`` as in :meth:`release_read`: other transfers under the same lease may still be on their way.
        """
        lease = self.leases.get(number)
        damaged = [entry for entry in lease.entries if entry.key in set(keys)] if lease else []
        self.release_read(number, clean, now)
        for entry in damaged:
            if self.ledger.entries.get(entry.key) is entry and self.tiering.evict(entry, now, forced=True):
                self.ledger.stats.add("damaged")

    def prefetch(self, keys: Sequence[bytes], now: int) -> bytes:
        """Begin to load what is on disk; answers as ``exists``."""
        for key in keys:
            entry = self.ledger.entries.get(key)
            if entry is not None and entry.state is S.DISK and entry.node.serving:
                self.tiering.load(entry, now)
        return self.exists(keys)

    def pin(self, keys: Sequence[bytes], until_ms: int, now: int) -> list[bool]:
        """Keep these entries cached until ``until_ms`` (0: no longer). False: not there, or too much is pinned."""
        pins = self.ledger.pins
        pins.expire(now)
        limit = sum(node.disk_bytes for node in self.ledger.nodes.values()) * self.settings.pinned_percent // 100
        done = []
        for key in keys:
            entry = self.ledger.entries.get(key)
            if entry is not None:
                pins.drop(entry)
                if until_ms > now and pins.bytes + entry.stride_bytes <= limit:
                    pins.add(entry, until_ms)
            done.append(entry is not None and (until_ms <= now or entry.pinned_until_ms == until_ms))
        return done

    def evict(self, keys: Sequence[bytes], *, purge: bool, now: int) -> list[bool]:
        """By hand: drop memory copies that disk has too, or (``purge``) the whole entries. False: not now."""
        done = []
        for key in keys:
            entry = self.ledger.entries.get(key)
            if entry is None or not entry.node.serving:
                done.append(entry is None)
                continue
            if purge or entry.state is S.MEMORY_AND_DISK:
                self.tiering.evict(entry, now, forced=True)
            if purge and entry.state is S.DISK:
                self.tiering.purge(entry, now)
            done.append(entry.state in (None, S.PURGING) if purge else entry.state is S.DISK)
        return done

    def tick(self, now: int) -> None:
        """Time passes: grants end, silent nodes and nodes with overdue operations are lost, work that waits goes on."""
        self.expire(now)
        self.ledger.pins.expire(now)
        for node in list(self.ledger.nodes.values()):
            first = next(iter(node.operations.values()), None)
            overdue = first is not None and first.deadline_ms <= now
            if overdue or now - node.heard_ms > self.settings.node_timeout_ms:
                self.members.lose(node, now)
                continue
            node.pool.release_due(now)
            if node.serving:
                self.tiering.pump(node, now)
            self.members.advance_drain(node, now)
        going = self.ledger.counts[S.PURGING]
        excess = len(self.ledger.entries) - going - self.settings.max_keys * 98 // 100
        if excess > 0 and self.ledger.nodes:
            fullest = max(self.ledger.nodes.values(), key=lambda node: node.disk.count + node.memory.count)
            most = 32 * self.settings.operations_per_node - len(fullest.operations)  # more could be overdue
            self.tiering.shed(fullest, min(excess, max(0, most)), now)

    def expire(self, now: int) -> None:
        """End every ticket and lease whose deadline has passed, as if its holder were dead."""
        while self._ends and self._ends[0][0] <= now:
            number = heappop(self._ends)[1]
            ticket = self.tickets.get(number)
            if ticket is not None:
                self.abort_store(number, list(ticket.entries), now)
                self.ledger.stats.add("tickets_expired")
            lease = self.leases.pop(number, None)
            if lease is not None:
                self._end_lease(lease, fenced=True)
                self.ledger.stats.add("leases_expired")

    def _end_lease(self, lease: Lease, *, fenced: bool) -> None:
        for entry in lease.entries:
            entry.holds -= 1
            entry.node.holds -= 1
            if fenced:
                entry.fence_ms = max(entry.fence_ms, lease.deadline_ms + self.settings.quarantine_ms)

    def _place(
        self, ring: Ring, key: bytes, length: int, tenant: Tenant, now: int
    ) -> tuple[StoreOutcome, Entry | None]:
        stride = stride_bytes(length)
        if ring.nodes and stride > ring.slab_bytes:
            return StoreOutcome.OVERSIZED, None
        if tenant.quota_bytes and tenant.used_bytes + stride > tenant.quota_bytes:
            return StoreOutcome.QUOTA_EXCEEDED, None
        if len(self.ledger.entries) >= self.settings.max_keys or stride in ring.full:
            return StoreOutcome.NO_SPACE, None
        for node in ring.candidates(key):
            offset = self.tiering.take_slot(node, stride, now)
            if offset is not None:
                entry = Entry(key, node, length, tenant)
                self.ledger.change(entry, Event.BEGIN, now, offset)
                return StoreOutcome.GRANTED, entry
        ring.full.add(stride)  # no use to look again at this moment
        return StoreOutcome.NO_SPACE, None


def _tier(entry: Entry | None) -> int:
    return _TIER_BY_STATE[entry.state or 0] if entry is not None and entry.node.serving else Tier.NONE
