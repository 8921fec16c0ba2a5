"""Whatever the engine has as a buffer, over RDMA; several devices at once; and the doctor where there are devices."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest

from polarkv_client.buffers import flatten
from polarkv_client.protocol.grants import Access
from polarkv_client.transport.base import Pick
from polarkv_client.transport.verbs.local import LocalDevices
from tests.contract.peers import Bench, OwnDevices, payload, picks, replace_checksum, soon
from tests.support.guest import SLOWNESS
from tests.support.slab_process import SlabProcess, start_slab

SIZE = (1 << 20) + 4096


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlabProcess]:
    slab = start_slab(tmp_path_factory.mktemp("slab"), memory_bytes=96 << 20)
    yield slab
    slab.close()


def moved(bench: Bench, source: object, target: object) -> None:
    """Store from one buffer and load into another."""
    extents = bench.extents([SIZE])
    write = bench.grant(Access.WRITE, extents)
    bench.transport.reach(write, soon())
    pick = Pick(0, extents[0], flatten(source, "source", writable=False))
    extents = [replace_checksum(extents[0], bench.transport.write(write, [pick], soon())[0])]
    pick = Pick(0, extents[0], flatten(target, "target", writable=True))
    assert bench.transport.read(bench.grant(Access.READ, extents), [pick], soon()) == [None]


@pytest.mark.parametrize("registered_bytes", [1 << 30, 0])
def test_buffers_of_every_kind(server: SlabProcess, registered_bytes: int) -> None:
    """Registered or copied, they hold the same bytes; arrays are registered once and found again."""
    devices = LocalDevices(("rxe1",), registered_bytes=registered_bytes)
    bench = Bench(server, OwnDevices(server.info, devices))
    data = payload(SIZE)
    array, halves = np.zeros(SIZE, np.uint8), np.zeros(SIZE // 2, np.float16)
    mapping = mmap.mmap(-1, SIZE)
    try:
        for target in (array, halves, bytearray(SIZE), mapping, [array[:5000], array[5000:]], array):
            array[:] = 0
            moved(bench, data, target)
            parts = target if isinstance(target, list) else [target]
            assert b"".join(bytes(flatten(part, "part", writable=False)[0]) for part in parts) == data
        registrations = devices.open()[0].registrations
        assert registrations.failures == 0
        # The bytes and both arrays, each once: a part of an array lies in what was registered of the whole.
        assert len(registrations) == (3 if registered_bytes else 0)
    finally:
        bench.transport.close()
    mapping.close()  # nobody holds it


def test_torch_tensors(server: SlabProcess) -> None:
    torch = pytest.importorskip("torch")
    bench = Bench(server, OwnDevices(server.info, LocalDevices(("rxe1",))))
    target = torch.zeros(SIZE // 2, dtype=torch.bfloat16)
    moved(bench, payload(SIZE), target)
    assert target.view(torch.uint8).numpy().tobytes() == payload(SIZE)
    bench.transport.close()


def test_lanes_are_spread_over_all_devices(server: SlabProcess) -> None:
    """Two devices on either side are two rails; each carries its part of what several threads move."""
    transport = OwnDevices(server.info)
    bench = Bench(server, transport)
    chunks = [payload(300_000, seed) for seed in range(8)]
    extents = bench.store(chunks)
    grant = bench.grant(Access.READ, extents)
    assert transport.parallelism == 4  # two lanes a rail
    lanes = [transport._take(grant, soon()) for _ in range(4)]
    assert Counter(lane.device.name for lane in lanes) == {"rxe0": 2, "rxe1": 2}
    for lane in lanes:
        transport._put(lane)
    for _ in range(4):
        targets = [bytearray(300_000) for _ in chunks]
        assert transport.read(grant, picks(extents, list(targets)), soon()) == [None] * 8
        assert targets == chunks
    transport.close()


def test_the_doctor_finds_everything_well(tmp_path: os.PathLike[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "polarkv_client.cli.main", "doctor", "--json", "--dir", str(tmp_path)],
        capture_output=True, text=True, timeout=60 * SLOWNESS, check=False,
    )  # fmt: skip
    found = {check["check"]: check for check in json.loads(done.stdout)["checks"] if "rdma" in check["check"]}
    assert {name: check["level"] for name, check in found.items()} == {
        f"rdma {device}{what}": "ok" for device in ("rxe0", "rxe1") for what in ("", " GID", " file", " provider")
    } | {"rdma library": "ok"}
    assert found["rdma library"]["found"].startswith("ibverbs ")
    assert "10.9.0.1" in found["rdma rxe0 GID"]["found"]
