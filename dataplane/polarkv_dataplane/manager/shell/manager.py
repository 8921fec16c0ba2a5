"""The manager: one directory, one clock, whoever is connected. Events go into the core, its effects come out here."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hashlib
import hmac
import logging
import time
from collections.abc import Sequence

from polarkv_client import errors
from polarkv_client.layout import tenant_number
from polarkv_client.protocol.messages import Carve, DiskCommand, Op
from polarkv_client.protocol.wire import encode_frame
from polarkv_dataplane.manager.core.directory import Directory
from polarkv_dataplane.manager.records.effects import Carved, Changed, DiskWork, NodeChanged, Wake, Work
from polarkv_dataplane.manager.records.model import Stats, Tenant
from polarkv_dataplane.manager.settings import ManagerSettings
from polarkv_dataplane.manager.shell.clients import Awaited, open_session
from polarkv_dataplane.manager.shell.credentials import Credentials
from polarkv_dataplane.manager.shell.metadata.recorder import Recorder
from polarkv_dataplane.manager.shell.metadata.store import Recalled, Remembered
from polarkv_dataplane.manager.shell.nodes import Nodes
from polarkv_dataplane.manager.shell.peer import Peer
from polarkv_dataplane.manager.shell.waiting import Waiting
from polarkv_dataplane.runtime.secrets import Secrets

TICK_S = 0.1
_SLICE = 1000
_OPS = {Work.OFFLOAD: Op.OFFLOAD, Work.LOAD: Op.LOAD, Work.PURGE: Op.PURGE}
_log = logging.getLogger(__name__)


class Manager:
    """What every part of the shell shares. Everything runs in one asyncio loop; nothing here blocks it."""

    def __init__(
        self, settings: ManagerSettings, secrets: Secrets, credentials: Credentials, epoch: int, recorder: Recorder,
        remembered: Remembered,
    ) -> None:  # fmt: skip
        self.settings = settings
        self.grant_key = secrets.grant_key
        self.credentials = credentials
        self.epoch = epoch
        self.recorder = recorder
        self.loop = asyncio.get_running_loop()
        self.directory = Directory(settings.core(), first_number=epoch << 31)
        self.ledger = self.directory.ledger
        self.counts = Stats()  # of the shell; the core has its own
        self.nodes = Nodes(self)
        self.waiting = Waiting(self)
        self.peers: set[Peer] = set()
        self.awaited: dict[tuple[str, str], Awaited] = {}  # by tenant and client: its connections share it
        self.quotas_set = set(remembered.quotas)  # by the admin: they win over the tokens file
        for name, quota_bytes in {**credentials.quotas, **remembered.quotas}.items():
            self.set_quota(name, quota_bytes)
        for node in remembered.nodes:
            self.directory.members.known(*node)
        recorder.bind(self.ledger.entries, self._recall, self._make_recent)

    def now(self) -> int:
        """The manager's clock, in milliseconds; it never goes back."""
        return time.monotonic_ns() // 1_000_000

    # Connections

    def admit(self, peer: Peer) -> None:
        """Raises Refused when there are too many connections."""
        if len(self.peers) >= self.settings.max_connections:
            raise errors.Refused(f"{len(self.peers)} connections are open: raise max_connections or close some")
        self.peers.add(peer)

    def dismiss(self, peer: Peer) -> None:
        self.peers.discard(peer)

    def welcome(self, peer: Peer, op: int, request_id: int, body: bytes) -> None:
        """The first frame of a connection: a client attaches or a cache node registers.

        Raises:
            ProtocolError, VersionMismatch, GoldenMismatch, Unauthorized: the connection is of no use.
            Refused: not now.
        """
        if op == Op.ATTACH:
            open_session(self, peer, request_id, body)
        elif op == Op.REGISTER:
            self.nodes.register(peer, request_id, body)
        else:
            raise errors.ProtocolError(f"the first frame asks for {op}: ATTACH or REGISTER comes first")

    # Tenants

    def tenant(self, name: str) -> Tenant:
        return self.ledger.tenant(tenant_number(name), name)

    def set_quota(self, name: str, quota_bytes: int) -> Tenant:
        tenant = self.tenant(name)
        tenant.quota_bytes = quota_bytes
        return tenant

    def holder_mask(self, tenant: str) -> int:
        """Tickets' and leases' numbers are XORed with this outside, so that no tenant can name another's."""
        digest = hmac.digest(self.grant_key, b"holder " + tenant.encode(), hashlib.sha256)
        return int.from_bytes(digest[:8], "little") >> 2

    def all_counts(self) -> dict[str, int]:
        """Every total since the start, by name."""
        return {**self.ledger.stats.counts, **self.recorder.stats.counts, **self.counts.counts}

    # Effects and time

    def settle(self, now: int) -> None:
        """Run what the core asked for; called after every event."""
        while self.ledger.effects:
            effects = self.ledger.take_effects()
            lost = False
            changed: list[bytes] = []
            for effect in effects:
                if isinstance(effect, Changed):
                    changed.append(effect.key)
                elif isinstance(effect, DiskWork):
                    self._command(effect)
                elif isinstance(effect, Wake):
                    self.waiting.wake(effect.key)
                elif isinstance(effect, Carved):
                    carve = Carve(effect.incarnation, effect.base_bytes, effect.stride_bytes)
                    self.nodes.push(effect.node, effect.incarnation, "slab", encode_frame(Op.CARVE, 0, carve))
                elif isinstance(effect, NodeChanged):
                    lost = self.nodes.changed(effect.node, now) or lost
            # What a lost node held may be proved again: its metadata stays.
            self.recorder.changed(changed, self.ledger.entries, keep_absent=lost)

    def _recall(self, found: dict[bytes, Recalled]) -> None:
        """Pins of entries that were proved."""
        now, wall_ms = self.now(), time.time_ns() // 1_000_000
        for key, recalled in found.items():
            if recalled.pinned_until_ms > wall_ms:
                self.directory.pin([key], now + recalled.pinned_until_ms - wall_ms, now)

    async def _make_recent(self, keys: Sequence[bytes]) -> None:
        for at in range(0, len(keys), _SLICE):
            self.ledger.make_recent(keys[at : at + _SLICE])
            await asyncio.sleep(0)

    async def run(self) -> None:
        """Let time pass in the core until cancelled."""
        while True:
            now = self.now()
            try:
                self.directory.tick(now)
                self.nodes.check(now)
                self.settle(now)
                self.waiting.room()
            except Exception:
                _log.exception("a tick failed")
                self.counts.add("internal_errors")
            await asyncio.sleep(TICK_S)

    def recovered(self, name: str) -> None:
        """A cache node has proved all that it holds; those entries live long, so no collection walks them again."""
        self.counts.add("recoveries")
        self.recorder.inventoried(name)
        gc.freeze()

    def close(self) -> None:
        """Close every connection."""
        for peer in list(self.peers):
            with contextlib.suppress(Exception):
                peer.close()

    def _command(self, work: DiskWork) -> None:
        place = (work.offset_bytes, work.length_bytes, work.checksum, work.tenant)
        command = DiskCommand(work.incarnation, work.operation, work.key, *place)
        self.nodes.push(work.node, work.incarnation, "disk", encode_frame(_OPS[work.work], 0, command))
