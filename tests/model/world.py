"""The tiny world around the real core: one cache node with one slot, two keys, two clients, a disk, a clock.

What is physically there (bytes in the slot, files, messages on their way) is kept apart from what the core believes,
and compared. A chunk's bytes are two halves that move one after the other; a stalled client lets any time pass between.

Requests and answers between client and manager are one step: a client counts its deadline from when it sent the
request, so a delay on the way only takes from its rights. What a client may send late without having a right (commit)
is a step of its own. A client that dies is one that never moves again.
"""

from __future__ import annotations

from typing import Any

from polarkv_client.protocol.messages import InventoryItem, OperationResult
from polarkv_client.states import HAS_DISK, READABLE, CommitOutcome, DrainMode, NodeState, ReadOutcome, StoreOutcome
from polarkv_client.states import EntryState as S
from polarkv_dataplane.manager.core.directory import Directory, Granted
from polarkv_dataplane.manager.records.books import USES_DISK
from polarkv_dataplane.manager.records.effects import DiskWork, Work
from polarkv_dataplane.manager.records.model import CacheNode, Entry
from tests.model.audit import require
from tests.model.copying import Renaming, fingerprint, left
from tests.model.physical import Answer, Bytes, Reading, Report, Value, Writing, checksum_of, value_of, whole
from tests.model.scope import LATE_MS, Scope

KEYS = (b"\x00" * 32, b"\x01" * 32)
LENGTH_BYTES = 4000
STRIDE_BYTES = 4096
NODE = 1
NUMBERS_A_LIFE = 1_000_000  # no two lives of a manager share a number

Action = tuple[Any, ...]
Order = tuple[int, int]  # the name of each key: which of two is called first never matters


