"""RDMA devices as the kernel shows them in /sys: what there is, whether its link is up, which addresses it has.

No binding is needed for that, so that everyone can say what is missing. Everything here is read anew at each call.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from pathlib import Path
from typing import NamedTuple

from polarkv_client import errors
from polarkv_client.host import read_text

SYSFS = Path("/sys")
DEVICE_FILES = Path("/dev/infiniband")
_MAPPED = b"\0" * 10 + b"\xff\xff"
_ROCE_PORT = 4791
ACTIVE = "active"
PORT = 1  # cards with two ports show as two devices
_MOST_HOLES = 8


class Gid(NamedTuple):
    """An address of a port: its index in the table, 16 bytes, and its kind as the kernel names it ("RoCE v2")."""

    number: int
    raw: bytes
    kind: str

    @property
    def text(self) -> str:
        """The address as people write it."""
        address = ipaddress.IPv6Address(self.raw)
        return str(address.ipv4_mapped or address)

    @property
    def is_routable_v4(self) -> bool:
        """Whether it is a RoCE v2 address that stands for an IPv4 one."""
        return self.kind == "RoCE v2" and self.raw.startswith(_MAPPED)


class Seen(NamedTuple):
    """A device's port 1. ``state`` is lower case ("active", "down"); ``link`` "Ethernet" or "InfiniBand"."""

    name: str
    state: str
    link: str
    gids: tuple[Gid, ...]
    file: str  # its file under /dev/infiniband, "" when the kernel names none


def seen(gid_index: int | None = None, sysfs: Path = SYSFS) -> list[Seen]:
    """All devices, by name; among their addresses the one at ``gid_index``, however far behind the others it is."""
    folder = sysfs / "class" / "infiniband"
    names = sorted(os.listdir(folder)) if folder.is_dir() else []
    return [_look(name, gid_index, sysfs) for name in names]


def _look(name: str, gid_index: int | None, sysfs: Path) -> Seen:
    folder = sysfs / "class" / "infiniband" / name / "ports" / str(PORT)
    state = read_text(folder / "state").partition(": ")[2].lower() or "unknown"
    gids = tuple(_gids(folder, gid_index))
    return Seen(name, state, read_text(folder / "link_layer"), gids, _device_file(name, sysfs))


def pick_gid(device: Seen, index: int | None) -> Gid:
    """The address to use: the configured one, else the RoCE v2 one of an IPv4 address; on InfiniBand the first.

    Raises:
        Unavailable: there is none; the text says what there is.
    """
    if index is not None:
        found = next((gid for gid in device.gids if gid.number == index), None)
    elif device.link == "InfiniBand":
        found = next(iter(device.gids), None)
    else:
        found = next((gid for gid in device.gids if gid.is_routable_v4), None)
    if found is not None:
        return found
    there = ", ".join(f"{gid.number}: {gid.text} ({gid.kind})" for gid in device.gids) or "none"
    wanted = f"at index {index}" if index is not None else "of RoCE v2 with an IPv4 address"
    raise errors.Unavailable(
        f"{device.name} has no GID {wanted} (it has {there}): give its network interface an IPv4 address, or set the "
        "GID's index"
    )


def is_infiniband(name: str, sysfs: Path = SYSFS) -> bool:
    """Whether a device's link is InfiniBand's: its addresses are local identifiers, which nobody need be asked for."""
    return read_text(sysfs / "class" / "infiniband" / name / "ports" / str(PORT) / "link_layer") == "InfiniBand"


def raw_gid(address: str) -> bytes:
    """The GID (16 bytes) that stands for an IP address, as :attr:`Gid.text` writes it. Raises ValueError."""
    parsed = ipaddress.ip_address(address)
    return parsed.packed if parsed.version == 6 else _MAPPED + parsed.packed


def interfaces(name: str, sysfs: Path = SYSFS) -> list[str]:
    """The network interfaces that a device's addresses are of."""
    folder = sysfs / "class" / "infiniband" / name / "ports" / str(PORT) / "gid_attrs" / "ndevs"
    found = {read_text(folder / str(index)) for index in range(_MOST_HOLES)}
    return sorted(found - {""})


def source_address(towards: str) -> str:
    """The address that this machine would send from to an IP address; "" when it knows no way there."""
    family = socket.AF_INET6 if ":" in towards else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((towards, _ROCE_PORT))  # sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return ""


# What counts what, by drivers; InfiniBand's own data counters are in words of four bytes.
_TRAFFIC: dict[str, tuple[tuple[str, int], ...]] = {
    "sent_bytes": (("counters/port_xmit_data", 4), ("hw_counters/tx_bytes", 1), ("hw_counters/hw_tx_bytes_cnt", 1)),
    "received_bytes": (("counters/port_rcv_data", 4), ("hw_counters/rx_bytes", 1), ("hw_counters/hw_rx_bytes_cnt", 1)),
    "sent_packets": (
        ("counters/port_xmit_packets", 1), ("hw_counters/sent_pkts", 1), ("hw_counters/hw_tx_packets_cnt", 1),
    ),
    "received_packets": (
        ("counters/port_rcv_packets", 1), ("hw_counters/rcvd_pkts", 1), ("hw_counters/hw_rx_packets_cnt", 1),
    ),
}  # fmt: skip


def traffic(name: str, sysfs: Path = SYSFS) -> dict[str, int]:
    """What a device has moved, as far as its driver counts: ``sent_bytes``, ``received_packets`` and so on."""
    folder = sysfs / "class" / "infiniband" / name / "ports" / str(PORT)
    found: dict[str, int] = {}
    for what, places in _TRAFFIC.items():
        for place, unit in places:
            if (text := read_text(folder / place)).isdigit():
                found[what] = int(text) * unit
                break
    return found


def _gids(folder: Path, also: int | None) -> list[Gid]:
    """Tables are filled from the front, with few holes, and may have a thousand places: each is a file to read."""
    found: list[Gid] = []
    index = 0
    while index <= (found[-1].number if found else 0) + _MOST_HOLES:
        found += _gid(folder, index)
        index += 1
    return found + (_gid(folder, also) if also is not None and also >= index else [])


def _gid(folder: Path, index: int) -> list[Gid]:
    try:
        raw = ipaddress.IPv6Address(read_text(folder / "gids" / str(index))).packed
    except ValueError:
        return []
    return [Gid(index, raw, read_text(folder / "gid_attrs" / "types" / str(index)))] if any(raw) else []


def _device_file(name: str, sysfs: Path) -> str:
    folder = sysfs / "class" / "infiniband_verbs"
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if read_text(path / "ibdev") == name:
            return path.name
    return ""
