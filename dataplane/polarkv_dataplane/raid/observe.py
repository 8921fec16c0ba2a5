"""What is there, from the kernel and the devices themselves: names below /dev say nothing here."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import stat
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from polarkv_client.errors import ConfigurationError
from polarkv_dataplane.raid.state import Array, Device, Record, Seen, Wanted
from polarkv_dataplane.raid.tools import run

SYSFS = Path("/sys")
# In a container /dev is its own, and writable where nothing else is.
NODES = Path("/dev/polarkv-array")
SECTOR_BYTES = 512
MEMBER = "linux_raid_member"
UNKNOWN = "unknown"
# A device without any known signature is blank if its ends are; both are where people's own formats begin.
PROBED_BYTES = 1 << 20

# A format's type, and its UUID or "".
Signature = tuple[str, str]


def see(wanted: Wanted, paths: Sequence[str]) -> Seen:
    """Look at the devices, at the arrays that they are in, and at what is mounted.

    Raises:
        ConfigurationError: a path is no block device.
        ToolFailed, OSError: looking failed.
    """
    numbers = [_number_of(path) for path in paths]
    arrays = list(_arrays(frozenset(numbers)))
    signatures = _signatures([*numbers, *(array.number for array in arrays if array.size_bytes)])
    arrays = [replace(array, file_system="+".join(_names(signatures.get(array.number, [])))) for array in arrays]
    members = [number for number in numbers if any(kind == MEMBER for kind, _ in signatures[number])]
    records = _records(members) if members else {}
    busy = {member for array in arrays for member in array.members}
    devices = [
        _device(path, number, signatures[number], records.get(number), number in busy)
        for path, number in zip(paths, numbers, strict=True)
    ]
    mounted = mounted_at(wanted.mount)
    owner = os.stat(wanted.mount).st_uid if mounted is not None else None
    return Seen(tuple(devices), tuple(arrays), mounted, owner)


def mounted_at(place: str) -> str | None:
    """The number of the device that is mounted at a place, the uppermost if several are; None where nothing is."""
    found = None
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
        _, _, number, _, where, *_ = line.split(" ")
        if re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), where) == os.path.normpath(place):
            found = number
    return found


def state_of(number: str | None) -> str:
    """Md's word for the state of an array, by its number; empty where there is none."""
    try:
        return _read(SYSFS / "dev/block" / str(number) / "md/array_state")
    except FileNotFoundError:
        return ""


def _number_of(path: str) -> str:
    try:
        found = os.stat(path)
    except OSError as error:
        fix = f"{error.strerror}: attach the device, or name another"
        raise ConfigurationError("raid.devices", path, fix) from None
    if not stat.S_ISBLK(found.st_mode):
        raise ConfigurationError("raid.devices", path, "it is no block device: name one")
    return f"{os.major(found.st_rdev)}:{os.minor(found.st_rdev)}"


def _device(path: str, number: str, found: list[Signature], record: Record | None, in_array: bool) -> Device:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.lseek(descriptor, 0, os.SEEK_END)
        others = [each for each in found if each[0] != MEMBER or record is None]
        places = (0, max(0, size - PROBED_BYTES))
        ends = b"".join(os.pread(descriptor, PROBED_BYTES, place) for place in places)
        if record is None and not others and any(ends):
            others = [(UNKNOWN, "")]
        # Who lets something go means this one: without a UUID it is told from others by what it is.
        digest = hashlib.sha256(ends).hexdigest()[:12]
        others = [(kind, uuid or digest) for kind, uuid in others]
    finally:
        os.close(descriptor)
    return Device(path, number, size, record, tuple(_names(others)), () if in_array else tuple(_holders(path, number)))


def _holders(path: str, number: str) -> Iterable[str]:
    """Who uses a device that is in no array: other block devices by name, and a mount or a swap area unnamed."""
    names = sorted(entry.name for entry in (SYSFS / "dev/block" / number / "holders").glob("*"))
    if names:
        return names
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_EXCL | os.O_CLOEXEC))
    except OSError as error:
        return [f"something on this machine ({error.strerror})"]
    return []