class World:
    """All state. Copied by ``copy_of``, so plain fields only; ``scope`` is the same object for all."""

    def __init__(self, scope: Scope) -> None:
        self.now = 1
        self.life = 0
        self.directory = Directory(scope.settings, 0)
        self.slot: Bytes = (None, None, None)
        self.memory = 0
        self.memories: dict[int, int] = {}  # by incarnation: which life of the memory it is about
        self.files: dict[int, Bytes] = {}
        self.clients: list[Writing | Reading | None] = [None, None]
        self.commands: list[DiskWork] = []
        self.answers: list[Answer] = []
        self.reports: list[Report] = []
        self.incarnation = 0  # as the node knows it; 0: it must register
        self.last_incarnation = 0
        self.fresh = True
        self.attached = False
        self.ghosts: set[int] = set()  # keys that a stale inventory named: their files are gone, or about to go
        self.unaccounted = 0  # 2: files lie on disk that were not reported; 1: a command from that time is left
        self.budget = [scope.fresh_crashes, 1 + scope.returns, scope.restarts, scope.failures, scope.echoes,
                       scope.drain_budget if scope.drains else 0, scope.pins]  # fmt: skip

    @property
    def node(self) -> CacheNode | None:
        """The record of the node's present life, if the manager and the node agree on it."""
        node = self.directory.ledger.nodes.get(NODE)
        return node if node is not None and node.incarnation == self.incarnation else None

    @property
    def present(self) -> CacheNode:
        """As :attr:`node`, where a step is only possible while there is one."""
        assert self.node is not None
        return self.node

    def _writing(self, place: int) -> Writing:
        client = self.clients[place]
        assert isinstance(client, Writing)
        return client

    def _reading(self, place: int) -> Reading:
        client = self.clients[place]
        assert isinstance(client, Reading)
        return client

    def fingerprint(self) -> tuple[Any, ...]:
        """Equal for worlds that have the same future."""
        order = (0, 1) if self._looks(0) >= self._looks(1) else (1, 0)
        names, now, last = Renaming(), self.now, self.last_incarnation
        core = fingerprint(self.directory, now, names, order)
        clients = sorted([self._client(client, names, order) for client in self.clients if client is not None])
        return (
            core, tuple(clients), _renamed(self.slot, order),
            tuple(sorted([(order[key], _renamed(content, order)) for key, content in self.files.items()])),
            tuple([(command.work.value, order[command.key[0]], names.known(command.operation),
                    command.checksum % 10, command.incarnation == self.incarnation)
                   for command in self.commands]),
            tuple(sorted([(answer.incarnation - last, names.known(answer.operation), answer.result, order[answer.key])
                          for answer in self.answers])),
            tuple([(report.role, report.incarnation - last,
                    tuple(sorted([(order[item.key[0]], item.checksum % 10) for item in report.items])))
                   for report in self.reports]),
            self.incarnation == last, self.fresh, self.attached, tuple(sorted([order[key] for key in self.ghosts])),
            self.unaccounted, tuple(self.budget),
        )  # fmt: skip

    def _looks(self, key: int) -> tuple[Any, ...]:
        """Something about a key by which two can be told apart, whatever they are called."""
        entry = self.directory.ledger.entries.get(KEYS[key])
        clients = [client for client in self.clients if client is not None and client.value[0] == key]
        mine = [(type(client) is Writing, client.last_ms) for client in clients]
        return (
            entry.state or 0 if entry else 0, entry.holds if entry else 0, key in self.files, sorted(mine),
            [value is not None and value[0] == key for value in self.slot],
        )  # fmt: skip

    def _client(self, client: Writing | Reading, names: Renaming, order: Order) -> tuple[Any, ...]:
        key, store = client.value
        now = (order[key], store, client.memory == self.memory, left(client.last_ms + 2, self.now))
        if isinstance(client, Writing):
            return (0, names.known(client.ticket), *now, client.landed, client.aborted)
        return (1, names.known(client.lease), *now, client.released)

    # What can happen next

    def actions(self, scope: Scope) -> list[Action]:
        """Every step that some actor can take now."""
        found: list[Action] = [("time",), ("tick",)]
        idle = next((place for place, client in enumerate(self.clients) if client is None), None)
        for key in (0, 1):
            if idle is not None:
                found += [("begin", idle, key), ("acquire", idle, key)]
            entry = self.directory.ledger.entries.get(KEYS[key])
            state = entry.state if entry else None
            if scope.admin and state in (S.MEMORY, S.MEMORY_AND_DISK, S.DISK):
                found += [("purge", key)] + [("evict", key)] * (state is S.MEMORY_AND_DISK)
            if scope.prefetch and state is S.DISK:
                found.append(("prefetch", key))
            if self.budget[6] and entry:
                found.append(("pin", key))
        for place, client in enumerate(self.clients):
            if client is not None:
                found += self._client_actions(place, client, scope)
        seen_keys: set[bytes] = set()
        for place, command in enumerate(self.commands):
            if scope.ordered_disk and command.key in seen_keys:
                continue
            seen_keys.add(command.key)
            found.append(("execute", place))
            if self.budget[3] and command.work is not Work.PURGE:
                found.append(("fail", place))
        for place in range(len(self.answers)):
            found += [("answer", place)] + [("echo", place)] * (self.budget[4] > 0)
        found += [("report", place) for place in range(len(self.reports))]
        return found + self._fault_actions(scope)

    def _client_actions(self, place: int, client: Writing | Reading, scope: Scope) -> list[Action]:
        if isinstance(client, Writing):
            found: list[Action] = [] if client.aborted else [("abort", place)]
            return [*found, ("land", place)] if client.landed < 2 else [*found, ("commit", place)]
        if client.released:
            return []
        if scope.checksums and not whole(self.slot, client.value):
            return [("report damaged", place), ("give up", place)]
        return [("release", place), ("give up", place)]

    def _fault_actions(self, scope: Scope) -> list[Action]:
        found: list[Action] = []
        node = self.node
        if node is None:
            found += [("register",)] * (self.budget[1] > 0)
        elif not self.attached and not self.commands and node.memory_proved:
            found.append(("attach",))
        if self.commands and not self.attached:
            found.append(("restart disk",))
        if self.budget[0]:
            found.append(("crash",))
        if self.budget[1] and node is not None and scope.unprompted:
            found.append(("return",))
        if self.budget[2]:
            found.append(("restart",))
        if node is not None and self.budget[5]:
            found += [("drain", mode) for mode in scope.drains if (node.state, node.drain_mode) != ("Draining", mode)]
        if node is not None and node.state in (NodeState.DRAINING, NodeState.DRAINED):
            found.append(("cancel drain",))
        return found

    # Steps

    def apply(self, action: Action, scope: Scope) -> str:
        """Take one step of the real core or of the world; return what came of it, for the story."""
        outcome: str = getattr(self, f"_{action[0].replace(' ', '_')}")(scope, *action[1:]) or ""
        for effect in self.directory.ledger.take_effects():
            if isinstance(effect, DiskWork) and self.attached and effect.incarnation == self.incarnation:
                self.commands.append(effect)
        if self.unaccounted == 1 and not self.commands:
            self.unaccounted = 0
        return outcome

    def _time(self, scope: Scope) -> None:
        self.now += 1
        for place, client in enumerate(self.clients):
            written = isinstance(client, Writing) and client.landed == 2  # its commit may come late
            if client is not None and self.now > client.last_ms + written:
                self.clients[place] = None
        if self.node is not None:
            self.directory.members.heard(self.node, self.now)

    def _tick(self, scope: Scope) -> None:
        self.directory.tick(self.now)

    def _begin(self, scope: Scope, place: int, key: int) -> str:
        before = self.directory.ledger.entries.get(KEYS[key])
        state = before.state if before else None
        tenant = self.directory.ledger.tenant(1)
        granted = self.directory.begin_store([KEYS[key]], [LENGTH_BYTES], tenant, self.now)
        outcome = StoreOutcome(granted.outcomes[0])
        skips = outcome in (StoreOutcome.EXISTS, StoreOutcome.IN_PROGRESS)
        require(state is None or skips, "the second writer skips", state)
        if outcome is StoreOutcome.GRANTED:
            there = {*self.slot, *(value for content in self.files.values() for value in content)}
            there |= {client.value for client in self.clients if isinstance(client, Writing)}
            value = next((key, store) for store in range(99) if (key, store) not in there)
            last_ms = self.now + scope.settings.write_ticket_ms - 1 + LATE_MS
            memory = self.memories[_entry(granted).node.incarnation]
            self.clients[place] = Writing(granted.number, value, memory, last_ms)
        return outcome.name

    def _land(self, scope: Scope, place: int) -> str:
        client = self._writing(place)
        if client.memory == self.memory:
            _, first, second = self.slot
            value = client.value
            self.slot = (None, value, second) if client.landed == 0 else (value, first, value)
        gone = client.aborted and client.landed == 1
        self.clients[place] = None if gone else client._replace(landed=client.landed + 1)
        return "first half" if client.landed == 0 else "second half, header"

    def _commit(self, scope: Scope, place: int) -> str:
        client = self._writing(place)
        self.clients[place] = None
        key, checksum = KEYS[client.value[0]], checksum_of(client.value)
        return CommitOutcome(self.directory.commit_store(client.ticket, [key], [checksum], self.now)[0]).name

    def _abort(self, scope: Scope, place: int) -> None:
        client = self._writing(place)
        self.clients[place] = client._replace(aborted=True) if client.landed < 2 else None
        self.directory.abort_store(client.ticket, [KEYS[client.value[0]]], self.now)

    def _acquire(self, scope: Scope, place: int, key: int) -> str:
        granted = self.directory.acquire_read([KEYS[key]], self.now)
        outcome = ReadOutcome(granted.outcomes[0])
        if outcome is ReadOutcome.GRANTED:
            entry = _entry(granted)
            require(entry.key == KEYS[key] and entry.offset_bytes == 0, "a lease names the extent")
            last_ms = self.now + scope.settings.read_lease_ms - 1 + (0 if scope.prompt_readers else LATE_MS)
            memory = self.memories[entry.node.incarnation]  # a slab server refuses grants of other incarnations
            self.clients[place] = Reading(granted.number, value_of(key, entry.checksum), memory, last_ms)
        return outcome.name

    def _report_damaged(self, scope: Scope, place: int) -> None:
        client = self._reading(place)
        self.clients[place] = None
        self.directory.report_damaged(client.lease, [KEYS[client.value[0]]], True, self.now)

    def _release(self, scope: Scope, place: int) -> None:
        client = self._reading(place)
        self.clients[place] = None
        self.directory.release_read(client.lease, True, self.now)

    def _give_up(self, scope: Scope, place: int) -> None:
        client = self._reading(place)
        self.clients[place] = client._replace(released=True)
        self.directory.release_read(client.lease, False, self.now)

    def _execute(self, scope: Scope, place: int) -> str:
        command = self.commands.pop(place)
        result = getattr(self, f"_disk_{command.work.value}")(scope, command, command.key[0])
        self._answered(command, result)
        return f"{command.work.value} of key {command.key[0]}: {result.name}"

    def _disk_offload(self, scope: Scope, command: DiskWork, key: int) -> OperationResult:
        if scope.checksums and not whole(self.slot, value_of(key, command.checksum)):
            return OperationResult.DAMAGED
        if len(self.files.keys() | {key}) > scope.files:
            require(bool(self.unaccounted), "the disk is never asked for more than it has", sorted(self.files))
            return OperationResult.NO_SPACE
        self.files[key] = self.slot
        self.ghosts.discard(key)
        return OperationResult.OK

    def _disk_load(self, scope: Scope, command: DiskWork, key: int) -> OperationResult:
        if key not in self.files:
            return OperationResult.MISSING
        if scope.checksums and not whole(self.files[key], value_of(key, command.checksum)):
            return OperationResult.DAMAGED
        self.slot = self.files[key]
        return OperationResult.OK

    def _disk_purge(self, scope: Scope, command: DiskWork, key: int) -> OperationResult:
        self.files.pop(key, None)
        return OperationResult.OK

    def _fail(self, scope: Scope, place: int) -> str:
        command = self.commands.pop(place)
        self.budget[3] -= 1
        self._answered(command, OperationResult.FAILED)
        return f"{command.work.value} of key {command.key[0]}"

    def _answered(self, command: DiskWork, result: OperationResult) -> None:
        if command.operation:
            self.answers.append(Answer(command.incarnation, command.operation, result, command.key[0]))

    def _echo(self, scope: Scope, place: int) -> str:
        self.budget[4] -= 1
        self.answers.append(self.answers[place])
        return self._answer(scope, place)

    def _answer(self, scope: Scope, place: int) -> str:
        answer = self.answers.pop(place)
        node = self.directory.ledger.nodes.get(NODE)
        due = node is not None and answer.incarnation == node.incarnation and answer.operation in node.operations
        before = None if due else fingerprint(self.directory, self.now, Renaming())
        node = self.directory.members.present(NODE, answer.incarnation)
        if node is not None:
            self.directory.tiering.complete(node, answer.operation, answer.result, self.now)
        after = None if due else fingerprint(self.directory, self.now, Renaming())
        require(before == after, "a completion of another operation or incarnation changes nothing", answer)
        return f"about key {answer.key}: {answer.result.name}{'' if due else ', of the past'}"

    def _report(self, scope: Scope, place: int) -> str:
        report = self.reports.pop(place)
        node = self.directory.members.present(NODE, report.incarnation)
        if node is None:
            return f"of {report.role}, of a former life: dropped"
        if report.role == "memory":
            self.directory.members.prove_memory(node, report.items, True, self.now)
        else:
            doomed = {command.key[0] for command in self.commands if not command.operation}
            self.ghosts |= {item.key[0] for item in report.items} - (self.files.keys() - doomed)
            self.directory.members.prove_disk(node, report.items, self.now)
            if report.incarnation == self.incarnation:
                self.unaccounted = 1
        return f"of {report.role}: {[item.key[0] for item in report.items]}"

    def _register(self, scope: Scope) -> str:
        """The slab server presents itself, and scans its memory for valid headers."""
        self.budget[1] -= 1
        fresh, self.fresh = self.fresh, False
        last = 0 if fresh else self.last_incarnation
        node = self.directory.members.join("n", last, STRIDE_BYTES, STRIDE_BYTES, fresh, self.now)
        self.incarnation = self.last_incarnation = node.incarnation
        self.memories[node.incarnation] = self.memory
        self.attached, self.unaccounted = False, 2
        header = self.slot[0]
        writers = [client for client in self.clients if isinstance(client, Writing) and client.memory == self.memory]
        # Without checksums nothing tells a chunk from one that a writer, or a load, of the former life will overwrite.
        doubtful = any(client.landed < 2 for client in writers)
        doubtful |= any(command.work is Work.LOAD for command in self.commands)
        doubtful &= not scope.checksums
        items = () if header is None or doubtful else (_item(header[0], header, 0),)
        self._send(Report("memory", self.incarnation, items))
        return "fresh" if fresh else "with its memory"

    def _attach(self, scope: Scope) -> None:
        """The disk server has finished what it did for the former life, and joins the present one."""
        self.attached = True
        self.directory.members.attach_disk(self.present, scope.files * STRIDE_BYTES, self.now)
        found = [(key, content[0]) for key, content in sorted(self.files.items())]
        self._send(Report("disk", self.incarnation, tuple([_item(key, value, -1) for key, value in found if value])))

    def _send(self, report: Report) -> None:
        self.reports = [*self.reports[-1:], report]

    def _restart_disk(self, scope: Scope) -> None:
        self.commands = []

    def _crash(self, scope: Scope) -> None:
        self.budget[0] -= 1
        self.slot = (None, None, None)
        self.memory += 1
        self.fresh = True
        self.commands = []
        self.incarnation, self.attached = 0, False

    def _return(self, scope: Scope) -> None:
        self.incarnation, self.attached = 0, False

    def _restart(self, scope: Scope) -> None:
        self.budget[2] -= 1
        self.life += 1
        self.directory = Directory(scope.settings, self.life * NUMBERS_A_LIFE)
        self.directory.members.known("n", NODE, self.last_incarnation)
        self.attached = False

    def _drain(self, scope: Scope, mode: str) -> None:
        self.budget[5] -= 1
        self.directory.members.drain(self.present, DrainMode(mode), self.now)

    def _cancel_drain(self, scope: Scope) -> None:
        self.directory.members.cancel_drain(self.present)

    def _purge(self, scope: Scope, key: int) -> str:
        return str(self.directory.evict([KEYS[key]], purge=True, now=self.now)[0])

    def _evict(self, scope: Scope, key: int) -> str:
        return str(self.directory.evict([KEYS[key]], purge=False, now=self.now)[0])

    def _prefetch(self, scope: Scope, key: int) -> None:
        self.directory.prefetch([KEYS[key]], self.now)

    def _pin(self, scope: Scope, key: int) -> None:
        self.budget[6] -= 1
        self.directory.pin([KEYS[key]], self.now + 2, self.now)

    # What must hold

    def check(self, scope: Scope) -> None:
        """Compare what the core believes with what is there. Raises Violation."""
        for client in self.clients:
            if isinstance(client, Reading) and client.memory == self.memory and not scope.checksums:
                require(whole(self.slot, client.value), "a load returns the bytes stored under its key, or a miss",
                        f"wanted {client.value}", f"found {self.slot}")  # fmt: skip
        node = self.node
        if node is None:
            return
        entries = [entry for entry in self.directory.ledger.entries.values() if entry.node is node]
        for entry in entries:
            key = entry.key[0]
            if entry.state in READABLE and not scope.checksums:
                good = whole(self.slot, value_of(key, entry.checksum))
                require(good, "what is readable lies whole in its slot", f"key {key}", self.slot)
            if entry.state in HAS_DISK and self.attached and key not in self.ghosts:
                content = self.files.get(key, (None, None, None))
                good = whole(content, value_of(key, entry.checksum))
                require(good, "what is on disk lies whole in its file", f"key {key}", content)
        if self.attached and not self.unaccounted:
            deleted = {command.key[0] for command in self.commands if command.work is Work.PURGE}
            counted = {entry.key[0] for entry in entries if entry.state in USES_DISK}
            require(self.files.keys() <= counted | deleted, "every file is accounted for", sorted(self.files), counted)

    def check_lookups(self) -> None:
        """Lookups change nothing, and see nothing that was not committed."""
        before = fingerprint(self.directory, self.now, Renaming())
        tiers = self.directory.exists(KEYS)
        self.directory.match_prefix(KEYS)
        require(fingerprint(self.directory, self.now, Renaming()) == before, "a lookup changes nothing")
        require(not self.directory.ledger.effects, "a lookup asks for nothing")
        for key, tier in zip(KEYS, tiers, strict=True):
            entry = self.directory.ledger.entries.get(key)
            visible = entry is not None and entry.state not in (S.WRITING, S.PURGING) and entry.node.serving
            require(bool(tier) == visible, "a chunk is visible from its commit on", tier)


def _renamed(found: Bytes, order: Order) -> tuple[Value | None, ...]:
    return tuple([value and (order[value[0]], value[1]) for value in found])


def _entry(granted: Granted) -> Entry:
    """The entry of a grant for one key."""
    assert granted.entries[0] is not None
    return granted.entries[0]


def _item(key: int, value: Value, offset_bytes: int) -> InventoryItem:
    return InventoryItem(KEYS[key], LENGTH_BYTES, checksum_of(value), 1, offset_bytes)
