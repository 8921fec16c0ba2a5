"""The workers' half of the vLLM connector, without vLLM and torch: memory, transfers, what the engine is told."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from polarkv_client.connectors.settings import ConnectorConfig
from polarkv_client.connectors.vllm.copies import Direct
from polarkv_client.connectors.vllm.pages import CpuViews, Pages, runs_of
from polarkv_client.connectors.vllm.plan import SCRATCH, StepPlan, Transfer
from polarkv_client.connectors.vllm.worker import WorkerSide
from polarkv_client.errors import ConfigurationError
from polarkv_client.results import ChunkLoad, ChunkStore, LoadResult, Reason, Stored, StoreResult
from polarkv_client.states import Tier
from polarkv_client.transport.base import Scope
from tests.support.waiting import wait_until

BLOCKS, PER_CHUNK, BLOCK_BYTES = 9, 2, 48
WAITS = (40, 0, 70, 80, 90, 100)  # more loads than threads; 0: as the settings say
SHAPE = (BLOCKS, 2, 4, 6)


class Tensor:
    """As much of a torch tensor as the connector looks at, over a numpy array."""

    def __init__(self, array: Any) -> None:
        self.array = array
        self.shape, self.dtype = array.shape, array.dtype
        self.device = SimpleNamespace(type="cpu")

    def stride(self) -> tuple[int, ...]:
        return tuple(step // self.array.itemsize for step in self.array.strides)

    def element_size(self) -> int:
        return int(self.array.itemsize)

    def data_ptr(self) -> int:
        return int(self.array.__array_interface__["data"][0])

    def untyped_storage(self) -> Any:
        base = self.array if self.array.base is None else self.array.base
        return SimpleNamespace(data_ptr=lambda: base.__array_interface__["data"][0], nbytes=lambda: base.nbytes)


def layers(*arrays: Any) -> dict[str, Any]:
    return {f"layer.{number}": Tensor(array) for number, array in enumerate(arrays)}


def page_bytes(count: int, size: int = BLOCK_BYTES) -> dict[str, int]:
    return {f"layer.{number}": size for number in range(count)}


def numbered(shape: Sequence[int] = SHAPE) -> Any:
    return (np.arange(np.prod(shape)) % 251).astype(np.uint8).reshape(shape)


def joined(views: Sequence[memoryview]) -> bytes:
    return b"".join(bytes(view) for view in views)


def test_neighbouring_blocks_are_one_run() -> None:
    assert runs_of([3, 4, 5, 9, 1, 2]) == [(3, 3), (9, 1), (1, 2)]
    assert runs_of([SCRATCH, SCRATCH, 0, 1]) == [(SCRATCH, 2), (0, 2)]


def test_a_chunk_is_layer_by_layer_block_by_block() -> None:
    first, second = numbered(), numbered()[::-1].copy()
    views = CpuViews(Pages(layers(first, second), BLOCKS, page_bytes(2)))
    assert joined(views.chunk([3, 4], memoryview(b""))) == b"".join((first[3:5].tobytes(), second[3:5].tobytes()))
    assert len(views.chunk([3, 4], memoryview(b""))) == 2
    assert joined(views.chunk([4, 1], memoryview(b""))) == b"".join(
        (first[4].tobytes(), first[1].tobytes(), second[4].tobytes(), second[1].tobytes())
    )


def test_which_layer_has_which_type_is_in_the_layout() -> None:
    """Engines may keep some layers in another type: others of the same shapes are no less others."""
    wide, narrow = numbered(), numbered().view(np.int8)
    assert Pages(layers(wide, narrow), BLOCKS, page_bytes(2)).layout != (
        Pages(layers(narrow, wide), BLOCKS, page_bytes(2)).layout
    )


def test_what_goes_nowhere_lies_in_scratch() -> None:
    array = numbered()
    views = CpuViews(Pages(layers(array), BLOCKS, page_bytes(1))).chunk([SCRATCH, 5], memoryview(bytearray(200)))
    before = array.copy()
    for view in views:
        view[:] = bytes(len(view))
    before[5] = 0
    assert (array == before).all()
    assert sum(map(len, views)) == PER_CHUNK * BLOCK_BYTES


def test_keys_then_values_and_blocks_apart() -> None:
    halves = numbered((2, BLOCKS, 4, 6))
    pages = Pages(layers(halves), BLOCKS, page_bytes(1))
    expected = halves[0, 2:4].tobytes() + halves[1, 2:4].tobytes()
    assert joined(CpuViews(pages).chunk([2, 3], memoryview(b""))) == expected
    wide = numbered((BLOCKS, 4, 4, 6))[:, :2]  # another layer's block lies between
    pages = Pages(layers(wide), BLOCKS, page_bytes(1))
    expected = wide[2].tobytes() + wide[3].tobytes()
    assert joined(CpuViews(pages).chunk([2, 3], memoryview(b""))) == expected


def test_the_order_inside_a_block_is_in_the_layout_and_the_number_of_blocks_is_not() -> None:
    plain = Pages(layers(numbered()), BLOCKS, page_bytes(1)).layout
    turned = Pages(layers(numbered((BLOCKS, 4, 2, 6)).transpose(0, 2, 1, 3)), BLOCKS, page_bytes(1)).layout
    more = Pages(layers(numbered((20, 2, 4, 6))), 20, page_bytes(1)).layout
    assert plain == more
    assert plain != turned


@pytest.mark.parametrize(
    ("array", "bytes_", "why"),
    [
        (numbered((5, BLOCKS, 48)), 48, "no dimension"),
        (numbered((BLOCKS, 2, 8, 6))[:, :, :4], 48, "gaps"),
        (numbered(), 96, "has not the 96 bytes"),
        (numbered((2, 2, 24)), 48, "two blocks or fewer"),
    ],
)
def test_a_layout_that_is_not_understood_is_refused(array: Any, bytes_: int, why: str) -> None:
    count = 2 if "two blocks" in why else BLOCKS
    with pytest.raises(ConfigurationError, match=why) as caught:
        Pages(layers(array), count, page_bytes(1, bytes_))
    assert caught.value.field == "kv_caches"
    assert "enabled=false" in caught.value.fix


def test_a_layer_of_another_kind_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="is a list, not one tensor"):
        Pages({"layer.0": [1, 2]}, BLOCKS, {})


@dataclass
class Cache:
    """Stands for the client: keeps chunks, fails and waits as it is told."""

    chunks: dict[bytes, bytes] = field(default_factory=dict)
    gate: threading.Event = field(default_factory=threading.Event)
    begun: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    raises: bool = False
    cancelled: int = 0
    deadlines_ms: list[int] = field(default_factory=list)

    def scope(self, deadline_ms: int) -> Scope:
        self.deadlines_ms.append(deadline_ms)
        return Scope(time.monotonic() + deadline_ms / 1000)

    def _wait(self, scope: Scope) -> bool:
        self.begun.release()
        if self.raises:
            raise RuntimeError("planted")
        ended = threading.Event()
        scope.on_cancel(ended.set)
        wait_until(lambda: self.gate.is_set() or ended.is_set(), "the gate", every_s=0.005)
        self.cancelled += ended.is_set()
        return not ended.is_set()

    def load(self, keys: list[bytes], buffers: list[Any], scope: Scope, *, prefix: bool) -> LoadResult:
        assert prefix
        alive = self._wait(scope)
        chunks = []
        for key, views in zip(keys, buffers, strict=True):
            stored = self.chunks.get(key) if alive else None
            chunks.append(ChunkLoad(stored is not None, Tier.MEMORY if stored else Tier.NONE, Reason.ABSENT))
            for view in views if stored else ():
                view[:], stored = stored[: len(view)], stored[len(view) :]  # type: ignore[index]
        return LoadResult(chunks)

    def store(self, keys: list[bytes], buffers: list[Any], scope: Scope) -> StoreResult:
        if not self._wait(scope):
            return StoreResult([ChunkStore(Stored.FAILED, Reason.CANCELLED)] * len(keys))
        for key, views in zip(keys, buffers, strict=True):
            self.chunks[key] = joined(views)
        return StoreResult([ChunkStore(Stored.STORED)] * len(keys), sum(len(self.chunks[key]) for key in keys))


@dataclass
class Half:
    side: WorkerSide
    cache: Cache
    array: Any
    counts: Counter[str]


Make = Callable[..., Half]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Half] = []

    def build(writes: bool = True, **settings: Any) -> Half:
        config = ConnectorConfig(endpoint="tcp://h:1", chunk_tokens=8, **settings)
        cache, counts, array = Cache(), Counter[str](), numbered()
        cache.gate.set()

        def note(name: str, amount: float) -> None:
            counts[name] += amount  # type: ignore[assignment]

        pages = Pages(layers(array), BLOCKS, page_bytes(1))
        chunk_bytes = pages.block_bytes * PER_CHUNK
        side = WorkerSide(config, cache, Direct(pages, PER_CHUNK), 0, writes, PER_CHUNK, chunk_bytes, note)  # type: ignore[arg-type]
        made.append(Half(side, cache, array, counts))
        return made[-1]

    yield build
    for each in made:
        each.cache.gate.set()
        each.side.close()


def key(number: int) -> bytes:
    return bytes([number]) * 32


def transfer(name: str, chunks: Sequence[int], blocks: Sequence[int]) -> Transfer:
    return Transfer(name, (b"".join(map(key, chunks)),), tuple(blocks))


def ended(half: Half, what: int) -> set[str]:
    found: set[str] = set()

    def collect() -> bool:
        found.update(half.side.ended()[what])
        return bool(found)

    wait_until(collect, "a transfer")
    return found


def test_what_is_stored_is_loaded_into_other_blocks(make: Make) -> None:
    half = make()
    half.side.store(StepPlan(stores=(transfer("a", [1, 2], [1, 2, 3, 4]),), finished=frozenset({"a"})))
    assert ended(half, 0) == {"a"}
    half.side.load(StepPlan(loads=(transfer("b", [1, 2], [5, 6, 7, 8]),)), synchronous=False)
    assert ended(half, 1) == {"b"}
    assert half.side.invalid_blocks() == set()
    assert (half.array[5:9] == half.array[1:5]).all()
    assert half.counts["bytes_stored"] == half.counts["bytes_loaded"] == 4 * BLOCK_BYTES


def test_a_synchronous_load_has_ended_and_is_not_reported(make: Make) -> None:
    half = make()
    half.cache.chunks[key(1)] = bytes(2 * BLOCK_BYTES)
    half.side.load(StepPlan(loads=(transfer("b", [1, 2], [5, 6, 7, 8]),)), synchronous=True)
    assert half.side.ended() == (set(), set())
    assert half.side.invalid_blocks() == {7, 8}
    assert half.side.invalid_blocks() == set()
    assert not half.array[5:7].any()


def test_from_the_first_missing_chunk_on_all_blocks_are_reported(make: Make) -> None:
    half = make()
    half.cache.chunks |= {key(1): bytes(2 * BLOCK_BYTES), key(3): bytes(2 * BLOCK_BYTES)}
    half.side.load(StepPlan(loads=(transfer("b", [1, 2, 3], [SCRATCH, 2, 3, 4, 5, 6]),)), synchronous=False)
    assert ended(half, 1) == {"b"}
    assert half.side.invalid_blocks() == {3, 4, 5, 6}
    assert half.counts["chunks_load_failed"] == 2


def test_a_load_waits_as_long_as_the_plan_says_also_for_its_turn(make: Make) -> None:
    half = make()
    half.cache.gate.clear()
    loads = [replace(transfer(str(number), [number], [1, 2]), wait_ms=wait_ms) for number, wait_ms in enumerate(WAITS)]
    half.side.load(StepPlan(tuple(loads)), synchronous=False)
    assert half.cache.deadlines_ms == [wait_ms or 5000 for wait_ms in WAITS]


def test_a_defect_in_a_load_is_reported_and_the_thread_lives(make: Make) -> None:
    half = make()
    half.cache.raises = True
    for number in range(8):  # more than there are threads
        half.side.load(StepPlan(loads=(transfer(str(number), [1], [1, 2]),)), synchronous=False)
        half.side.store(StepPlan(stores=(transfer(str(number), [1], [1, 2]),)))
    wait_until(lambda: half.counts["store_seconds"] and half.counts["chunks_store_failed"] == 8, "the stores")
    half.cache.raises = False
    half.side.load(StepPlan(loads=(transfer("z", [], [5, 6]),)), synchronous=True)
    assert {1, 2, 5, 6} == half.side.invalid_blocks()


def test_a_request_that_ended_is_reported_once_all_of_it_is_stored(make: Make) -> None:
    half = make()
    half.cache.gate.clear()
    half.side.store(
        StepPlan(stores=(transfer("a", [1], [1, 2]), transfer("b", [2], [3, 4])), finished=frozenset({"a"}))
    )
    assert half.side.ended() == (set(), set())
    half.cache.gate.set()
    assert ended(half, 0) == {"a"}
    half.side.store(StepPlan(finished=frozenset({"b"})))
    assert ended(half, 0) == {"b"}


def test_after_a_preemption_nothing_reads_its_blocks(make: Make) -> None:
    half = make()
    half.cache.gate.clear()
    names = [str(number) for number in range(5)]  # more than there are threads: some have not begun
    half.side.store(StepPlan(stores=tuple(transfer(name, [int(name)], [1, 2]) for name in names)))
    half.cache.begun.acquire()
    half.side.preempt(frozenset(names))
    assert half.cache.chunks == {}
    assert half.cache.cancelled >= 1
    half.side.store(StepPlan(finished=frozenset(names)))
    assert ended(half, 0) == set(names)


def test_what_does_not_fit_the_queue_is_skipped(make: Make) -> None:
    half = make(store_queue_bytes=1 << 20)
    half.cache.gate.clear()
    many = (1 << 20) // (2 * BLOCK_BYTES)
    half.side.store(StepPlan(stores=(transfer("a", [1] * many, [1, 2] * many), transfer("b", [2], [3, 4]))))
    assert half.counts["chunks_store_skipped"] == 1
    half.cache.gate.set()


def test_a_rank_that_holds_what_another_stores_does_not_store(make: Make) -> None:
    half = make(writes=False)
    half.side.store(StepPlan(stores=(transfer("a", [1], [1, 2]),), finished=frozenset({"a"})))
    assert half.side.ended() == ({"a"}, set())
    assert half.cache.chunks == {}


def test_after_the_end_loads_fail_and_are_reported(make: Make) -> None:
    half = make()
    half.side.close()
    half.side.load(StepPlan(loads=(transfer("a", [1], [1, 2]),)), synchronous=False)
    assert half.side.ended() == (set(), {"a"})
    assert half.side.invalid_blocks() == {1, 2}