def _signatures(numbers: Sequence[str]) -> dict[str, list[Signature]]:
    """Every format that util-linux knows and finds on devices of these numbers."""
    nodes = {Path(_node(number)).name: number for number in numbers}
    text = run(("wipefs", "--json", "--no-act", *(str(NODES / name) for name in nodes)))
    found: dict[str, list[Signature]] = {number: [] for number in numbers}
    for entry in json.loads(text)["signatures"] if text.strip() else []:
        signature = (entry["type"], entry["uuid"] or "")
        # A table of partitions at both ends is one.
        if signature not in found[nodes[entry["device"]]]:
            found[nodes[entry["device"]]].append(signature)
    return found


def _names(signatures: Iterable[Signature]) -> list[str]:
    return sorted(f"{kind}/{uuid}" if uuid else kind for kind, uuid in signatures)


def _records(numbers: Sequence[str]) -> dict[str, Record]:
    """The members' records, as mdadm reads them; without those that are not whole."""
    nodes = {_node(number): number for number in numbers}
    text = run(("mdadm", "--examine", *nodes), accepted=(0, 1))
    _, *parts = re.split(r"^(/\S+):$", text, flags=re.MULTILINE)
    found = {nodes[path]: record_in(facts) for path, facts in zip(parts[::2], parts[1::2], strict=True)}
    return {number: record for number, record in found.items() if record is not None}


def record_in(text: str) -> Record | None:
    """The record of one member in what ``mdadm --examine`` says of it; None where that is not whole."""
    fields = dict(re.findall(r"^ *([A-Z][A-Za-z ]+?) : (.*)$", text, re.MULTILINE))
    role = re.fullmatch(r"Active device (\d+)", fields.get("Device Role", ""))
    try:
        return Record(
            array_uuid=fields["Array UUID"],
            name=_name(fields["Name"]),
            level=fields["Raid Level"],
            members=int(fields["Raid Devices"]),
            role=int(role[1]) if role else None,
            created=fields["Creation Time"],
            version=fields["Version"],
            chunk_bytes=int(fields.get("Chunk Size", "0K").removesuffix("K")) << 10,
            offset_bytes=_sectors(fields["Data Offset"]),
            data_bytes=_sectors(fields["Avail Dev Size"]),
        )
    except (KeyError, ValueError):
        return None


def _name(text: str) -> str:
    """The array's own name, without the machine's before it and mdadm's remark after it."""
    return text.partition("  (local to host")[0].rpartition(":")[2]


def _sectors(text: str) -> int:
    return int(text.split(maxsplit=1)[0]) * SECTOR_BYTES


def _arrays(numbers: frozenset[str]) -> Iterable[Array]:
    """The arrays that the kernel has with any of these devices in them."""
    for folder in sorted((SYSFS / "block").glob("md*")):
        members = frozenset(
            path.read_text(encoding="ascii").strip() for path in (folder / "md").glob("dev-*/block/dev")
        )
        if not members & numbers:
            continue
        # One may go away while it is looked at.
        with contextlib.suppress(FileNotFoundError):
            yield _array(folder, members)


def _array(folder: Path, members: frozenset[str]) -> Array:
    number = _read(folder / "dev")
    return Array(
        kernel_name=folder.name,
        number=number,
        path=_node(number),
        members=members,
        level=_read(folder / "md/level"),
        # Empty while members are still missing.
        disks=int((_read(folder / "md/raid_disks") or "0").split()[0]),
        state=_read(folder / "md/array_state"),
        size_bytes=int(_read(folder / "size")) * SECTOR_BYTES,
        chunk_bytes=int(_read(folder / "md/chunk_size") or "0"),
    )


def _read(path: Path) -> str:
    return path.read_text(encoding="ascii").strip()


def _node(number: str) -> str:
    """A device node of our own for a device of this number: names below /dev may be missing, stale or another's."""
    major, minor = map(int, number.split(":"))
    path = NODES / f"{major}-{minor}"
    NODES.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not path.exists():
        os.mknod(path, stat.S_IFBLK | 0o600, os.makedev(major, minor))
    return str(path)
