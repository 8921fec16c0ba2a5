"""The scheduler's half of the vLLM connector: what is in the cache, what to load, what to store.

It plans and never touches KV. What it stores is what the engine has said is computed: a chunk is stored in the step
after the one that computed it, so that nothing that was computed from a failed load, or of rejected draft tokens, is
ever stored.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from polarkv_client.client import Operations
from polarkv_client.connectors.guard import complaints
from polarkv_client.connectors.patience import Patience
from polarkv_client.connectors.settings import ConnectorConfig
from polarkv_client.connectors.vllm.lookups import FRESH_S, Lookup, Lookups
from polarkv_client.connectors.vllm.meter import Counts
from polarkv_client.connectors.vllm.plan import SCRATCH, Chains, RankIdentity, StepPlan, Transfer
from polarkv_client.keys import KEY_BYTES
from polarkv_client.states import Tier

log = logging.getLogger(__name__)
_WAIT_S = 0.002  # a step waits for lookups for so long, together: a near cache answers within it
Extras = Callable[[Any, int], tuple[str, dict[int, bytes]] | None]
Matched = tuple[int | None, bool]


@dataclass
class Tracked:
    """One request, from its arrival to its end."""

    request: Any
    chains: Chains
    lookup: Lookup | None = None
    local_tokens: int = 0  # what the engine had itself when it was last told what can be loaded
    planned_chunks: int = 0  # chunks that are stored, or have been given to the workers to store
    holds: bool = False  # workers may be reading its blocks
    loading: bool = False  # an asynchronous load is on its way
    loaded: dict[int, int] = field(default_factory=dict)  # block to chunk, of the last load
    loads: bool = True  # False after a failed load: it is computed, once and for all
    stores: bool = True  # False: the weights may have been replaced while it was computed
    begun_at: int | None = None  # tokens that it had when a step first computed it; None: none has
    tiers: list[Tier] = field(default_factory=list)
    computed: int = 0  # tokens, when this was last looked at
    goal: int = 0  # tokens at which the prompt is computed
    since: tuple[float, int] | None = None  # when computing began, and what the engine had computed in all by then


class SchedulerSide:
    """Answers vLLM's scheduler. All calls come from its one thread.

    Args:
        block_tokens: tokens in one of the engine's blocks; ``config.chunk_tokens`` is a multiple of it.
        ranks: how many workers there are.
        extras: of a request and a chunk's tokens, what beside the tokens decides the KV: the adapter's fingerprint, and
            bytes by chunk. None: not known, and the request is left alone.
        note: counts something.
    """

    def __init__(
        self, config: ConnectorConfig, operations: Operations, block_tokens: int, ranks: int, extras: Extras,
        note: Callable[[str, float], None], clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._config = config
        self._chunk_tokens = config.chunk_tokens
        self._blocks_per_chunk = config.chunk_tokens // block_tokens
        self._block_tokens = block_tokens
        self._ranks = ranks
        self._extras = extras
        self._note = note
        self._gate = operations.gate
        self._clock = clock
        self._patience = Patience.of(config, operations)
        self._computed = 0
        self._lookups = Lookups(operations, config.lookup_deadline_ms, note, clock)
        self._identities: list[RankIdentity] = []
        self._at_start: list[RankIdentity] = []
        self._tracked: dict[str, Tracked] = {}
        self._loads: list[Transfer] = []
        self._stores: list[Transfer] = []
        self._finished: set[str] = set()
        self._wait_left_s = _WAIT_S

    def identify(self, identities: Sequence[RankIdentity]) -> None:
        """What the workers said of themselves. Without all of them nothing is loaded or stored."""
        ordered = sorted(identities, key=lambda each: each.rank)
        if [each.rank for each in ordered] == list(range(self._ranks)):
            self._identities = self._at_start = ordered

    def renew(self) -> bool:
        """Of the engine's caches nothing is to be used any more, because its weights may be replaced.

        What it stores from here on is its own: in no other namespace, also not in one of an earlier time of its own.
        Requests that are here are left alone. Returns whether none of them is being loaded.
        """
        own = f"replaced {secrets.token_hex(16)}"
        self._identities = [
            replace(each, namespace=replace(each.namespace, weights_fingerprint=own)) for each in self._at_start
        ]
        for tracked in self._tracked.values():
            tracked.loads = tracked.stores = False
            tracked.lookup = None
        log.warning(
            "the engine's caches were reset, as before its weights are replaced: it shares no chunks with others any "
            "more (weights_may_change: false, if they never are)"
        )
        return not any(each.loading for each in self._tracked.values())

    def new_request(self, request: Any) -> None:
        """A request has come: ask at once, so that the answer is there when it is its turn."""
        tracked = self._track(request)
        if tracked is not None and self._config.load != "off" and self._usable_chunks(request):
            self._ask(tracked)

    def matched(self, request: Any, computed_tokens: int) -> Matched:
        """How many tokens beyond ``computed_tokens`` can be loaded, and whether that is done while others compute.

        None: the answer is on its way, ask again. After the lookup's deadline it is a miss.
        """
        tracked = self._track(request)
        usable = self._usable_chunks(request)
        wanted = tracked is not None and tracked.loads and self._config.load != "off"
        if tracked is None or not wanted or usable * self._chunk_tokens <= computed_tokens:
            return 0, False
        if getattr(request, "skip_reading_prefix_cache", False):
            return 0, False
        tiers = self._answer(tracked)
        if tiers is None:
            return None, False
        tracked.goal = request.num_tokens
        self._begins(tracked, computed_tokens)
        chunks = min(len(tiers), usable)
        if not self._worth(tracked, tiers[:chunks]):
            return 0, False
        tokens = chunks * self._chunk_tokens - computed_tokens
        tracked.tiers = tiers
        tracked.local_tokens = computed_tokens
        tracked.planned_chunks = max(tracked.planned_chunks, len(tiers))
        return (tokens, self._config.load == "async") if tokens > 0 else (0, False)

    def allocated(self, request: Any, blocks: Sequence[int], tokens: int) -> None:
        """Blocks were found for ``tokens`` that :meth:`matched` said can be loaded; 0: nothing is to be loaded."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None or tokens <= 0:
            return
        tracked.lookup = None
        tracked.since, tracked.computed = None, tracked.local_tokens + tokens
        per_chunk = self._blocks_per_chunk
        first_block = tracked.local_tokens // self._block_tokens
        end_block = first_block + tokens // self._block_tokens
        first, end = first_block // per_chunk, -(-end_block // per_chunk)
        places = range(first * per_chunk, end * per_chunk)
        wanted = tuple(blocks[place] if first_block <= place < end_block else SCRATCH for place in places)
        keys = tracked.chains.until(end, request.all_token_ids)
        chunk_of = {block: place // per_chunk for place, block in zip(places, wanted, strict=True)}
        tracked.loaded = {block: chunk for block, chunk in chunk_of.items() if block != SCRATCH}
        under_way = sum(len(each.loaded) for each in self._tracked.values() if each.loading or each is tracked)
        wait_ms = self._patience.wait_ms(under_way * self._block_tokens, self._config.load_deadline_ms)
        tracked.loading = self._config.load == "async"
        for tier, count in self.hit_tiers(request, tokens).items():
            self._note(f"hit_tokens_{tier.name.lower()}", count)
        # Last: what raised before is told to the workers as a load that failed, and a request must be told once.
        self._loads.append(Transfer(request.request_id, _cut(keys, first, end), wanted, wait_ms))

    def fail_load(self, request: Any, blocks: Sequence[int], tokens: int) -> None:
        """The load of ``tokens`` could not be planned: the workers report it as failed, so that nobody waits for it."""
        tracked = self._tracked.get(request.request_id)
        first = tracked.local_tokens // self._block_tokens if tracked is not None else 0
        lost = tuple(blocks[first : first + tokens // self._block_tokens])
        if tracked is not None:
            tracked.loaded = dict.fromkeys(lost, 0)
            tracked.loading = self._config.load == "async"
        self._loads.append(Transfer(request.request_id, (), lost))

    def hit_tiers(self, request: Any, tokens: int) -> dict[Tier, int]:
        """Of ``tokens`` that are loaded, how many lie where."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return {}
        found = {Tier.MEMORY: 0, Tier.DISK: 0}
        place = tracked.local_tokens
        end = place + tokens
        while place < end:
            chunk = place // self._chunk_tokens
            step = min((chunk + 1) * self._chunk_tokens, end) - place
            found[tracked.tiers[chunk] if chunk < len(tracked.tiers) else Tier.MEMORY] += step
            place += step
        return {tier: count for tier, count in found.items() if count}

    def plan(
        self, scheduled: Sequence[str], preempted: Sequence[str], blocks_of: Callable[[str], Sequence[int]]
    ) -> StepPlan:
        """What the workers do in the step that was scheduled; ``blocks_of`` tells a request's blocks in order."""
        for name in preempted:
            if (tracked := self._tracked.get(name)) is not None:
                # Workers end its stores before the blocks are used by others. What was stored is found by a lookup.
                tracked.lookup = None
                tracked.planned_chunks = 0
                tracked.holds = False
                tracked.begun_at = None
        running = [self._tracked[name] for name in scheduled if name in self._tracked]
        self._advance(running)
        for tracked in running:
            self._look(tracked, partial(blocks_of, tracked.request.request_id))
        made = StepPlan(tuple(self._loads), tuple(self._stores), frozenset(preempted), frozenset(self._finished))
        self._loads, self._stores, self._finished = [], [], set()
        self._wait_left_s = _WAIT_S
        return made

    def arrived(self, received: set[str], invalid_blocks: set[int]) -> None:
        """What the workers reported of a step: requests whose load has ended, and blocks that hold no KV."""
        if invalid_blocks:
            for each in self._tracked.values():
                bad = [each.loaded[block] for block in invalid_blocks if block in each.loaded]
                if bad:
                    each.loads = False
                    each.planned_chunks = min(each.planned_chunks, *bad)
        for name in received:
            if (tracked := self._tracked.get(name)) is not None:
                tracked.loading = False
                self._begins(tracked, tracked.computed)

    def measured(self, counts: Counts) -> None:
        """What the workers counted in a step: how long loads took is what the gate goes by from then on."""
        seconds = counts.get("load_seconds")
        if self._gate is None or not isinstance(seconds, list) or not seconds:
            return
        tiers: list[Tier] = []
        for tier in (Tier.MEMORY, Tier.DISK):
            chunks = counts.get(f"chunks_loaded_{tier.name.lower()}", 0)
            assert not isinstance(chunks, list)
            tiers += [tier] * round(chunks / len(seconds))  # a load's, on average
        lengths = [self._identities[0].chunk_bytes] * len(tiers)
        self._gate.loaded(tiers, lengths, sum(seconds) / len(seconds))

    def finished(self, request: Any, blocks: Sequence[int]) -> bool:
        """A request has ended. Returns whether its blocks must be held until the workers say that all is stored."""
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is None or tracked.loading:
            # The engine holds the blocks of a load by itself; holding them twice would free them twice.
            return False
        self._advance([tracked])
        self._look(tracked, lambda: blocks)
        if tracked.holds:
            self._finished.add(request.request_id)
        return tracked.holds

    @property
    def unsent(self) -> bool:
        """Whether the workers have not been told all yet."""
        return bool(self._stores or self._finished)

    def close(self) -> None:
        """Ask nothing more."""
        self._lookups.close()

    def _track(self, request: Any) -> Tracked | None:
        tracked = self._tracked.get(request.request_id)
        # Of a session that goes on with further input, the engine changes tokens: its keys would be those of others.
        if tracked is None and self._identities and not getattr(request, "resumable", False):
            known = self._extras(request, self._chunk_tokens)
            if known is None:
                return None
            lora_id, extras = known
            namespaces = [replace(each.namespace, lora_id=lora_id) for each in self._identities]
            tracked = self._tracked[request.request_id] = Tracked(request, Chains(namespaces, extras))
        return tracked

    def _usable_chunks(self, request: Any) -> int:
        """A load inside the step must leave a token to be computed; one between steps need not."""
        return int((request.num_tokens - (self._config.load != "async")) // self._chunk_tokens)

    def _ask(self, tracked: Tracked) -> Lookup:
        chunks = tracked.request.num_tokens // self._chunk_tokens
        wait_ms = self._patience.wait_ms(chunks * self._chunk_tokens, self._config.lookup_deadline_ms)
        tracked.lookup = self._lookups.ask(tracked.chains.until(chunks, tracked.request.all_token_ids), wait_ms)
        return tracked.lookup

    def _worth(self, tracked: Tracked, tiers: list[Tier]) -> bool:
        """Whether loading is faster than computing, by the calibration's rates; decided once for each answer."""
        gate, lookup = self._gate, tracked.lookup
        if gate is None or lookup is None or not tiers:
            return True
        if lookup.worth is None:
            lookup.worth = gate.admit([self._identities[0].chunk_bytes] * len(tiers), self._chunk_tokens, lambda: tiers)
            if not lookup.worth:
                self._note("loads_skipped", 1)
        return lookup.worth

    def _answer(self, tracked: Tracked) -> list[Tier] | None:
        now = self._clock()
        lookup = tracked.lookup
        if lookup is None or (lookup.done and now > max(lookup.asked_at + FRESH_S, lookup.ends_at)):
            lookup = self._ask(tracked)
        if not lookup.done and self._wait_left_s > 0 and lookup.future is not None:
            began = time.monotonic()
            with contextlib.suppress(TimeoutError):
                lookup.future.exception(self._wait_left_s)
            self._wait_left_s -= time.monotonic() - began
        if lookup.done:
            return lookup.tiers()
        if now < lookup.ends_at:
            return None
        if not lookup.late:
            lookup.late = True
            self._note("lookups_late", 1)
        return []

    def _begins(self, tracked: Tracked, computed_tokens: int) -> None:
        """The engine computes this request from here on."""
        tracked.computed = computed_tokens
        tracked.since = self._clock(), self._computed

    def _advance(self, running: Sequence[Tracked]) -> None:
        """Measure how fast prompts are computed: by what the engine computed, of all requests, during one of them."""
        try:
            for each in running:  # first of all of them: a step computes several
                computed = _computed(each.request)
                self._computed += max(computed - each.computed, 0)
                each.computed = computed
            for each in running:
                if each.since is None or each.computed < each.goal:
                    continue
                (began, before), each.since = each.since, None
                if self._computed - before >= self._chunk_tokens:  # what is shorter is mostly a step's own cost
                    self._patience.computed(self._computed - before, self._clock() - began)
        except Exception as error:
            complaints.note("measuring", error)

    def _look(self, tracked: Tracked, blocks_of: Callable[[], Sequence[int]]) -> None:
        """See what has been computed, and plan to store it.

        A defect here must neither keep a load from the workers nor let go of blocks that they read.
        """
        try:
            if self._config.store and tracked.stores:
                self._store(tracked, blocks_of)
        except Exception as error:
            complaints.note("planning a store", error)

    def _store(self, tracked: Tracked, blocks_of: Callable[[], Sequence[int]]) -> None:
        """Plan to store what has been computed and not been stored."""
        request = tracked.request
        computed = _computed(request)
        # What it begins with may be another connector's load: there for certain when a token after it is computed.
        if tracked.begun_at is None:
            tracked.begun_at = computed
        if computed <= tracked.begun_at:
            return
        if tracked.lookup is not None and tracked.lookup.done:  # the engine had all of it itself, and asked for nothing
            tracked.planned_chunks = max(tracked.planned_chunks, len(tracked.lookup.tiers()))
            tracked.lookup = None
        first, end = tracked.planned_chunks, computed // self._chunk_tokens
        if end <= first:
            return
        per_chunk = self._blocks_per_chunk
        blocks = tuple(blocks_of()[first * per_chunk : end * per_chunk])
        if len(blocks) < (end - first) * per_chunk:
            return
        keys = tracked.chains.until(end, request.all_token_ids)
        self._stores.append(Transfer(request.request_id, _cut(keys, first, end), blocks))
        tracked.planned_chunks = end
        tracked.holds = True


def _computed(request: Any) -> int:
    """Tokens of it that the engine has computed for good."""
    return int(min(request.num_computed_tokens - request.num_in_flight_tokens, request.num_tokens))


def _cut(keys: Sequence[bytes], first: int, end: int) -> tuple[bytes, ...]:
    return tuple(joined[first * KEY_BYTES : end * KEY_BYTES] for joined in keys)
