"""Asking for another end's address: bounded in time and number, and without libibverbs no obstacle."""

from __future__ import annotations

import ctypes
import errno
import threading
import time
from pathlib import Path

import pytest

from polarkv_client import errors
from polarkv_client.transport.verbs import devices, neighbours, seam
from tests.support.fake_rdma import MAPPED, sysfs_device
from tests.support.waiting import wait_until

TOWARDS = devices.raw_gid("10.0.0.7")


def soon(seconds: float = 5.0) -> float:
    return time.monotonic() + seconds


def test_an_address_and_its_gid() -> None:
    assert devices.raw_gid("192.168.7.2") == devices.raw_gid(MAPPED)
    assert devices.Gid(0, devices.raw_gid("192.168.7.2"), "RoCE v2").text == "192.168.7.2"
    assert devices.Gid(0, devices.raw_gid("fe80::3"), "RoCE v2").text == "fe80::3"


def test_the_structures_are_as_large_as_those_of_libibverbs() -> None:
    sizes = [ctypes.sizeof(kind) for kind in (neighbours._Room, neighbours._Address, neighbours._Made)]
    assert (sizes, ctypes.sizeof(neighbours._Wanted)) == ([20, 32, 64], 144)


def test_a_machine_that_cannot_ask_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object, **__: object) -> None:
        raise OSError("libibverbs.so.1: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", load)
    neighbours.reach("fake0", 1, TOWARDS, soon())


def test_on_infiniband_nobody_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sysfs_device(tmp_path, "mlx5_0", {0: (MAPPED, "")}, link="InfiniBand")
    sysfs_device(tmp_path, "mlx5_1", {0: (MAPPED, "RoCE v2")}, number=1)
    links = {name: devices.is_infiniband(name, tmp_path) for name in ("mlx5_0", "mlx5_1")}
    assert links == {"mlx5_0": True, "mlx5_1": False}
    monkeypatch.setattr(devices, "is_infiniband", links.__getitem__)
    monkeypatch.setattr(neighbours, "_ask", lambda *_: errno.ETIMEDOUT)
    neighbours.reach("mlx5_0", 0, TOWARDS, soon())
    with pytest.raises(seam.VerbsError, match=r"mlx5_1: 10\.0\.0\.7 cannot be sent to: Connection timed out: is that"):
        neighbours.reach("mlx5_1", 0, TOWARDS, soon())


def test_an_address_that_does_not_answer_costs_no_more_than_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor do many of them: so many questions at once are bounded, and are asked again when earlier ones have ended."""
    answers = threading.Event()
    asked: list[bytes] = []

    def ask(_device: str, _gid_index: int, towards: bytes) -> int:
        asked.append(towards)
        answers.wait(30)
        return 0

    monkeypatch.setattr(neighbours, "_ask", ask)
    try:
        for _ in range(neighbours.MOST_ASKED):
            with pytest.raises(errors.Unavailable, match=r"10\.0\.0\.7 has not answered .* in time"):
                neighbours.reach("fake0", 1, TOWARDS, soon(0))
        with pytest.raises(errors.Unavailable, match="32 other addresses are"):
            neighbours.reach("fake0", 1, TOWARDS, soon(0.01))
    finally:
        answers.set()
    neighbours.reach("fake0", 1, TOWARDS, soon())
    assert len(asked) == neighbours.MOST_ASKED + 1
    names = [f"polarkv-reach-{device}" for device in ("fake0", "mlx5_1")]
    wait_until(lambda: not [thread for thread in threading.enumerate() if thread.name in names], "the threads to end")
