"""Networks that swallow everything, at once or inside a transfer: calls end in time, then go on by themselves."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator

import pytest

from polarkv_client.client import Client
from polarkv_client.sync import SyncClient
from tests.local.support.invariants import settled
from tests.local.support.oracle import GRACE_S, Caller, Chunks
from tests.local.support.proxy import Proxy
from tests.local.support.world import World, recovers, running
from tests.support.ports import reserved_ports
from tests.support.waiting import wait_until, wait_until_async

SLAB_HOST = "127.0.0.2"  # what the slab server tells clients; only the proxy listens there
NUMBERS = list(range(24))


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with running(1, "32MiB", "64MiB", slab={"advertise_host": SLAB_HOST}) as world:
        yield world


@pytest.fixture
def chunks(request: pytest.FixtureRequest) -> Chunks:
    return Chunks(request.node.name, (200_000,))


@pytest.fixture
def slab_proxy(world: World) -> Iterator[Proxy]:
    endpoint = world.nodes()[0]["tcp"]
    port = int(endpoint.rpartition(":")[2])
    with Proxy(f"tcp://127.0.0.1:{port}", SLAB_HOST, port) as proxy:
        yield proxy


def through(world: World, manager: Proxy, chunks: Chunks, transport: str, **settings: object) -> Caller:
    """A caller whose way to the manager leads through a proxy."""
    client = world.client(transport, endpoint=manager.endpoint, manager_timeout_ms=500, **settings)
    return Caller(client, chunks, deadline_ms=1000)


@pytest.fixture
def manager_proxy(world: World) -> Iterator[Proxy]:
    with Proxy(f"unix://{world.places.socket('manager')}") as proxy:
        yield proxy


@pytest.mark.parametrize("how", ["black hole", "stopped process"])
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_manager_that_does_not_answer(
    world: World, chunks: Chunks, manager_proxy: Proxy, slab_proxy: Proxy, transport: str, how: str
) -> None:
    caller = through(world, manager_proxy, chunks, transport)
    with caller.client:
        recovers(caller, NUMBERS)
        with silent(world, manager_proxy, how):
            for _ in range(4):
                assert not caller.load(NUMBERS).hits
                assert not caller.store([100, 101]).stored
                assert not any(caller.timed(lambda: caller.client.exists(chunks.keys(NUMBERS), deadline_ms=1000), 1000))
            # The breaker is open: nobody pays for a dead manager any more.
            assert caller.client.status().breaker != "closed"
            keys, buffers = chunks.keys(NUMBERS), chunks.blanks(NUMBERS)
            misses = [caller.timed(lambda: caller.client.load(keys, buffers), 100) for _ in range(50)]
            assert not any(result.hits for result in misses)
        assert recovers(caller, [*NUMBERS, 100, 101]) < 20
        assert caller.client.status().breaker == "closed"
    settled(world)


@contextlib.contextmanager
def silent(world: World, proxy: Proxy, how: str) -> Iterator[None]:
    """A manager that cannot be heard, for the length of the block."""
    if how == "stopped process":
        with world.stopped("manager"):
            yield
        return
    proxy.swallow()
    try:
        yield
    finally:
        proxy.pass_on()


def test_the_asynchronous_client_keeps_its_deadlines_and_its_loop_goes_on(
    world: World, chunks: Chunks, slab_proxy: Proxy
) -> None:
    async def frozen(client: Client) -> tuple[float, float]:
        """How long a load took, and how long the loop waited at most meanwhile, in seconds."""
        buffers = chunks.blanks(NUMBERS)
        began = last = time.monotonic()
        longest_s = 0.0
        loading = asyncio.create_task(client.load(chunks.keys(NUMBERS), buffers, deadline_ms=1000))
        while not loading.done():
            await asyncio.sleep(0.01)
            longest_s, last = max(longest_s, time.monotonic() - last), time.monotonic()
        took_s = time.monotonic() - began
        result = loading.result()
        assert not result.complete
        chunks.verify(NUMBERS, buffers, result)
        return took_s, longest_s

    async def scenario() -> list[tuple[float, float]]:
        client = await Client.connect(world.cluster.connection, transport="tcp", breaker_longest_ms=500)
        async with client:
            keys = chunks.keys(NUMBERS)
            await client.store(keys, chunks.payloads(NUMBERS))
            slab_proxy.freeze_after_bytes = 150_000
            found = [await frozen(client) for _ in range(2)]
            slab_proxy.pass_on()

            async def works() -> bool:
                again = chunks.blanks(NUMBERS)
                loaded = await client.load(keys, again, deadline_ms=5000)
                return chunks.verify(NUMBERS, again, loaded) == len(NUMBERS)

            await wait_until_async(works, "loads to work again")
            return found

    found = asyncio.run(scenario())
    for took_s, longest_s in found:
        print(f"load with a frozen peer: {took_s:.3f} s; the loop never waited longer than {longest_s:.3f} s")
        assert took_s < 1.0 + GRACE_S
    # Of the better one: a busy machine stops a process now and then, a call in the loop would do so each time.
    assert min(longest_s for _, longest_s in found) < 0.5
    settled(world)


def test_a_client_that_starts_in_a_black_hole_begins_with_misses_and_then_works(
    world: World, chunks: Chunks, manager_proxy: Proxy
) -> None:
    manager_proxy.swallow()
    began = time.monotonic()
    caller = through(world, manager_proxy, chunks, "shm", deadline_ms=1000)
    assert time.monotonic() - began < 1.5
    with caller.client:
        assert not caller.load(NUMBERS).hits
        manager_proxy.pass_on()
        assert recovers(caller, NUMBERS) < 20
    settled(world)


@pytest.mark.parametrize("after_bytes", [0, 10, 100, 1000, 3000])
def test_a_manager_connection_that_freezes_inside_an_answer(
    world: World, chunks: Chunks, manager_proxy: Proxy, after_bytes: int
) -> None:
    caller = through(world, manager_proxy, chunks, "shm")
    with caller.client:
        recovers(caller, NUMBERS)
        manager_proxy.freeze_after_bytes = after_bytes  # connections that stand have moved more: they freeze at once
        for _ in range(3):
            caller.load(NUMBERS)
            caller.store([200])
        assert manager_proxy.frozen
        manager_proxy.pass_on()
        assert recovers(caller, [*NUMBERS, 200]) < 20
    settled(world)


@pytest.mark.parametrize("after_bytes", [None, 0, 100, 150_000, 1_000_000])
def test_a_slab_connection_that_freezes(
    world: World, chunks: Chunks, slab_proxy: Proxy, after_bytes: int | None
) -> None:
    with world.caller(chunks, "tcp") as caller:
        recovers(caller, NUMBERS)
        if after_bytes is None:
            slab_proxy.swallow()
        else:
            slab_proxy.freeze_after_bytes = after_bytes
        frozen = caller.load(NUMBERS, deadline_ms=1000)
        assert not frozen.complete
        caller.store([300, 301], deadline_ms=1000)
        # Whoever does not need the network is not concerned.
        with world.caller(chunks, "shm") as neighbour:
            assert neighbour.load(NUMBERS).complete
        slab_proxy.pass_on()
        assert recovers(caller, [*NUMBERS, 300, 301]) < 20
    settled(world)


def test_a_slab_connection_that_freezes_inside_a_store(world: World, chunks: Chunks, slab_proxy: Proxy) -> None:
    big = Chunks(chunks.seed, (1_900_000,))
    with world.caller(big, "tcp") as caller:
        recovers(caller, [0, 1])  # slots of this size are there
        slab_proxy.freeze_upward_after_bytes = 900_000
        stored = caller.store([2, 3], deadline_ms=1000)
        assert not stored.present
        assert slab_proxy.frozen
        slab_proxy.pass_on()
        assert recovers(caller, [2, 3]) < 20
    settled(world)


def test_connections_that_break_are_replaced(world: World, chunks: Chunks) -> None:
    with (
        reserved_ports(1) as (port,),
        Proxy(f"unix://{world.places.socket('manager')}", port=port) as manager,
        contextlib.closing(through(world, manager, chunks, "shm").client) as client,
    ):
        caller = Caller(client, chunks, deadline_ms=1000)
        recovers(caller, NUMBERS)
        manager.close()  # every connection ends, and new ones are refused
        assert not caller.load(NUMBERS).hits
        with Proxy(f"unix://{world.places.socket('manager')}", port=port):
            assert recovers(caller, NUMBERS) < 20
    settled(world)


def test_nobody_there_at_all_is_misses(chunks: Chunks) -> None:
    with (
        reserved_ports(1) as (port,),
        SyncClient.connect(endpoint=f"tcp://127.0.0.1:{port}", token="t" * 16, deadline_ms=1000) as client,
    ):
        caller = Caller(client, chunks, deadline_ms=1000)
        for _ in range(5):
            assert not caller.load(NUMBERS).hits
            assert not caller.store(NUMBERS).present
        assert wait_until(lambda: client.status().breaker == "open", "the breaker to open")
