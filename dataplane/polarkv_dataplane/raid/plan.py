"""The plan: from what is wanted and what is there to the one next step. Pure, and without memory of its own.

Whatever a crash leaves behind is a state like any other. Two rules make that safe. An array bears the name of a draft,
in the records of all its members, until its file system is lasting: only then is it called what is wanted, and only
then can anything be written to it. And only blank devices, drafts, and what the caller named as lost are made anew.
"""

from __future__ import annotations

from collections.abc import Sequence

from polarkv_dataplane.raid.state import LEVEL, Array, Device, Record, Seen, Wanted
from polarkv_dataplane.raid.steps import (
    Assemble,
    Clean,
    Create,
    Format,
    Mount,
    Own,
    Publish,
    Step,
    Stop,
    Unmount,
)

# md's words for an array that serves; "read-auto" becomes "clean" with the first write.
SERVING = frozenset({"active", "active-idle", "clean", "read-auto", "write-pending"})
VERSION = "1.2"


class Refused(Exception):
    """What is there is not what is wanted, and no step may change it. Says which device, what it holds, and the fix."""


def next_step(wanted: Wanted, seen: Seen) -> Step | None:
    """The next step towards the mounted array; None when it is there.

    Raises:
        Refused: going on would lose something, or serve something else.
    """
    _check_devices(seen)
    _check_arrays(seen)
    try:
        uuid = _whole(wanted, seen.devices)
        if uuid is not None:
            return _towards_whole(wanted, seen, uuid)
    except Refused as refused:
        lost = sorted({device.contents for device in seen.devices if _is_kept(wanted, device)})
        if not wanted.overwrite.issuperset(lost):
            text = f"{refused}; or, to lose what is there, set POLARKV_RAID_OVERWRITE={','.join(lost)}"
            raise Refused(text) from None
    return _towards_draft(wanted, seen)


def next_release(wanted: Wanted, seen: Seen) -> Step | None:
    """The next step towards devices that nothing of ours uses; None when that is so.

    It is taken after a refusal too: devices that were named by mistake may be somebody else's running array.
    """
    ours = [array for array in seen.arrays if _is_ours(wanted, seen, array)]
    if seen.mounted is not None and any(array.number == seen.mounted for array in ours):
        return Unmount()
    numbers = {device.number for device in seen.devices}
    return next((Stop(array) for array in ours if array.members <= numbers), None)


def _is_ours(wanted: Wanted, seen: Seen, array: Array) -> bool:
    """Whether a member says so, or no member says anything."""
    members = [device for device in seen.devices if device.number in array.members]
    names = {device.record.name for device in members if device.record is not None}
    return bool(names & {wanted.name, wanted.draft}) or not any(device.contents for device in members)


def _check_devices(seen: Seen) -> None:
    """Nothing about the devices as such is odd."""
    by_number: dict[str, Device] = {}
    for device in seen.devices:
        other = by_number.setdefault(device.number, device)
        if other is not device:
            raise Refused(f"{other.path} and {device.path} are one device ({device.number}): name every member once")
        if device.holders:
            raise Refused(f"{device.path} is in use by {', '.join(device.holders)}: end that, or name another device")


def _check_arrays(seen: Seen) -> None:
    """No device is in an array together with one that was not named; what is mounted is not somebody else's."""
    numbers = {device.number for device in seen.devices}
    for array in seen.arrays:
        others = sorted(array.members - numbers)
        if others:
            raise Refused(
                f"{_paths(seen.devices, array.members)} belong to the running array {array.kernel_name}, as do devices "
                f"that were not named ({', '.join(others)}): name all its members, or stop it"
            )
    if seen.mounted is not None and all(array.number != seen.mounted for array in seen.arrays):
        raise Refused(f"another device ({seen.mounted}) is mounted where the array belongs: unmount it")


def _whole(wanted: Wanted, devices: Sequence[Device]) -> str | None:
    """The UUID of the array that bears the wanted name; None where no member does.

    Raises:
        Refused: a member of it is missing, or is not what it was; or there is no array, and a device is not blank.
    """
    members = [(device, device.record) for device in devices if device.record and device.record.name == wanted.name]
    if not members:
        _check_blank(wanted, devices)
        return None
    first, record = members[0]
    for device in devices:
        own = device.record
        if own is None or own.name not in (wanted.name, wanted.draft) or own.array_uuid != record.array_uuid:
            roles = sorted({member.role for _, member in members if member.role is not None})
            raise Refused(
                f"{device.path} holds {device.contents or 'nothing'}, but {first.path} is a member of the array "
                f"{record.array_uuid}, of {record.members}, of which {roles} are here: give it the device that holds "
                f"the missing member"
            )
        _check_member(device, own, len(devices))
    roles_seen: dict[int | None, Device] = {}
    for device in devices:
        assert device.record is not None
        other = roles_seen.setdefault(device.record.role, device)
        if other is not device:
            raise Refused(
                f"{other.path} and {device.path} are both member {device.record.role} of the array "
                f"{record.array_uuid}: one is a copy; name the other members"
            )
    if any(device.record and device.record.created != record.created for device in devices):
        raise Refused(f"members of the array {record.array_uuid} were made at different times: name those of one array")
    return record.array_uuid


