"""The replay's counting and checking, against a cache of this file that can be told to misbehave."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import pytest

from polarkv_client.cli.replay import Payloads, Replay, ReplayReport
from polarkv_client.cli.trace import Request, generate_trace, lru_hit_rate
from polarkv_client.errors import ConfigurationError
from polarkv_client.keys import Namespace
from polarkv_client.results import ChunkLoad, ChunkStore, LoadResult, Reason, Stored, StoreResult
from polarkv_client.states import Tier

NAMESPACE = Namespace(model_id="replay-test", chunk_tokens=1)


class LruCache:
    """An exact LRU of ``blocks`` blocks; the newest ``in_memory`` of them count as memory, the others as disk."""

    def __init__(self, blocks: int, in_memory: int = 10**9) -> None:
        self.blocks, self.in_memory = blocks, in_memory
        self.held: OrderedDict[bytes, bytes] = OrderedDict()
        self.damage: bytes | None = None
        self.forgets_between_lookup_and_load = False
        self.full = False

    def tier(self, key: bytes) -> Tier:
        newest = list(self.held)[-self.in_memory :]
        return Tier.MEMORY if self.in_memory >= len(self.held) or key in newest else Tier.DISK

    def match_prefix(self, keys: Sequence[bytes]) -> list[Tier]:
        matched = []
        for key in keys:
            if key not in self.held:
                break
            matched.append(self.tier(key))
        return matched

    def load(self, keys: Sequence[bytes], buffers: Sequence[Any]) -> LoadResult:
        if self.forgets_between_lookup_and_load:
            return LoadResult([ChunkLoad(False, reason=Reason.ABSENT) for _ in keys])
        chunks = [ChunkLoad(True, self.tier(key)) for key in keys]
        for key, buffer in zip(keys, buffers, strict=True):
            if key != self.damage:  # else: a load that says hit and delivers nothing
                buffer[:] = self.held[key]
            self.held.move_to_end(key)
        return LoadResult(chunks, sum(map(len, buffers)))

    def store(self, keys: Sequence[bytes], buffers: Sequence[Any]) -> StoreResult:
        chunks = []
        for key, parts in zip(keys, buffers, strict=True):
            if self.full:
                chunks.append(ChunkStore(Stored.NO_SPACE))
                continue
            self.held[key] = b"".join(parts)
            chunks.append(ChunkStore(Stored.STORED))
            if len(self.held) > self.blocks:
                self.held.popitem(last=False)
        stored = sum(chunk.outcome is Stored.STORED for chunk in chunks)
        return StoreResult(chunks, stored * len(b"".join(buffers[0])))


def request(*hash_ids: int) -> Request:
    return Request(0, len(hash_ids) * 512, 1, list(hash_ids))


def replay(cache: LruCache, trace: Sequence[Request], **options: Any) -> ReplayReport:
    return Replay(cache, namespace=NAMESPACE, block_bytes=100, **options).run(trace)


def test_counts_by_hand() -> None:
    report = replay(LruCache(100, in_memory=2), [request(1, 2, 3), request(1, 2, 4), request()])
    assert (report.requests, report.blocks, report.repeated) == (3, 6, 2)
    assert (report.memory_hits, report.disk_hits, report.corrupted, report.lost) == (1, 1, 0, 0)
    assert (report.stored, report.bytes_stored, report.bytes_loaded) == (4, 400, 200)
    assert report.store_outcomes == {"stored": 4}
    assert report.as_json()["hit_percent"] == pytest.approx(100 * 2 / 6, abs=0.001)


@pytest.mark.parametrize("concurrency", [1, 4])
def test_without_limit_every_repeated_block_is_a_hit(concurrency: int) -> None:
    trace = list(generate_trace(3, 400))
    report = replay(LruCache(10**9), trace, concurrency=concurrency)
    assert report.corrupted == 0
    assert report.hits + sum(report.store_outcomes.values()) == report.blocks
    if concurrency == 1:  # else two requests at once may both miss what neither has stored yet
        assert report.hits == report.repeated == round(lru_hit_rate(trace) * report.blocks)


def test_a_damaged_block_is_counted() -> None:
    cache = LruCache(100)
    replay(cache, [request(1, 2, 3)])
    cache.damage = list(cache.held)[1]
    assert replay(cache, [request(1, 2, 3), request(1, 2, 3)]).corrupted == 2


def test_a_block_of_another_key_is_damage() -> None:
    cache = LruCache(100)
    replay(cache, [request(1, 2)])
    first, second = cache.held
    cache.held[first], cache.held[second] = cache.held[second], cache.held[first]
    assert replay(cache, [request(1, 2)]).corrupted == 2


def test_a_block_that_vanishes_after_the_lookup_is_lost_and_stored_again() -> None:
    cache = LruCache(100)
    replay(cache, [request(1, 2)])
    cache.forgets_between_lookup_and_load = True
    report = replay(cache, [request(1, 2)])
    assert (report.hits, report.lost, report.stored) == (0, 2, 2)
    assert report.lost_reasons == {"absent": 2}


def test_what_a_full_cache_did_not_take_is_named() -> None:
    cache = LruCache(100)
    cache.full = True
    report = replay(cache, [request(1, 2)])
    assert (report.stored, report.store_outcomes) == (0, {"no space": 2})


def test_a_duration_ends_the_replay_between_requests() -> None:
    report = replay(LruCache(100), [request(1)] * 50, duration_s=0)
    assert (report.requests, report.whole_trace) == (0, False)


def test_payloads_differ_by_key_in_every_part() -> None:
    payloads = Payloads(4032)
    one, two = bytes(32), bytes([1]) + bytes(31)
    assert sum(map(len, payloads.parts(one))) == 4032
    assert payloads.matches(one, bytearray(b"".join(payloads.parts(one))))
    assert not payloads.matches(two, bytearray(b"".join(payloads.parts(one))))
    damaged = bytearray(b"".join(payloads.parts(one)))
    damaged[-1] ^= 1
    assert not payloads.matches(one, damaged)


@pytest.mark.parametrize(
    ("options", "named"),
    [({"block_bytes": 32}, "block_bytes"), ({"concurrency": 0}, "concurrency"), ({"concurrency": 257}, "concurrency")],
)
def test_bad_options_are_named(options: dict[str, int], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        Replay(LruCache(1), namespace=NAMESPACE, **options)  # type: ignore[arg-type]


def test_a_namespace_of_longer_chunks_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="chunk_tokens"):
        Replay(LruCache(1), namespace=Namespace(model_id="m", chunk_tokens=2))
