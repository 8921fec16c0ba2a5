"""The scheduler's half of the vLLM connector, without vLLM: what it asks, answers and plans."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from polarkv_client.calibration import Rates
from polarkv_client.connectors.settings import ConnectorConfig
from polarkv_client.connectors.vllm.lookups import interleave, whole_chunks
from polarkv_client.connectors.vllm.plan import SCRATCH, RankIdentity
from polarkv_client.connectors.vllm.scheduler import SchedulerSide
from polarkv_client.gate import LoadGate
from polarkv_client.keys import Namespace, chunk_keys
from polarkv_client.states import Tier
from tests.support.waiting import wait_until

BLOCK, CHUNK = 4, 8
MEMORY, DISK = Tier.MEMORY, Tier.DISK


@dataclass
class Cache:
    """Stands for the client: knows keys, and can be made to wait."""

    known: dict[bytes, Tier] = field(default_factory=dict)
    asked: list[list[bytes]] = field(default_factory=list)
    open: threading.Event = field(default_factory=threading.Event)
    gate: LoadGate | None = None

    def scope(self, deadline_ms: int) -> int:
        return deadline_ms

    def match_prefix(self, keys: list[bytes], _: int) -> list[Tier]:
        self.asked.append(keys)
        self.open.wait(30)
        tiers = [self.known.get(key, Tier.NONE) for key in keys]
        return tiers[: next((place for place, tier in enumerate(tiers) if not tier), len(tiers))]


@dataclass
class Half:
    side: SchedulerSide
    cache: Cache
    counts: Counter[str]
    now: list[float]
    namespaces: list[Namespace]

    def know(self, tokens: Sequence[int], *tiers: Tier, ranks: Sequence[int] | None = None) -> None:
        for rank, namespace in enumerate(self.namespaces):
            if ranks is None or rank in ranks:
                self.cache.known |= dict(zip(chunk_keys(namespace, tokens), tiers, strict=False))

    def matched(self, request: Any, computed: int = 0) -> tuple[int | None, bool]:
        def answer() -> list[tuple[int | None, bool]]:
            found = self.side.matched(request, computed)
            return [found] if found[0] is not None else []

        return wait_until(answer, "the lookup")[0]

    def plan(self, *scheduled: Any, preempted: Sequence[str] = (), blocks: Sequence[int] = range(1, 100)) -> Any:
        return self.side.plan([each.request_id for each in scheduled], preempted, lambda _: blocks)


def request(length: int, name: str = "r", **more: Any) -> Any:
    tokens = [place * 3 + 1 for place in range(length)]
    base = {"num_computed_tokens": 0, "num_in_flight_tokens": 0, "skip_reading_prefix_cache": False}
    return SimpleNamespace(request_id=name, all_token_ids=tokens, num_tokens=length, **{**base, **more})


Make = Callable[..., Half]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Half] = []

    def build(ranks: int = 1, gate: LoadGate | None = None, **settings: Any) -> Half:
        config = ConnectorConfig(endpoint="tcp://h:1", chunk_tokens=CHUNK, **settings)
        cache, counts, now = Cache(gate=gate), Counter[str](), [0.0]
        cache.open.set()

        def note(name: str, amount: float) -> None:
            counts[name] += amount  # type: ignore[assignment]

        side = SchedulerSide(config, cache, BLOCK, ranks, lambda *_: ("", {}), note, lambda: now[0])  # type: ignore[arg-type]
        namespaces = [Namespace("m", CHUNK, tp_rank=rank, tp_size=ranks) for rank in range(ranks)]
        side.identify([RankIdentity(rank, each, 64) for rank, each in enumerate(namespaces)])
        made.append(Half(side, cache, counts, now, namespaces))
        return made[-1]

    yield build
    for each in made:
        each.cache.open.set()
        each.side.close()


def test_one_question_for_a_request_however_often_it_is_asked(make: Make) -> None:
    half = make()
    one = request(20)
    half.know(one.all_token_ids, MEMORY, DISK)
    half.side.new_request(one)
    assert [half.matched(one) for _ in range(5)] == [(16, True)] * 5
    assert len(half.cache.asked) == 1


def test_an_answer_on_its_way_is_asked_for_again_and_after_the_deadline_it_is_a_miss(make: Make) -> None:
    half = make(lookup_deadline_ms=100)
    one = request(20)
    half.know(one.all_token_ids, MEMORY, MEMORY)
    half.cache.open.clear()
    half.side.new_request(one)
    assert half.side.matched(one, 0) == (None, False)
    half.now[0] = 0.099
    assert half.side.matched(one, 0) == (None, False)
    half.now[0] = 0.1
    assert half.side.matched(one, 0) == (0, False)
    assert half.side.matched(one, 0) == (0, False)
    assert half.counts["lookups_late"] == 1


def computes(half: Half, one: Any, seconds: float) -> None:
    """The engine computes a prompt whole."""
    assert half.matched(one)[0] == 0
    one.num_computed_tokens, one.num_in_flight_tokens = one.num_tokens, one.num_tokens
    half.plan(one)
    half.now[0] += seconds
    one.num_in_flight_tokens = 0
    half.plan(one)
    half.side.finished(one, ())


def loads(half: Half, one: Any) -> int:
    """The engine finds blocks for what can be loaded; so many tokens."""
    tokens, _ = half.matched(one)
    assert tokens
    half.side.allocated(one, range(1, 100), tokens)
    return tokens


def test_no_request_waits_longer_than_a_part_of_what_computing_takes(make: Make) -> None:
    """For an answer, and for a load; of several loads at once, a part of computing all of them."""
    half = make(patience=0.5)
    computes(half, request(40, "measured"), 4.0)
    half.cache.open.clear()
    late = request(8, "late")
    half.side.new_request(late)
    began = half.now[0]
    half.now[0] = began + 0.19  # the deadline is sooner than half of 0.8 s
    assert half.side.matched(late, 0) == (None, False)
    half.cache.open.set()
    for number in range(6):
        computes(half, request(40, f"faster-{number}"), 0.6)
    half.cache.open.clear()
    half.side.new_request(again := request(8, "again"))
    began = half.now[0]
    half.now[0] = began + 0.059
    assert half.side.matched(again, 0) == (None, False)
    half.now[0] = began + 0.061
    assert half.side.matched(again, 0) == (0, False)
    assert half.counts["lookups_late"] == 1

    half.cache.open.set()
    both = [request(80, "one"), request(160, "two")]
    half.know(both[1].all_token_ids, *[MEMORY] * 20)
    assert [loads(half, one) for one in both] == [80, 160]
    assert [each.wait_ms for each in half.plan().loads] == [600, 1800]
    half.side.arrived({"one", "two"}, set())
    loads(half, request(80, "three"))
    assert half.plan().loads[0].wait_ms == 600


@pytest.mark.parametrize("loading", ["async", "sync"])
def test_what_was_loaded_was_not_computed(make: Make, loading: str) -> None:
    """What is measured is what the engine has computed, of all requests, in the time of one."""
    half = make(patience=1, load=loading, load_deadline_ms=60_000)
    computes(half, request(40, "measured"), 16.0)
    one = request(80)
    half.know(one.all_token_ids, *[MEMORY] * 5)
    assert loads(half, one) == 40
    half.plan(*([one] if loading == "sync" else []))
    half.now[0] += 100  # for the load
    half.side.arrived({one.request_id} if loading == "async" else set(), set())
    half.now[0] += 8
    one.num_computed_tokens = 80
    half.plan(one)
    other = request(40, "other")
    half.know(other.all_token_ids, *[MEMORY] * 5)
    tokens = loads(half, other)
    # The faster of the two measurements; inside a step, a load and what follows are one, which is none.
    paces = {"async": 0.2, "sync": 0.4}
    assert half.plan().loads[0].wait_ms == round(1000 * paces[loading] * tokens)


def test_an_old_answer_is_asked_for_again(make: Make) -> None:
    half = make()
    one = request(20)
    assert half.matched(one) == (0, False)
    half.know(one.all_token_ids, MEMORY, MEMORY)
    assert half.matched(one) == (0, False)
    half.now[0] = 2.0
    assert half.matched(one) == (16, True)


def test_no_question_without_a_whole_chunk_or_where_there_is_nothing_to_gain(make: Make) -> None:
    half = make()
    assert half.matched(request(CHUNK - 1, "short")) == (0, False)
    assert half.matched(request(20, "own"), 16) == (0, False)
    assert half.matched(request(20, "logprobs", skip_reading_prefix_cache=True)) == (0, False)
    assert half.cache.asked == []


@pytest.mark.parametrize(("mode", "tokens"), [("async", 16), ("sync", 8), ("off", 0)])
def test_inside_a_step_a_token_is_left_to_compute(make: Make, mode: str, tokens: int) -> None:
    half = make(load=mode)
    one = request(16)
    half.know(one.all_token_ids, MEMORY, MEMORY)
    assert half.matched(one) == (tokens, mode == "async" and tokens > 0)


def test_all_ranks_must_have_a_chunk(make: Make) -> None:
    half = make(ranks=2)
    one = request(32)
    half.know(one.all_token_ids, MEMORY, MEMORY, MEMORY, ranks=[0])
    half.know(one.all_token_ids, MEMORY, DISK, ranks=[1])
    assert half.matched(one) == (16, True)
    assert len(half.cache.asked) == 1
    assert half.side.hit_tiers(one, 16) == {MEMORY: 8, DISK: 8}
    half.side.allocated(one, range(1, 9), 16)
    (load,) = half.plan(one).loads
    for rank, namespace in enumerate(half.namespaces):
        assert load.rank_keys(rank) == chunk_keys(namespace, one.all_token_ids[:16])


def test_without_all_ranks_nothing_is_asked(make: Make) -> None:
    half = make(ranks=2)
    half.side._identities = []
    half.side.identify([RankIdentity(1, half.namespaces[1], 64)])
    assert half.matched(request(20)) == (0, False)


def test_a_load_in_the_middle_of_a_chunk(make: Make) -> None:
    """Blocks that the engine has itself are shared with others: nothing is written to them."""
    half = make()
    one = request(20)
    half.know(one.all_token_ids, MEMORY, MEMORY)
    assert half.matched(one, BLOCK) == (12, True)
    half.side.allocated(one, [11, 12, 13, 14, 15], 12)
    (load,) = half.plan(one).loads
    assert load.blocks == (SCRATCH, 12, 13, 14)
    assert load.chunks == 2


def test_what_was_computed_is_stored_a_step_later_and_once(make: Make) -> None:
    half = make()
    one = request(20)
    half.matched(one)
    assert half.plan(one).stores == ()
    one.num_computed_tokens, one.num_in_flight_tokens = 20, 20
    assert half.plan(one).stores == ()  # the step may have failed: nobody has said anything yet
    one.num_in_flight_tokens = 4
    (store,) = half.plan(one, blocks=[11, 12, 13, 14, 15]).stores
    assert (store.chunks, store.blocks) == (2, (11, 12, 13, 14))
    assert half.plan(one).stores == ()


def test_drafts_that_no_one_has_accepted_are_not_stored(make: Make) -> None:
    half = make()
    one = request(15)
    half.matched(one)
    half.plan(one)
    one.num_computed_tokens = 19
    (store,) = half.plan(one).stores
    assert store.chunks == 1


def test_what_is_in_the_cache_is_not_stored_again(make: Make) -> None:
    half = make()
    one = request(24)
    half.know(one.all_token_ids, MEMORY, MEMORY)
    half.side.new_request(one)
    assert half.matched(one, 24) == (0, False)  # the engine has it too, and does not ask
    one.num_computed_tokens = 23
    half.plan(one)
    one.num_computed_tokens = 24
    wait_until(lambda: half.side._tracked["r"].lookup.done, "the answer")  # type: ignore[union-attr]
    (store,) = half.plan(one).stores
    assert store.rank_keys(0) == chunk_keys(half.namespaces[0], one.all_token_ids)[2:]


def test_blocks_are_held_when_they_may_be_read_and_only_then(make: Make) -> None:
    half = make()
    one, two, short = request(20, "one"), request(20, "two"), request(7, "short")
    for each in (one, two, short):
        half.matched(each)
        half.plan(each)
        each.num_computed_tokens = each.num_tokens
    assert half.side.finished(short, []) is False
    assert half.side.finished(one, range(1, 6)) is True
    made = half.plan()
    assert (made.finished, [each.request_id for each in made.stores]) == ({"one"}, ["one"])
    assert half.plan().finished == frozenset()
    assert half.side.finished(request(20, "never seen"), []) is False
    two.num_computed_tokens = 0
    assert half.side.finished(two, []) is False


def test_a_request_that_ends_during_its_load_is_held_by_the_engine_alone(make: Make) -> None:
    half = make()
    one = request(20)
    half.know(one.all_token_ids, MEMORY, MEMORY)
    assert loads(half, one) == 16
    one.num_computed_tokens = 16
    assert half.side.finished(one, range(1, 6)) is False
    assert [load.request_id for load in half.plan().loads] == ["r"]


def test_a_failed_load_is_computed_and_what_was_missing_is_stored(make: Make) -> None:
    half = make()
    one = request(28)
    half.know(one.all_token_ids, MEMORY, MEMORY, MEMORY)
    assert loads(half, one) == 24
    half.plan(one)
    half.side.arrived({"r"}, {3, 4, 5, 6})
    one.num_computed_tokens = 8
    assert half.matched(one) == (0, False), "it would be loaded, and fail, for ever"
    half.plan(one)
    one.num_computed_tokens = 28
    (store,) = half.plan(one).stores
    assert store.rank_keys(0) == chunk_keys(half.namespaces[0], one.all_token_ids)[1:]


def test_what_another_connector_loads_is_not_stored_before_a_token_after_it_is_computed(make: Make) -> None:
    half = make()
    one, aborted = request(20, "one"), request(20, "aborted")
    for each in (one, aborted):
        assert half.matched(each) == (0, False)
        each.num_computed_tokens = 16  # as the engine says while another connector is still loading
    assert half.side.finished(aborted, range(1, 6)) is False
    assert half.plan(one).stores == ()
    assert half.plan(one).stores == ()
    one.num_computed_tokens = 17
    (store,) = half.plan(one).stores
    assert store.chunks == 2


def test_after_a_reset_of_the_engine_nothing_is_shared_with_what_was(make: Make) -> None:
    half = make(ranks=2)
    one, late = request(20, "one"), request(20, "late")
    half.know(one.all_token_ids, MEMORY, MEMORY)
    half.side.new_request(one)
    assert half.side.renew()
    assert half.matched(one) == (0, False), "it was there before"
    half.plan(one)
    one.num_computed_tokens = 20
    assert half.plan(one).stores == ()
    asked = []
    for name in ("a", "b"):
        assert half.matched(request(20, name)) == (0, False)
        asked.append(half.cache.asked[-1])
        assert half.side.renew()
    assert len({key for keys in asked for key in keys} - set(half.cache.known)) == 8
    half.cache.known |= dict.fromkeys(half.cache.asked[-1], MEMORY)
    assert half.matched(late) == (0, False)
    assert len(half.side._identities[0].namespace.weights_fingerprint) < 64


def test_a_reset_during_a_load_has_not_succeeded(make: Make) -> None:
    half = make()
    one = request(20)
    half.know(one.all_token_ids, MEMORY, MEMORY)
    assert loads(half, one) == 16
    assert half.side.renew() is False


def test_without_certainty_which_adapter_it_is_a_request_is_left_alone(make: Make) -> None:
    half = make()
    half.side._extras = lambda *_: None
    one = request(20)
    half.side.new_request(one)
    assert half.side.matched(one, 0) == (0, False)
    assert half.side.finished(one, range(1, 6)) is False
    assert half.cache.asked == []


def test_after_a_preemption_it_is_asked_anew_and_its_blocks_are_let_go(make: Make) -> None:
    half = make()
    one = request(20)
    half.matched(one)
    half.plan(one)
    one.num_computed_tokens = 20
    assert half.plan(one).stores
    assert half.plan(preempted=["r"]).preempted == {"r"}
    one.num_computed_tokens = 0
    half.know(one.all_token_ids, MEMORY, MEMORY)
    assert half.matched(one) == (16, True)
    assert half.side.finished(one, []) is False


def test_a_load_that_could_not_be_planned_is_told_once(make: Make) -> None:
    half = make()
    one = request(20)
    half.know(one.all_token_ids, MEMORY, MEMORY)
    half.matched(one, BLOCK)
    half.side.fail_load(one, [11, 12, 13, 14, 15], 12)
    (load,) = half.plan(one).loads
    assert (load.chunks, load.blocks) == (0, (12, 13, 14))
    half.side.arrived({"r"}, {12, 13, 14})
    assert half.matched(one) == (0, False)


def test_too_many_lookups_are_misses(make: Make) -> None:
    half = make()
    half.cache.open.clear()
    for number in range(300):
        half.side.new_request(request(20, str(number)))
    assert half.counts["lookups_skipped"] == 300 - 256
    assert half.side.matched(request(20, "299"), 0) == (0, False)


def test_a_store_that_cannot_be_planned_keeps_no_load_from_the_workers(make: Make) -> None:
    half = make()
    one = request(20)
    half.know(one.all_token_ids, MEMORY, MEMORY)
    assert loads(half, one) == 16
    broken = request(20, "broken", num_computed_tokens=None)
    half.matched(broken)
    made = half.plan(broken, one)
    assert [load.request_id for load in made.loads] == ["r"]


def test_a_load_that_takes_longer_than_computing_is_not_made(make: Make) -> None:
    half = make(gate=LoadGate(Rates(prefill_tokens_per_s=1000, memory_bytes_per_s=100, disk_bytes_per_s=100)))
    one = request(20)
    half.know(one.all_token_ids, MEMORY, MEMORY)
    assert [half.matched(one) for _ in range(3)] == [(0, False)] * 3
    assert half.counts["loads_skipped"] == 1


def test_what_the_workers_measured_is_what_the_gate_goes_by(make: Make) -> None:
    gate = LoadGate(Rates(prefill_tokens_per_s=1000, memory_bytes_per_s=0, disk_bytes_per_s=0))
    half = make(gate=gate)
    one = request(20)
    half.know(one.all_token_ids, MEMORY, MEMORY)
    half.side.measured({"chunks_stored": 3.0})  # a step without a load
    half.side.measured({"load_seconds": [0.1], "chunks_load_failed": 1.0})  # one that brought nothing
    assert gate.rates.memory_bytes_per_s == 0
    half.side.measured({"load_seconds": [1.5, 0.5], "chunks_loaded_memory": 4.0, "bytes_loaded": 256.0})
    assert gate.rates.memory_bytes_per_s == pytest.approx(128)  # of a rank, whose chunk has 64 bytes
    assert half.matched(one) == (0, False)
    assert half.counts["loads_skipped"] == 1


def test_a_session_that_goes_on_has_no_keys(make: Make) -> None:
    half = make()
    one = request(20, resumable=True, num_computed_tokens=20)
    half.side.new_request(one)
    assert half.matched(one) == (0, False)
    assert half.plan(one).stores == ()
    assert half.side.finished(one, range(1, 6)) is False


def test_switched_off_stores(make: Make) -> None:
    half = make(store=False)
    one = request(20)
    half.matched(one)
    one.num_computed_tokens = 20
    assert half.plan(one).stores == ()
    assert half.side.finished(one, range(1, 6)) is False


def test_interleaved_prefixes() -> None:
    first, second = b"a" * 32 + b"b" * 32, b"c" * 32 + b"d" * 32
    assert interleave([first, second], 2) == [b"a" * 32, b"c" * 32, b"b" * 32, b"d" * 32]
    assert whole_chunks([MEMORY, DISK, MEMORY], 2) == [DISK]
    assert whole_chunks([], 3) == []
