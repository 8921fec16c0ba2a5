"""RDMA without a device: a tree as /sys shows one, and a device that registers, connects and moves nothing."""

from __future__ import annotations

import errno
import ipaddress
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from polarkv_client.protocol.messages import QueuePair
from polarkv_client.transport.verbs import seam

MAPPED = "::ffff:192.168.7.2"
LINK_LOCAL = "fe80::1"


def sysfs_device(
    root: Path, name: str, gids: Mapping[int, tuple[str, str]], *, state: str = "4: ACTIVE", link: str = "Ethernet",
    number: int = 0, interface: str = "eth0",
) -> None:  # fmt: skip
    """Write what the kernel shows of a device. ``gids``: (address, kind) by index."""
    port = root / "class" / "infiniband" / name / "ports" / "1"
    texts = {"state": state, "link_layer": link}
    for index in range(max(gids, default=0) + 3):
        address, kind = gids.get(index, ("::", ""))
        texts[f"gids/{index}"] = ipaddress.IPv6Address(address).exploded
        if kind:
            texts[f"gid_attrs/types/{index}"] = kind
            texts[f"gid_attrs/ndevs/{index}"] = interface
    for place, text in texts.items():
        (port / place).parent.mkdir(parents=True, exist_ok=True)
        (port / place).write_text(f"{text}\n")
    verbs = root / "class" / "infiniband_verbs" / f"uverbs{number}"
    verbs.mkdir(parents=True)
    (verbs / "ibdev").write_text(f"{name}\n")


class FakeRegion(seam.Region):
    """Memory that counts as registered."""

    def __init__(self, device: FakeDevice, address: int, size_bytes: int, access: seam.Access) -> None:
        self.device, self.address, self.size_bytes, self.access = device, address, size_bytes, access
        device.made += 1
        self.lkey = self.rkey = device.made
        device.regions.append(self)

    def close(self) -> None:
        self.device.regions.remove(self)


class FakeCompletions(seam.Completions):
    """On which nothing completes."""

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_CLOEXEC)

    def arm(self) -> None:
        pass

    def take_event(self) -> None:
        raise NotImplementedError

    def poll(self, most: int) -> Sequence[seam.Completion]:
        return ()

    def close(self) -> None:
        os.close(self.descriptor)


class FakePair(seam.Pair):
    """Takes what is posted. To connect it does what its device is told."""

    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.number = len(device.pairs)
        self.closed = False
        device.pairs.append(self)

    def connect(self, gid_index: int, mine: QueuePair, theirs: QueuePair, access: seam.Access) -> None:
        self.device.connecting()

    def post(self, works: Sequence[seam.Work]) -> None:
        pass

    def close(self) -> None:
        self.closed = True


class FakeDevice(seam.Device):
    """Registers up to ``most_bytes``; knows what is registered now, and every queue pair there was."""

    def __init__(self, name: str = "fake0", most_bytes: int = 1 << 40, region_bytes: int = 1 << 40) -> None:
        self.name = name
        self.limits = seam.Limits(region_bytes, 1 << 20, 1000, 1000, 16)
        self.most_bytes = most_bytes
        self.made = 0
        self.closed = False
        self.regions: list[FakeRegion] = []
        self.pairs: list[FakePair] = []
        self.connecting: Callable[[], None] = lambda: None

    def port(self, number: int) -> seam.Port:
        return seam.Port(True, 5, 0)

    def register(self, address: int, size_bytes: int, access: seam.Access) -> seam.Region:
        assert not self.closed, "real ones crash"
        if sum(region.size_bytes for region in self.regions) + size_bytes > self.most_bytes:
            raise seam.VerbsError("registering: Cannot allocate memory", errno.ENOMEM)
        return FakeRegion(self, address, size_bytes, access)

    def completions(self, most: int, *, events: bool) -> seam.Completions:
        return FakeCompletions()

    def pair(self, completions: seam.Completions, port: int, queued: int) -> seam.Pair:
        return FakePair(self)

    def close(self) -> None:
        if self.regions:
            raise seam.VerbsError("closing: Device or resource busy", errno.EBUSY)
        self.closed = True


class FakeBinding(seam.Binding):
    """Opens devices by these names."""

    name = "fake"
    version = "1"

    def __init__(self, *devices: FakeDevice) -> None:
        self.devices = {device.name: device for device in devices}

    def open(self, name: str) -> seam.Device:
        if name not in self.devices:
            raise seam.VerbsError(f"libibverbs has no device {name}: is its provider's library installed?")
        return self.devices[name]