def _check_member(device: Device, record: Record, count: int) -> None:
    """A member of an array that holds data is what it was made as."""
    if record.version != VERSION:
        raise Refused(f"{device.path}: the array's records have version {record.version}, not {VERSION}: make it anew")
    if record.level != LEVEL:
        raise Refused(f"{device.path} is a member of a {record.level} array, not of {LEVEL}: name other devices")
    if record.members != count:
        raise Refused(
            f"{device.path} is a member of an array of {record.members} devices, and {count} were named: name all of "
            "them, and no other"
        )
    if record.role is None:
        raise Refused(f"{device.path} is a spare of the array {record.array_uuid}: name its members")
    if device.size_bytes < record.offset_bytes + record.data_bytes:
        raise Refused(
            f"{device.path} has {device.size_bytes} bytes, less than the {record.offset_bytes + record.data_bytes} "
            "that it had when the array was made: restore its size"
        )
    if device.signatures:
        raise Refused(
            f"{device.path} is member {record.role} of the array {record.array_uuid}, but something else was written "
            f"over it ({', '.join(device.signatures)}): restore the device"
        )


def _check_blank(wanted: Wanted, devices: Sequence[Device]) -> None:
    """Without an array every device is blank, or was of a draft."""
    for device in devices:
        if _is_kept(wanted, device):
            array = "" if device.record is None else f" (member of the array {device.record.name!r})"
            raise Refused(
                f"{device.path} holds {device.contents}{array}: name a device that is blank, or empty this one"
            )


def _is_kept(wanted: Wanted, device: Device) -> bool:
    """Whether a device holds anything that must not be lost."""
    return bool(device.contents) and not _is_draft(wanted, device.record)


def _is_draft(wanted: Wanted, record: Record | None) -> bool:
    return record is not None and record.name == wanted.draft


def _paths(devices: Sequence[Device], numbers: frozenset[str]) -> str:
    return ", ".join(device.path for device in devices if device.number in numbers)


def _towards_whole(wanted: Wanted, seen: Seen, uuid: str) -> Step | None:
    """The array has a file system: put it together under its name, verify it, mount it."""
    paths = tuple(device.path for device in seen.devices)
    array = _assembled(seen)
    unpublished = any(_is_draft(wanted, device.record) for device in seen.devices)
    if array is None or unpublished:
        if seen.arrays:
            return _free(seen)
        return Publish(uuid, paths) if unpublished else Assemble(uuid, paths)
    _verify(array, seen.devices)
    if not array.file_system.startswith("ext4"):
        raise Refused(
            f"the array {uuid} of {', '.join(paths)} holds {array.file_system or 'no file system'} instead of ext4: "
            f"restore its members"
        )
    if seen.mounted is None:
        return Mount(array)
    return None if seen.owner == wanted.owner else Own()


def _towards_draft(wanted: Wanted, seen: Seen) -> Step:
    """Nothing of value is there: make a draft, and a file system on it."""
    paths = tuple(device.path for device in seen.devices)
    uuid = _complete_draft(wanted, seen.devices)
    array = _assembled(seen)
    dirty = tuple(device.path for device in seen.devices if device.signatures) if uuid else ()
    if array is not None and uuid and not dirty:
        _verify(array, seen.devices)
        return Format(array, uuid, paths)
    if seen.arrays:
        return _free(seen)
    if not uuid:
        return Create(paths)
    return Clean(dirty) if dirty else Assemble(uuid, paths)


def _free(seen: Seen) -> Step:
    """An array that is not what it should be leaves the kernel."""
    return Stop(seen.arrays[0]) if seen.mounted is None else Unmount()


def _complete_draft(wanted: Wanted, devices: Sequence[Device]) -> str | None:
    """The UUID of a draft that has all its members, each once."""
    records = [device.record for device in devices if _is_draft(wanted, device.record)]
    drafts = [record for record in records if record is not None]
    fits = [record for record in drafts if record.level == LEVEL and record.members == len(devices)]
    whole = {record.role for record in fits} == set(range(len(devices)))
    uuids = {(record.array_uuid, record.created) for record in fits}
    return fits[0].array_uuid if whole and len(fits) == len(devices) and len(uuids) == 1 else None


def _assembled(seen: Seen) -> Array | None:
    """The one running array that has every device in it."""
    numbers = {device.number for device in seen.devices}
    if len(seen.arrays) != 1 or seen.arrays[0].members != numbers or seen.arrays[0].state not in SERVING:
        return None
    return seen.arrays[0]


def _verify(array: Array, devices: Sequence[Device]) -> None:
    """What the kernel made of the members is what their records say."""
    expected = sum(
        device.record.data_bytes // array.chunk_bytes * array.chunk_bytes for device in devices if device.record
    )
    for what, found, right in (
        ("level", array.level, LEVEL),
        ("members", array.disks, len(devices)),
        ("size", array.size_bytes, expected),
    ):
        if found != right:
            raise Refused(f"the array {array.kernel_name} has {what} {found} instead of {right}: stop it, and look")
