"""Callers' buffers that stay registered: found again, bounded, and never of memory that its owner gave back."""

from __future__ import annotations

import gc
import mmap
import weakref
from types import SimpleNamespace

import numpy as np
import pytest

from polarkv_client.buffers import flatten
from polarkv_client.transport.verbs.registrations import IDLE_S, LEAST_BYTES, Registered, Registrations
from polarkv_client.transport.verbs.seam import Access
from tests.support.fake_rdma import FakeDevice

SIZE = LEAST_BYTES


def view_of(buffer: object, *, writable: bool = True) -> memoryview:
    return flatten(buffer, "buffer", writable=writable)[0]


@pytest.fixture
def device() -> FakeDevice:
    return FakeDevice()


@pytest.fixture
def kept(device: FakeDevice) -> Registrations:
    return Registrations(device, 4 * SIZE)


def used(kept: Registrations, buffer: object, *, writable: bool = True) -> Registered:
    """Use it for one operation."""
    found = kept.use(view_of(buffer, writable=writable), writable=writable)
    assert found is not None
    kept.done(found)
    return found


def test_a_buffer_is_registered_once(kept: Registrations, device: FakeDevice) -> None:
    buffer = np.zeros(2 * SIZE, np.uint8)
    assert used(kept, buffer) is used(kept, buffer)
    assert used(kept, buffer[10 : SIZE + 10]) is used(kept, buffer)  # a part of it
    assert device.made == 1
    assert device.regions[0].access == Access.LOCAL_WRITE


def test_parts_of_different_buffers_do_not_meet(kept: Registrations, device: FakeDevice) -> None:
    buffer = np.zeros(2 * SIZE, np.uint8)
    first, second = used(kept, buffer[:SIZE]), used(kept, buffer[SIZE:])
    assert first is not second
    assert used(kept, buffer) not in (first, second)  # it lies in neither
    assert device.made == 3


def test_what_is_only_read_may_be_read_only(kept: Registrations, device: FakeDevice) -> None:
    used(kept, bytes(SIZE), writable=False)
    assert device.regions[-1].access == Access.NONE


def test_memory_is_held_as_long_as_it_is_registered(kept: Registrations, device: FakeDevice) -> None:
    """Else it could be mapped anew, at the same address, under a registration of pages that are nobody's."""
    buffer = np.zeros(SIZE, np.uint8)
    alive = weakref.ref(buffer)
    used(kept, buffer)
    del buffer
    gc.collect()
    assert alive() is not None
    kept.close()
    gc.collect()
    assert alive() is None
    assert not device.regions


@pytest.mark.parametrize("make", [lambda: bytearray(SIZE), lambda: mmap.mmap(-1, SIZE)])
@pytest.mark.parametrize("over", [memoryview, lambda buffer: view_of(np.frombuffer(buffer, np.uint8)[:])])
def test_what_its_owner_may_take_back_is_not_kept(
    kept: Registrations, device: FakeDevice, make: type[bytearray], over: type[memoryview]
) -> None:
    buffer = make()
    assert kept.use(over(buffer), writable=True) is None
    assert not device.made
    if isinstance(buffer, bytearray):
        buffer.extend(b"x")  # raises when somebody holds it
    else:
        buffer.close()


def test_small_buffers_are_copied(kept: Registrations) -> None:
    assert kept.use(view_of(np.zeros(SIZE - 1, np.uint8)), writable=True) is None


def test_the_longest_unused_goes_first(kept: Registrations, device: FakeDevice) -> None:
    buffers = [np.zeros(SIZE, np.uint8) for _ in range(5)]
    first, second = used(kept, buffers[0]), used(kept, buffers[1])
    used(kept, buffers[2])
    used(kept, buffers[3])
    used(kept, buffers[0])
    used(kept, buffers[4])  # for which there is no room
    assert kept.size_bytes == sum(region.size_bytes for region in device.regions) == 4 * SIZE
    assert used(kept, buffers[0]) is first
    assert used(kept, buffers[1]) is not second


def test_what_is_in_use_stays(kept: Registrations, device: FakeDevice) -> None:
    buffers = [np.zeros(SIZE, np.uint8) for _ in range(5)]
    users = [kept.use(view_of(buffer), writable=True) for buffer in buffers]
    assert users[-1] is None
    assert len(device.regions) == 4
    kept.sweep(float("inf"))
    kept.close()
    assert len(device.regions) == 4
    for user in users[:4]:
        assert user is not None
        kept.done(user)
    assert not device.regions


def test_one_that_is_larger_than_the_limit_is_copied(kept: Registrations, device: FakeDevice) -> None:
    assert kept.use(view_of(np.zeros(5 * SIZE, np.uint8)), writable=True) is None
    assert not device.made


def test_what_is_idle_is_let_go_of(kept: Registrations, device: FakeDevice) -> None:
    found = used(kept, np.zeros(SIZE, np.uint8))
    kept.sweep(found.used_at + IDLE_S - 1)
    assert len(kept) == 1
    kept.sweep(found.used_at + IDLE_S)
    assert (len(kept), kept.size_bytes, device.regions) == (0, 0, [])


def test_when_no_more_may_be_locked_it_is_copied_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    # The module's clock alone: the threads of other tests go by the machine's.
    clock = SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr("polarkv_client.transport.verbs.registrations.time", clock)
    device = FakeDevice(most_bytes=SIZE)
    kept = Registrations(device, 100 * SIZE)
    first = kept.use(view_of(np.zeros(SIZE, np.uint8)), writable=True)
    other = np.zeros(SIZE, np.uint8)
    assert kept.use(view_of(other), writable=True) is None
    assert (kept.failures, kept.size_bytes) == (1, SIZE)
    assert "CAP_IPC_LOCK" in kept.last_failure
    device.most_bytes = 100 * SIZE
    assert kept.use(view_of(other), writable=True) is None  # not tried again at once
    now += 5
    assert kept.use(view_of(other), writable=True) is not None
    assert first is not None
