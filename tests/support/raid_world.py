"""A small world of disks in which the commands of :mod:`polarkv_dataplane.raid` do what the real programs do.

It is a value: a command gives the worlds after each of the writes that it consists of, so that a search can cut it off
at each. What a cache would have stored is a mark on the file system; destroying it is an error that the world finds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from polarkv_dataplane.raid.state import LEVEL, Array, Device, Record, Seen, Wanted
from polarkv_dataplane.raid.steps import Command

DISK_BYTES = 64 << 20
DATA_BYTES = 32 << 20
MOUNT = "/array"
WANTED = Wanted("space/pod-0", MOUNT, 65532)


class DataLost(AssertionError):
    """A command destroyed what a cache had stored, or what was somebody else's."""


@dataclass(frozen=True)
class Disk:
    """A disk: the record in it, what else it holds, and whether that is somebody else's and must stay."""

    record: Record | None = None
    signatures: tuple[str, ...] = ()
    size_bytes: int = DISK_BYTES


@dataclass(frozen=True)
class FileSystem:
    """What an array holds: a file system that is whole or half made, with or without a cache in it."""

    whole: bool
    used: bool = False
    owner: int = 0


@dataclass(frozen=True)
class World:
    """Disks by number, the arrays that run (kernel's name -> numbers of the disks), file systems by array UUID."""

    disks: tuple[Disk, ...]
    running: tuple[tuple[str, frozenset[int]], ...] = ()
    file_systems: tuple[tuple[str, FileSystem], ...] = ()
    mounted: str | None = None
    made: int = 0
    expendable: frozenset[int] = frozenset()

    def file_system(self, uuid: str) -> FileSystem | None:
        return dict(self.file_systems).get(uuid)

    def with_file_system(self, uuid: str, file_system: FileSystem) -> World:
        rest = tuple(item for item in self.file_systems if item[0] != uuid)
        return replace(self, file_systems=tuple(sorted((*rest, (uuid, file_system)), key=lambda item: item[0])))

    def with_disk(self, number: int, disk: Disk) -> World:
        return replace(self, disks=(*self.disks[:number], disk, *self.disks[number + 1 :]))

    def power_cut(self) -> World:
        return replace(self, running=(), mounted=None)

    def uuid_of(self, members: frozenset[int]) -> str:
        record = self.disks[min(members)].record
        assert record is not None
        return record.array_uuid

    def write_over(self, number: int) -> None:
        """Say that a disk is written to from its beginning. Raises DataLost where that destroys something."""
        disk = self.disks[number]
        if number in self.expendable:
            return
        if disk.signatures and disk.record is None:
            raise DataLost(f"disk {number} held {disk.signatures}")
        if disk.record is not None:
            if disk.record.name not in (WANTED.name, WANTED.draft):
                raise DataLost(f"disk {number} was a member of {disk.record.name}")
            file_system = self.file_system(disk.record.array_uuid)
            if file_system is not None and file_system.used:
                raise DataLost(f"disk {number} held a part of the cache of {disk.record.array_uuid}")


def path_of(number: int) -> str:
    return f"/dev/polarkv/{number}"


def number_of(path: str) -> int:
    return int(path.rsplit("/", 1)[1])


def look(world: World) -> Seen:
    """What the program would see."""
    devices = tuple(
        Device(path_of(number), f"8:{number}", disk.size_bytes, disk.record, disk.signatures)
        for number, disk in enumerate(world.disks)
    )
    arrays = tuple(_array(world, name, members) for name, members in world.running)
    mounted = next((array for array in arrays if array.kernel_name == world.mounted), None)
    owner = None
    if mounted is not None:
        numbers = dict(world.running)[mounted.kernel_name]
        file_system = world.file_system(world.uuid_of(numbers))
        owner = file_system.owner if file_system else 0
    return Seen(devices, arrays, mounted.number if mounted else None, owner)


def _array(world: World, name: str, members: frozenset[int]) -> Array:
    record = world.disks[min(members)].record
    assert record is not None
    whole = len(members) == record.members
    file_system = world.file_system(record.array_uuid) if whole else None
    return Array(
        kernel_name=name,
        number=f"9:{name.removeprefix('md')}",
        path=f"/dev/polarkv-array/{name}",
        members=frozenset(f"8:{number}" for number in members),
        level=record.level,
        disks=record.members,
        state="clean" if whole else "inactive",
        size_bytes=sum(each.data_bytes for number in members if (each := world.disks[number].record)) if whole else 0,
        file_system="ext4/1" if file_system else "",
    )


def record(world: World, name: str, role: int, uuid: str, members: int | None = None, level: str = LEVEL) -> Record:
    """A member's record as ``mdadm --create`` would write it."""
    count = len(world.disks) if members is None else members
    return Record(uuid, name, level, count, role, f"at {uuid}", offset_bytes=1 << 20, data_bytes=DATA_BYTES)


