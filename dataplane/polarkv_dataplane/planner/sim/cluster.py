"""The cluster of a simulation: the manager's core with virtual time, and queues where the servers would be."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from hashlib import blake2b
from math import inf

from polarkv_client.keys import KEY_BYTES
from polarkv_client.layout import stride_bytes
from polarkv_client.protocol.messages import OperationResult
from polarkv_client.states import EntryState
from polarkv_dataplane.manager.core.directory import Directory
from polarkv_dataplane.manager.records.effects import DiskWork, Wake, Work
from polarkv_dataplane.manager.records.model import CacheNode, Entry, Settings
from polarkv_dataplane.planner.sim.clock import Clock
from polarkv_dataplane.planner.sim.pipes import Pipes
from polarkv_dataplane.planner.sim.scenario import Organisation, Scenario

TICK_S = 0.5
_FOREVER_MS = 1 << 60
_DISK_HIGH_PERCENT = 98  # of a pool of disks alone: what the paired tiers leave free, too


class Cluster:
    """Machines, their queues, and what the manager knows."""

    def __init__(self, scenario: Scenario, clock: Clock) -> None:
        hardware, self.scenario, self.clock = scenario.hardware, scenario, clock
        self.organisation = scenario.organisation
        self.size_bytes = scenario.block_bytes
        self.send = Pipes(hardware.nodes, hardware.network_bytes_per_s)
        self.receive = Pipes(hardware.nodes, hardware.network_bytes_per_s)
        self.disks = Pipes(hardware.nodes, hardware.disk_bytes_per_s or inf)
        self.tiering_bytes = 0.0  # of offloads and loads, over the network
        self.directory = Directory(Settings(node_timeout_ms=_FOREVER_MS, operation_timeout_ms=_FOREVER_MS))
        self.tenant = self.directory.ledger.tenant(1, "trace")
        self._numbers: dict[int, int] = {}  # place of a node by its number
        self._waiting: dict[bytes, list[Callable[[], None]]] = {}
        self._unbegun: dict[int, deque[bytes]] = {}
        self._keys: dict[int, bytes] = {}
        for place in range(hardware.nodes):
            self._join(place)

    def _join(self, place: int) -> None:
        hardware, members = self.scenario.hardware, self.directory.members
        memory, disk = hardware.memory_bytes, hardware.disk_bytes
        if self.organisation is Organisation.DISK:
            # One tier with the same LRU; that it lies on disk is a matter of which queues a transfer takes.
            memory, disk = disk * _DISK_HIGH_PERCENT // 100, 0
        if self.organisation is Organisation.MEMORY:
            disk = 0
        stride = stride_bytes(self.size_bytes)
        memory = memory // stride * stride  # one slab: all blocks are of one size
        node = members.join(f"node-{place}", 1, memory, memory, True, 0)
        members.prove_memory(node, (), True, 0)
        members.attach_disk(node, disk, 0)
        self._numbers[node.number] = place
        self._unbegun[node.number] = deque()
        self.settle()

    def key(self, block: int) -> bytes:
        """The key of a block of the trace: as evenly spread as a real one, and the same in every run."""
        key = self._keys.get(block)
        if key is None:
            seed = self.scenario.seed.to_bytes(8, "little", signed=True)
            key = self._keys[block] = blake2b(block.to_bytes(8, "little"), digest_size=KEY_BYTES, key=seed).digest()
        return key

    def places(self, node: CacheNode, shift: int = 0) -> list[int]:
        """Where the parts of a block lie whose entry is on ``node``."""
        first, count = self._numbers[node.number] + shift, self.scenario.hardware.nodes
        return [(first + part) % count for part in range(self.scenario.stripes_used)]

    # What clients move

    def read(self, entry: Entry, by: float) -> float:
        """Send a block to a client; when it is there (infinite: not by ``by``, so it is not sent)."""
        places = self.places(entry.node)
        now = self.clock.now
        if self.organisation is not Organisation.DISK:
            return self.send.take(now, places, self.size_bytes, by)
        if max(self.disks.busy_until(places), self.send.busy_until(places)) > by:
            return inf
        take = self.disks.take_first if self.scenario.loads_first else self.disks.take
        read = take(now, places, self.size_bytes) + self.scenario.disk_latency_s
        return max(read, self.send.take(now, places, self.size_bytes))

    def write(self, entry: Entry, by: float) -> float:
        """Take a block from a client; as :meth:`read`."""
        places = self.places(entry.node)
        now = self.clock.now
        if self.organisation is not Organisation.DISK:
            return self.receive.take(now, places, self.size_bytes, by)
        if max(self.disks.busy_until(places), self.receive.busy_until(places)) > by:
            return inf
        written = self.disks.take(now, places, self.size_bytes) + self.scenario.disk_latency_s
        return max(written, self.receive.take(now, places, self.size_bytes))

    # What the core asks for

    def settle(self) -> None:
        """Carry out what the core has asked for since."""
        while effects := self.directory.ledger.take_effects():
            for effect in effects:
                if isinstance(effect, DiskWork):
                    self._work(effect)
                elif isinstance(effect, Wake):
                    for wake in self._waiting.pop(effect.key, ()):
                        self.clock.at(self.clock.now, wake)

    def wait(self, key: bytes, wake: Callable[[], None]) -> None:
        """Have ``wake`` called once when the block was loaded, or will not be."""
        entry = self.directory.ledger.entries.get(key)
        if entry is None:
            self.clock.at(self.clock.now, wake)
            return
        self._waiting.setdefault(key, []).append(wake)
        if entry.state is EntryState.DISK:  # refused for now: asked again when its disk has answered something
            self._unbegun[entry.node.number].append(key)

    def tick(self) -> None:
        """What the manager does by the clock."""
        self.directory.tick(self.clock.now_ms)
        for number in self._unbegun:
            self._begin_loads(number)
        self.settle()

    def _work(self, work: DiskWork) -> None:
        node = self.directory.ledger.nodes[work.node]
        ends = self.clock.now if work.work is Work.PURGE else self._move(node, work)
        if work.operation:
            self.clock.at(ends, partial(self._complete, node, work.operation))

    def _move(self, node: CacheNode, work: DiskWork) -> float:
        """Between memory and disk; paired, that is within the machine."""
        now, shift = self.clock.now, 0
        if self.organisation is Organisation.GLOBAL:
            shift = int.from_bytes(work.key[:4], "little") % self.scenario.hardware.nodes
        on_disk, in_memory = self.places(node, shift), self.places(node)
        first = self.scenario.loads_first and work.work is Work.LOAD
        take = self.disks.take_first if first else self.disks.take
        ends = take(now, on_disk, self.size_bytes) + self.scenario.disk_latency_s
        if shift:
            source, target = (in_memory, on_disk) if work.work is Work.OFFLOAD else (on_disk, in_memory)
            self.tiering_bytes += self.size_bytes
            ends = max(ends, self.send.take(now, source, self.size_bytes))
            ends = max(ends, self.receive.take(now, target, self.size_bytes))
        return ends

    def _complete(self, node: CacheNode, operation: int) -> None:
        self.directory.tiering.complete(node, operation, OperationResult.OK, self.clock.now_ms)
        self._begin_loads(node.number)
        self.settle()

    def _begin_loads(self, number: int) -> None:
        """Ask again for loads that were refused, in their order, as far as the node takes them now."""
        queue = self._unbegun[number]
        while queue:
            key = queue[0]
            if key in self._waiting:
                entry = self.directory.ledger.entries.get(key)
                if entry is None:
                    for wake in self._waiting.pop(key):
                        self.clock.at(self.clock.now, wake)
                elif entry.state is EntryState.DISK:
                    self.directory.tiering.load(entry, self.clock.now_ms)
                    if entry.state is EntryState.DISK:
                        return
            queue.popleft()
