"""The asynchronous client: the event loop never waits for a copy, and a cancelled load writes nothing afterwards."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Iterator

import pytest

from polarkv_client import errors
from polarkv_client.client import Client
from polarkv_client.keys import Namespace
from polarkv_client.protocol import messages as m
from polarkv_client.protocol.messages import Op
from polarkv_client.results import Reason
from polarkv_client.states import Tier
from polarkv_client.transport.shm import ShmTransport
from tests.contract.peers import key, payload, ways
from tests.support.slab_process import SlabProcess
from tests.support.small_manager import SmallManager, hang
from tests.support.waiting import wait_until_async

SIZE = 400_000
SLACK_S = 1.5
NAMESPACE = Namespace(model_id="m", chunk_tokens=4)
KEYS = [key(n) for n in range(8)]
PAYLOADS = [payload(SIZE, n) for n in range(8)]


@pytest.fixture
def manager(slab: SlabProcess) -> Iterator[SmallManager]:
    made = SmallManager([slab.node()])
    yield made
    made.close()


def came(manager: SmallManager, kind: type, count: int) -> Callable[[], Awaitable[bool]]:
    """Whether so many requests of a kind have come."""

    async def probe() -> bool:
        return len(manager.requests(kind)) >= count

    return probe


@pytest.mark.asyncio
async def test_the_same_operations(manager: SmallManager, kind: str) -> None:
    async with await Client.connect(endpoint=manager.endpoint, **ways(kind)) as client:
        tokens = range(32)
        targets = [bytearray(SIZE) for _ in PAYLOADS]
        assert (await client.store_kv(NAMESPACE, tokens, PAYLOADS)).stored == 8
        assert (await client.load_kv(NAMESPACE, tokens, targets)).tokens_loaded == 32
        assert targets == PAYLOADS
        assert (await client.store(KEYS, PAYLOADS)).stored == 8
        assert (await client.load(KEYS, targets)).complete
        assert await client.exists([*KEYS, key(99)]) == [Tier.MEMORY] * 8 + [Tier.NONE]
        assert await client.match_prefix([*KEYS, key(99)]) == [Tier.MEMORY] * 8
        assert await client.prefetch(KEYS)
        assert client.status().connected


@pytest.mark.asyncio
async def test_nothing_runs_on_the_loops_thread(manager: SmallManager, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: set[int] = set()
    async with await Client.connect(endpoint=manager.endpoint) as client:
        engine = client._operations.engine
        call = engine.manager.home.call

        def noting(*arguments: object, **named: object) -> object:
            threads.add(threading.get_ident())
            return call(*arguments, **named)  # type: ignore[arg-type]

        monkeypatch.setattr(engine.manager.home, "call", noting)
        await client.store(KEYS, PAYLOADS)
        read = ShmTransport.read

        def copying(*arguments: object) -> object:
            threads.add(threading.get_ident())
            return read(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(ShmTransport, "read", copying)
        assert (await client.load(KEYS, [bytearray(SIZE) for _ in KEYS])).complete
    assert threads
    assert threading.get_ident() not in threads


@pytest.mark.asyncio
async def test_the_loop_goes_on_while_an_operation_waits(manager: SmallManager) -> None:
    async with await Client.connect(endpoint=manager.endpoint) as client:
        manager.instead[Op.ACQUIRE_READ] = hang
        targets = [bytearray(SIZE) for _ in KEYS]
        task = asyncio.create_task(client.load(KEYS, targets, deadline_ms=400))
        turns = 0
        while not task.done():
            turns += 1
            await asyncio.sleep(0)
        assert turns > 50
        loaded = await task
        assert {chunk.reason for chunk in loaded.chunks} == {Reason.TIMEOUT}


@pytest.mark.asyncio
async def test_a_cancelled_load_writes_nothing_afterwards(own_slab: SlabProcess) -> None:
    manager = SmallManager([own_slab.node()])
    async with await Client.connect(endpoint=manager.endpoint, transport="tcp") as client:
        assert (await client.store(KEYS, PAYLOADS)).stored == 8
        own_slab.freeze()
        targets = [bytearray(SIZE) for _ in KEYS]
        task = asyncio.create_task(client.load(KEYS, targets, deadline_ms=30_000))
        await wait_until_async(came(manager, m.AcquireRead, 1), "the request")
        begin = time.monotonic()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert time.monotonic() - begin < SLACK_S
        for target in targets:
            target[:] = b"!" * SIZE
        os.kill(own_slab.process.pid, signal.SIGCONT)
        again = [bytearray(SIZE) for _ in KEYS]
        assert (await client.load(KEYS, again)).complete
        assert again == PAYLOADS
        assert all(set(target) == {ord("!")} for target in targets)
    manager.close()


@pytest.mark.asyncio
async def test_a_cancellation_while_the_manager_is_asked(manager: SmallManager) -> None:
    async with await Client.connect(endpoint=manager.endpoint) as client:
        manager.instead[Op.ACQUIRE_READ] = hang
        begin = time.monotonic()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await client.load(KEYS, [bytearray(SIZE) for _ in KEYS], deadline_ms=30_000)
        assert time.monotonic() - begin < 0.1 + SLACK_S
        assert client.status().breaker == "closed"


@pytest.mark.asyncio
async def test_a_cancelled_store_gives_its_slots_back(own_slab: SlabProcess) -> None:
    manager = SmallManager([own_slab.node()])
    async with await Client.connect(endpoint=manager.endpoint, transport="tcp") as client:
        assert (await client.store(KEYS, PAYLOADS)).stored == 8
        own_slab.freeze()
        task = asyncio.create_task(client.store([key(100 + n) for n in range(8)], PAYLOADS, deadline_ms=30_000))
        await wait_until_async(came(manager, m.BeginStore, 2), "the request")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await wait_until_async(came(manager, m.AbortStore, 1), "the abort")
        assert not any(key(100 + n) in manager.chunks for n in range(8))
        os.kill(own_slab.process.pid, signal.SIGCONT)
    manager.close()


@pytest.mark.asyncio
async def test_more_operations_than_are_allowed_are_misses_at_once(manager: SmallManager) -> None:
    async with await Client.connect(endpoint=manager.endpoint, operations=1, queued_operations=1) as client:
        manager.instead[Op.EXISTS] = hang
        first = asyncio.create_task(client.exists(KEYS, deadline_ms=2000))
        await asyncio.sleep(0)
        # Waits behind the first, and is not let wait beyond its own deadline.
        targets = [bytearray(SIZE) for _ in KEYS]
        second = asyncio.create_task(client.load(KEYS, targets, deadline_ms=50))
        await asyncio.sleep(0)
        third = await client.store(KEYS, PAYLOADS, deadline_ms=2000)
        assert not first.done()
        assert {chunk.reason for chunk in third.chunks} == {Reason.OVERLOADED}
        loaded = await second
        assert {chunk.reason for chunk in loaded.chunks} == {Reason.OVERLOADED}
        assert await first == [Tier.NONE] * 8
        del manager.instead[Op.EXISTS]
        assert await client.exists(KEYS) == [Tier.NONE] * 8
        assert (await client.store(KEYS, PAYLOADS)).stored == 8  # nothing of it is left over


@pytest.mark.asyncio
async def test_bad_arguments_are_named_here_too(manager: SmallManager) -> None:
    async with await Client.connect(endpoint=manager.endpoint) as client:
        with pytest.raises(errors.ConfigurationError, match="writable"):
            await client.load([key(1)], [b"x"])
        with pytest.raises(errors.ConfigurationError, match="0 buffers"):
            await client.store([key(1)], [])
        with pytest.raises(errors.ConfigurationError, match="buffers"):
            await client.load_kv(NAMESPACE, range(4), [])


@pytest.mark.asyncio
async def test_a_closed_client_answers_misses(manager: SmallManager) -> None:
    client = await Client.connect(endpoint=manager.endpoint)
    await client.close()
    await client.close()
    assert await client.exists([key(1)]) == [Tier.NONE]
    assert not (await client.load([key(1)], [bytearray(1)])).hits


@pytest.mark.asyncio
async def test_a_wrong_token_is_said_at_connect(manager: SmallManager) -> None:
    manager.token = "another"
    with pytest.raises(errors.Unauthorized):
        await Client.connect(endpoint=manager.endpoint)
