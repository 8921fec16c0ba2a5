"""The manager's operations as blocking calls, and whose each key is.

Every call takes an absolute deadline on ``time.monotonic()``'s clock and ends by it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

from polarkv_client import errors
from polarkv_client.channel import Channel
from polarkv_client.config import ClientConfig
from polarkv_client.protocol.messages import (
    AbortStore,
    AcquireRead,
    Attached,
    BeginStore,
    CommitStore,
    Empty,
    Keys,
    NodeInfo,
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
from polarkv_client.transport.base import Scope

log = logging.getLogger(__name__)
_REFRESH_S = 0.2  # at most this often is the node table asked for


class ManagerClient:
    """The manager's operations, over one channel a shard. Safe for several threads."""

    def __init__(self, config: ClientConfig, host: str) -> None:
        self._config = config
        self._host = host
        self._lock = threading.Lock()
        self._attached: Attached | None = None
        self._nodes: dict[int, NodeInfo] = {}
        self._refreshed_at = 0.0
        self._home = Channel(config.endpoint, config, host, self._note_attached)
        self._channels: dict[str, Channel] = {"": self._home, config.endpoint: self._home}
        self._shards: list[Shard] = []

    @property
    def home(self) -> Channel:
        """The channel to the manager that the configuration names."""
        return self._home

    @property
    def channels(self) -> list[Channel]:
        """All channels, once each."""
        return list({id(channel): channel for channel in self._channels.values()}.values())

    @property
    def attached(self) -> Attached | None:
        """What the manager said at the last attach."""
        return self._attached

    @property
    def nodes(self) -> dict[int, NodeInfo]:
        """The cache nodes by number, as last heard."""
        return self._nodes

    def connect(self, deadline: float) -> Attached:
        """Attach now. Raises what :meth:`Channel.call` raises."""
        self._home.connect(deadline)
        assert self._attached is not None
        return self._attached

    def route(self, keys: Sequence[bytes]) -> list[tuple[Channel, Sequence[int]]]:
        """Whose each key is: for each channel the places of its keys, in order."""
        if len(self._shards) <= 1:
            channel = self._channel(self._shards[0].endpoint) if self._shards else self._home
            return [(channel, range(len(keys)))]
        places: dict[str, list[int]] = {}
        by_byte = [next((s.endpoint for s in self._shards if s.first <= byte <= s.last), "") for byte in range(256)]
        for place, key in enumerate(keys):
            places.setdefault(by_byte[key[0]], []).append(place)
        return [(self._channel(endpoint), group) for endpoint, group in places.items()]

    def exists(self, channel: Channel, keys: bytes, deadline: float) -> bytes:
        """A Tier a key. Takes no lock, renews nothing."""
        answer = channel.call(Op.EXISTS, Keys(keys), Outcomes, deadline)
        return _expect(answer.outcomes, len(keys) // 32)

    def match_prefix(self, channel: Channel, keys: bytes, deadline: float) -> bytes:
        """A Tier for each key of the longest prefix that is there."""
        answer = channel.call(Op.MATCH_PREFIX, Keys(keys), Outcomes, deadline)
        if len(answer.outcomes) > len(keys) // 32:
            raise errors.ProtocolError("the manager matched more keys than it was asked for")
        return answer.outcomes

    def begin_store(
        self, channel: Channel, keys: bytes, lengths: list[int], wait_ms: int, scope: Scope
    ) -> tuple[StoreGrants, float]:
        """Ask for slots. Returns the answer and until when the ticket may be used, counted from when this was sent."""
        sent = time.monotonic()
        answer = channel.call(
            Op.BEGIN_STORE,
            BeginStore(keys, lengths, wait_ms),
            StoreGrants,
            scope.deadline,
            wait_ms=wait_ms,
            scope=scope,
        )
        _expect(answer.outcomes, len(keys) // 32)
        return answer, sent + answer.ticket_ms / 1000

    def commit_store(self, channel: Channel, ticket: int, keys: bytes, checksums: list[int], deadline: float) -> bytes:
        """Make what was written visible: a CommitOutcome a key."""
        request = CommitStore(ticket, keys, checksums)
        answer = channel.call(Op.COMMIT_STORE, request, Outcomes, deadline, idempotent=False)
        return _expect(answer.outcomes, len(checksums))

    def abort_store(self, channel: Channel, ticket: int, keys: bytes, deadline: float) -> None:
        """Give slots back."""
        channel.call(Op.ABORT_STORE, AbortStore(ticket, keys), Empty, deadline)

    def acquire_read(
        self, channel: Channel, keys: bytes, wait_ms: int, ended: list[int], scope: Scope
    ) -> tuple[ReadGrants, float]:
        """Ask for leases, and end others. Returns the answer and until when the lease may be used, by this clock."""
        sent = time.monotonic()
        answer = channel.call(
            Op.ACQUIRE_READ, AcquireRead(keys, wait_ms, ended), ReadGrants, scope.deadline, wait_ms=wait_ms, scope=scope
        )
        _expect(answer.outcomes, len(keys) // 32)
        _expect(answer.tiers, len(keys) // 32)
        return answer, sent + answer.lease_ms / 1000

    def release_read(self, channel: Channel, lease: int, clean: bool, deadline: float) -> None:
        """End a lease."""
        channel.call(Op.RELEASE_READ, ReleaseRead(lease, clean), Empty, deadline)

    def report_damaged(self, channel: Channel, lease: int, keys: bytes, clean: bool, deadline: float) -> None:
        """End a lease under which damaged chunks were read."""
        channel.call(Op.REPORT_DAMAGED, ReportDamaged(lease, keys, clean), Empty, deadline)

    def prefetch(self, channel: Channel, keys: bytes, deadline: float) -> None:
        """Ask that chunks on disk be brought to memory."""
        channel.call(Op.PREFETCH, Prefetch(keys), Empty, deadline)

    def list_nodes(self, deadline: float) -> dict[int, NodeInfo]:
        """The cache nodes by number, asked for now."""
        answer = self._home.call(Op.LIST_NODES, Empty(), NodeList, deadline)
        self._nodes = {node.number: node for node in answer.nodes}
        return self._nodes

    def node(self, number: int, incarnation: int, deadline: float) -> NodeInfo:
        """The cache node that a grant is for; the table is asked for again when it is older than the grant.

        Raises:
            Refused: there is no such life of that node. Others as :meth:`Channel.call`.
        """
        found = self._nodes.get(number)
        if found is None or found.incarnation < incarnation:
            with self._lock:
                due = time.monotonic() - self._refreshed_at >= _REFRESH_S
                if due:
                    self._refreshed_at = time.monotonic()
            if due:
                self.list_nodes(deadline)
            found = self._nodes.get(number)
        if found is None or found.incarnation != incarnation:
            raise errors.Refused(f"cache node {number} has no incarnation {incarnation} (any more)")
        return found

    def close(self) -> None:
        """Close all channels."""
        for channel in self.channels:
            channel.close()

    def _channel(self, endpoint: str) -> Channel:
        channel = self._channels.get(endpoint)
        if channel is None:
            with self._lock:
                channel = self._channels.get(endpoint)
                if channel is None:
                    channel = Channel(endpoint, self._config, self._host, lambda attached: None)
                    self._channels[endpoint] = channel
        return channel

    def _note_attached(self, attached: Attached) -> None:
        previous = self._attached
        self._attached = attached
        self._shards = attached.shards
        self._nodes = {node.number: node for node in attached.nodes}
        if previous is not None and previous.epoch != attached.epoch:
            log.info("the manager began epoch %d; %d cache nodes", attached.epoch, len(attached.nodes))


def _expect(outcomes: bytes, count: int) -> bytes:
    if len(outcomes) != count:
        raise errors.ProtocolError(f"the manager answered for {len(outcomes)} keys, asked were {count}")
    return outcomes