def apply(world: World, command: Command) -> Iterator[World]:
    """The worlds after each write of a command; the last is its end. Raises DataLost."""
    program, *arguments = command.argv
    match program, arguments:
        case "mdadm", ["--create", *rest]:
            yield from _create(world, rest)
        case "mdadm", ["--assemble", *rest]:
            yield from _assemble(world, rest)
        case "mdadm", ["--stop", path]:
            name = path.rsplit("/", 1)[1]
            assert world.mounted != name, "a mounted array was stopped"
            assert name in dict(world.running), "an array that does not run was stopped"
            yield replace(world, running=tuple(item for item in world.running if item[0] != name))
        case "mkfs.ext4", [*options, path]:
            yield from _make_file_system(world, options, path)
        case "wipefs", ["--all", "--types", "nolinux_raid_member", path]:
            disk = world.disks[number_of(path)]
            if disk.record is None:
                world.write_over(number_of(path))
            assert not any(number_of(path) in members for _, members in world.running), "wipefs finds the disk busy"
            yield world.with_disk(number_of(path), replace(disk, signatures=()))
        case "mount", [*_, path, place]:
            assert place == MOUNT
            assert world.mounted is None
            yield _mount(world, path.rsplit("/", 1)[1])
        case "umount", [place]:
            assert place == MOUNT
            assert world.mounted is not None
            yield replace(world, mounted=None)
        case "chown", [owner, place]:
            assert place == MOUNT
            assert world.mounted is not None
            uuid = world.uuid_of(dict(world.running)[world.mounted])
            file_system = world.file_system(uuid)
            assert file_system is not None
            yield world.with_file_system(uuid, replace(file_system, owner=int(owner.partition(":")[0])))
        case ("mkdir" | "e2fsck"), _:
            yield world
        case _:
            raise AssertionError(f"nobody knows {command.argv}")


def _paths(arguments: list[str]) -> list[int]:
    return [number_of(argument) for argument in arguments if argument.startswith("/dev/polarkv/")]


def _option(arguments: list[str], name: str) -> str:
    return next((text.partition("=")[2] for text in arguments if text.startswith(f"{name}=")), "")


def _create(world: World, arguments: list[str]) -> Iterator[World]:
    numbers = _paths(arguments)
    assert not world.running, "mdadm finds the disks busy"
    assert int(_option(arguments, "--raid-devices")) == len(numbers)
    world = replace(world, made=world.made + 1)
    uuid = f"made-{world.made}"
    for role, number in enumerate(numbers):
        world.write_over(number)
        fresh = record(world, _option(arguments, "--name"), role, uuid, len(numbers), _option(arguments, "--level"))
        fresh = replace(fresh, data_bytes=min(DATA_BYTES, world.disks[number].size_bytes - fresh.offset_bytes))
        world = world.with_disk(number, replace(world.disks[number], record=fresh))
        yield world
    yield replace(world, running=(("md127", frozenset(numbers)),))


def _assemble(world: World, arguments: list[str]) -> Iterator[World]:
    numbers = _paths(arguments)
    assert not world.running, "mdadm finds the disks busy"
    records = [world.disks[number].record for number in numbers]
    assert {each.array_uuid for each in records if each} == {_option(arguments, "--uuid")}, "mdadm finds no array"
    if _option(arguments, "--update") == "name":
        for number in numbers:
            old = world.disks[number].record
            assert old is not None
            renamed = replace(old, name=_option(arguments, "--name"))
            world = world.with_disk(number, replace(world.disks[number], record=renamed))
            yield world
    yield replace(world, running=(("md126", frozenset(numbers)),))


def _make_file_system(world: World, options: list[str], path: str) -> Iterator[World]:
    members = dict(world.running)[path.rsplit("/", 1)[1]]
    uuid = world.uuid_of(members)
    for number in members:
        world.write_over(number)
    owner = int(options[-1].rpartition("root_owner=")[2].partition(":")[0])
    yield world.with_file_system(uuid, FileSystem(whole=False))
    yield world.with_file_system(uuid, FileSystem(whole=True, owner=owner))


def _mount(world: World, name: str) -> World:
    """Mounted, a cache writes at once."""
    members = dict(world.running)[name]
    uuid = world.uuid_of(members)
    file_system = world.file_system(uuid)
    if file_system is None or not file_system.whole:
        raise DataLost("a file system that was not whole was mounted")
    names = {record.name for number in members if (record := world.disks[number].record)}
    if names != {WANTED.name}:
        raise DataLost(f"a cache writes to an array that some members call a draft: {names}")
    return replace(world.with_file_system(uuid, replace(file_system, used=True)), mounted=name)
