"""One contract for every metadata store, on the real things: an SQLite file, a PostgreSQL server, a MariaDB server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeAlias

import pytest

from polarkv_client.errors import ConfigurationError
from polarkv_dataplane.manager.shell.metadata import make_store
from polarkv_dataplane.manager.shell.metadata.store import Batch, EntryRow, MetadataStore, NodeRow, Recalled
from tests.support.managers import key

Scenario: TypeAlias = Callable[[MetadataStore], Awaitable[None]]
HIGH = (1 << 64) - 1  # checksums are unsigned


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[MetadataStore]:
    store = make_store(url)
    await store.open()
    try:
        yield store
    finally:
        await store.close()


def play(url: str, *scenarios: Scenario) -> None:
    """Each scenario with a store of its own on the same data, one after the other."""

    async def run() -> None:
        for scenario in scenarios:
            async with asyncio.timeout(20):
                async with opened(url) as store:
                    await scenario(store)

    asyncio.run(run())


def row(number: int, node: str = "n1", recency_ms: int = 0, pinned: int | None = None, epoch: int = 1) -> EntryRow:
    return EntryRow(key(number), node, 1000, HIGH - number, 0xFFFF_FFFF, recency_ms, pinned, epoch)


def test_epochs_only_rise_whatever_the_clock_says(url: str) -> None:
    async def first(store: MetadataStore) -> None:
        assert await store.take_epoch(100) == 100
        assert await store.take_epoch(100) == 101

    async def later(store: MetadataStore) -> None:
        assert (await store.remembered()).epoch == 101
        assert await store.take_epoch(50) == 102
        assert await store.take_epoch(1_800_000_000) == 1_800_000_000

    play(url, first, later)


def test_an_empty_store_remembers_nothing(url: str) -> None:
    async def scenario(store: MetadataStore) -> None:
        remembered = await store.remembered()
        assert (remembered.epoch, list(remembered.nodes), remembered.quotas) == (0, [], {})
        assert await store.look_up([key(1)]) == {}
        assert await store.look_up([]) == {}
        await store.write(Batch())
        assert await store.prune("n1", 5) == 0

    play(url, scenario)


def test_nodes_and_quotas_outlive_the_connection(url: str) -> None:
    async def first(store: MetadataStore) -> None:
        await store.write(Batch(nodes=[NodeRow("n1", 1, 1), NodeRow("n2", 2, 7)], quotas={"a": 5, "b": 1 << 50}))
        await store.write(Batch(nodes=[NodeRow("n1", 1, 2)], quotas={"a": 0, "b": None}))

    async def later(store: MetadataStore) -> None:
        remembered = await store.remembered()
        assert list(remembered.nodes) == [NodeRow("n1", 1, 2), NodeRow("n2", 2, 7)]
        assert remembered.quotas == {"a": 0}

    play(url, first, later)


def test_recency_only_rises_and_pins_stay_until_they_are_set_again(url: str) -> None:
    async def scenario(store: MetadataStore) -> None:
        await store.write(Batch([row(1, recency_ms=10, pinned=99), row(2, recency_ms=20), row(3)]))
        await store.write(Batch([row(1), row(2, recency_ms=15, pinned=77), row(3, recency_ms=5, pinned=0)]))
        found = await store.look_up([key(n) for n in range(5)])
        assert found == {key(1): Recalled(10, 99), key(2): Recalled(20, 77), key(3): Recalled(5, 0)}

    async def later(store: MetadataStore) -> None:
        await store.write(Batch([row(1, pinned=0)], gone=[key(2), key(9)]))
        assert await store.look_up([key(1), key(2), key(3)]) == {key(1): Recalled(10, 0), key(3): Recalled(5, 0)}

    play(url, scenario, later)


def test_a_node_that_proved_its_entries_anew_loses_the_others(url: str) -> None:
    async def scenario(store: MetadataStore) -> None:
        await store.write(Batch([row(1), row(2), row(3, "n2")]))
        await store.write(Batch([row(1, epoch=2)]))
        assert await store.prune("n1", 2) == 1
        assert set(await store.look_up([key(1), key(2), key(3)])) == {key(1), key(3)}

    play(url, scenario)


def test_large_batches_are_written_and_looked_up_whole(url: str) -> None:
    async def scenario(store: MetadataStore) -> None:
        await store.write(Batch([row(n, recency_ms=n + 1) for n in range(5000)], gone=[key(9000)]))
        found = await store.look_up([key(n) for n in range(6000)])
        assert len(found) == 5000
        assert found[key(4999)] == Recalled(5000, 0)

    play(url, scenario)


def test_a_batch_is_written_whole_or_not_at_all(url: str) -> None:
    async def scenario(store: MetadataStore) -> None:
        bad = row(2)._replace(node=None)  # type: ignore[arg-type]
        with pytest.raises(Exception):  # noqa: B017, PT011 (each driver has its own)
            await store.write(Batch([row(1), bad], nodes=[NodeRow("n1", 1, 1)]))
        assert await store.look_up([key(1), key(2)]) == {}
        assert list((await store.remembered()).nodes) == []
        await store.write(Batch([row(1)]))
        assert set(await store.look_up([key(1)])) == {key(1)}

    play(url, scenario)


def test_opening_again_is_allowed_and_a_closed_store_says_so(url: str) -> None:
    async def scenario(store: MetadataStore) -> None:
        await store.write(Batch([row(1)]))
        await store.open()
        assert set(await store.look_up([key(1)])) == {key(1)}

    play(url, scenario)

    async def closed() -> None:
        store = make_store(url)
        with pytest.raises(Exception, match=r"not (open|connected)"):
            await store.look_up([key(1)])
        await store.close()

    asyncio.run(closed())


def test_two_managers_that_start_at_once_take_different_epochs(url: str) -> None:
    async def run() -> None:
        async def start() -> int:
            async with opened(url) as store:
                return await store.take_epoch(10)

        assert sorted(await asyncio.gather(*(start() for _ in range(4)))) == [10, 11, 12, 13]

    asyncio.run(run())


def test_no_store_keeps_nothing() -> None:
    async def scenario(store: MetadataStore) -> None:
        await store.write(Batch([row(1)]))
        assert await store.look_up([key(1)]) == {}
        assert not store.keeps

    play("", scenario)
    with pytest.raises(ConfigurationError, match="metadata_url"):
        make_store("redis://here")
