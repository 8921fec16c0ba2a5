"""The plan of an array, searched: disks with every mix of contents, cut off at every write by a crash or power cut."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import pytest

from polarkv_dataplane.raid import steps
from polarkv_dataplane.raid.plan import Refused, next_release, next_step
from polarkv_dataplane.raid.state import Array, Device, Seen, Wanted
from tests.support.raid_world import MOUNT, WANTED, DataLost, Disk, FileSystem, World, apply, look, record

MOST_STEPS = 12
BLANK = Disk()
EMPTY = World((BLANK, BLANK))
Plan = Callable[[Wanted, Seen], steps.Step | None]


def member(name: str, role: int, uuid: str, members: int = 2, **changes: object) -> Disk:
    return Disk(replace(record(EMPTY, name, role, uuid, members), **changes))  # type: ignore[arg-type]


def contents(role: int) -> dict[str, Disk]:
    """What a disk may hold that is named as the one at this place."""
    return {
        "blank": BLANK,
        "foreign file system": Disk(None, ("ext4/theirs",)),
        "unknown data": Disk(None, ("unknown",)),
        "member of another array": member("theirs", role, "theirs"),
        "member": member(WANTED.name, role, "A"),
        "the other member": member(WANTED.name, 1 - role, "A"),
        "member of a former array": member(WANTED.name, role, "B"),
        "member, overwritten": Disk(member(WANTED.name, role, "A").record, ("ext4/theirs",)),
        "member that shrank": replace(member(WANTED.name, role, "A"), size_bytes=17 << 20),
        "draft": member(WANTED.draft, role, "C"),
        "draft of an array of three": member(WANTED.draft, role, "D", 3),
        "draft, foreign before": Disk(member(WANTED.draft, role, "C").record, ("dos/theirs",)),
        "member that is called a draft": member(WANTED.draft, role, "A"),
    }


PAIRS = list(itertools.product(contents(0), contents(1)))


def world_of(*names: str) -> World:
    """A world of such disks; the arrays A and B hold a cache, unless A's publishing was cut off."""
    disks = tuple(contents(role)[name] for role, name in enumerate(names))
    published = not any("called a draft" in name for name in names)
    used = (("A", FileSystem(True, published, WANTED.owner)), ("B", FileSystem(True, True, WANTED.owner)))
    return World(disks, file_systems=used)


def running_variants(world: World) -> Iterator[World]:
    """The world as it is, and as udev's rules of the machine would have made it: arrays run, whole or not."""
    yield world
    for number, disk in enumerate(world.disks):
        if disk.record is not None and disk.record.name in (WANTED.name, WANTED.draft):
            yield replace(world, running=(("md127", frozenset({number})),))
    records = [disk.record for disk in world.disks if disk.record]
    if len(records) == len(world.disks) and len({(each.array_uuid, each.members) for each in records}) == 1:
        roles = {each.role for each in records}
        if roles == set(range(len(world.disks))) and records[0].members == len(roles):
            yield replace(world, running=(("md127", frozenset(roles)),))  # type: ignore[arg-type]


def successors(wanted: Wanted, world: World, plan: Plan) -> Iterator[World]:
    """Every world in which one step, cut off anywhere or not, may leave this one."""
    step = plan(wanted, look(world))
    if step is None:
        return
    for command in step.commands(wanted):
        for after in apply(world, command):
            world = after
            yield world
            yield world.power_cut()


def reachable(wanted: Wanted, starts: Iterable[World], plan: Plan = next_step) -> set[World]:
    """All worlds that crashes can lead to. How often an array was made does not tell worlds apart beyond three."""
    found: set[World] = set()
    waiting = list(starts)
    while waiting:
        world = waiting.pop()
        if world in found or world.made > 3:
            continue
        found.add(world)
        try:
            waiting.extend(successors(wanted, world, plan))
        except Refused:
            continue
    return found


def run(wanted: Wanted, world: World, plan: Plan = next_step) -> World:
    """Take every step to its end. Raises Refused."""
    for _ in range(MOST_STEPS):
        step = plan(wanted, look(world))
        if step is None:
            return world
        for command in step.commands(wanted):
            *_, world = apply(world, command)
    raise AssertionError(f"no end: {world}")


def refusal(wanted: Wanted, world: World) -> str | None:
    try:
        run(wanted, world)
    except Refused as refused:
        return str(refused)
    return None


def check_release(world: World) -> None:
    after = run(WANTED, world, next_release)
    assert all(after.disks[min(numbers)].record == member("theirs", 0, "theirs").record for _, numbers in after.running)
    assert after.mounted is None
    assert (after.disks, after.file_systems) == (world.disks, world.file_systems)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_blank_disks_become_the_array_whatever_is_cut_off_where(count: int) -> None:
    worlds = reachable(WANTED, [World((BLANK,) * count)])
    assert len(worlds) > 10 * count
    for world in worlds:
        end = run(WANTED, world)
        assert end.mounted is not None
        (found,) = {disk.record.array_uuid for disk in end.disks if disk.record}
        file_system = end.file_system(found)
        assert file_system is not None
        assert (file_system.whole, file_system.owner) == (True, WANTED.owner)
        assert all(disk.record and disk.record.name == WANTED.name for disk in end.disks)
        check_release(world)


def may_be_made_anew(name: str) -> bool:
    return name == "blank" or (name.startswith("draft") and "called" not in name)


@pytest.mark.parametrize("names", PAIRS, ids=" + ".join)
def test_every_mix_of_contents(names: tuple[str, str]) -> None:
    worlds = reachable(WANTED, running_variants(world_of(*names)))
    kinds = set(names)
    for world in worlds:
        check_release(world)
        end = run(WANTED, world) if refusal(WANTED, world) is None else None
        if kinds in ({"member"}, {"the other member"}):
            assert end is not None
            assert end.mounted is not None
            assert end.file_system("A") == FileSystem(True, True, WANTED.owner)
        elif kinds <= {"member", "member that is called a draft"}:
            assert end is not None
            assert end.mounted is not None
        elif kinds == {"member of a former array"}:
            assert end is not None
            assert end.file_system("B") == FileSystem(True, True, WANTED.owner)
        elif all(may_be_made_anew(name) for name in names):
            assert end is not None
            assert end.mounted is not None
        elif kinds == {"member that is called a draft"} or "called a draft" in names[0] + names[1]:
            assert end is None or end.mounted is not None
        else:
            assert end is None


@pytest.mark.parametrize("names", PAIRS, ids=" + ".join)
def test_what_is_refused_is_not_touched(names: tuple[str, str]) -> None:
    world = world_of(*names)
    if (said := refusal(WANTED, world)) is not None:
        assert {each.disks for each in reachable(WANTED, [world])} == {world.disks}
        assert "/dev/polarkv/" in said


@pytest.mark.parametrize("names", PAIRS, ids=" + ".join)
def test_what_was_named_as_lost_and_nothing_else_is_overwritten(names: tuple[str, str]) -> None:
    world = world_of(*names)
    said = refusal(WANTED, world)
    if said is None:
        return
    lost = frozenset(said.rpartition("POLARKV_RAID_OVERWRITE=")[2].split(","))
    wanted = replace(WANTED, overwrite=lost)
    for each in reachable(wanted, [replace(world, expendable=frozenset({0, 1}))]):
        assert run(wanted, each).mounted is not None
    for kept in lost:
        assert refusal(replace(WANTED, overwrite=lost - {kept}), world) is not None


def test_an_array_that_is_whole_is_not_lost_because_it_was_once_named_as_lost() -> None:
    wanted = replace(WANTED, overwrite=frozenset({"md/A", "md/B"}))
    end = run(wanted, world_of("member", "member"))
    assert end.file_system("A") == FileSystem(True, True, WANTED.owner)


def test_the_order_in_which_members_are_named_does_not_matter() -> None:
    whole = run(WANTED, World((BLANK,) * 3)).power_cut()
    for order in itertools.permutations(whole.disks):
        end = run(WANTED, replace(whole, disks=order))
        assert end.file_systems == whole.file_systems


def test_a_disk_that_was_exchanged_for_a_blank_one_is_named() -> None:
    whole = run(WANTED, World((BLANK,) * 4)).power_cut()
    for number in range(4):
        with pytest.raises(Refused, match=rf"/dev/polarkv/{number} holds nothing.* of 4, of which .* are here"):
            run(WANTED, whole.with_disk(number, BLANK))


def test_a_refusal_does_not_stop_or_unmount_the_running_array_of_somebody_else() -> None:
    names = ("member of another array",) * 2
    world = replace(world_of(*names), running=(("md127", frozenset({0, 1})),))
    assert refusal(WANTED, world) is not None
    assert run(WANTED, world, next_release) == world
    mounted = replace(world, mounted="md127")
    assert run(WANTED, mounted, next_release) == mounted


def test_an_array_whose_records_nobody_can_read_any_more_is_stopped() -> None:
    (array,) = look(replace(world_of("member", "member"), running=(("md127", frozenset({0, 1})),))).arrays
    unread = look(EMPTY)
    assert next_release(WANTED, replace(unread, arrays=(array,))) == steps.Stop(array)


# What the search must find: a plan that is wrong in one place.


def _published_first(self: steps.Format, wanted: Wanted) -> list[steps.Command]:
    make, stop, publish = FORMAT(self, wanted)
    return [stop, publish, make]


def _created_as_final(self: steps.Create, wanted: Wanted) -> list[steps.Command]:
    (command,) = CREATE(self, wanted)
    return [replace(command, argv=tuple(text.replace(wanted.draft, wanted.name) for text in command.argv))]


FORMAT, CREATE = steps.Format.commands, steps.Create.commands


@pytest.mark.parametrize(
    ("step", "commands"), [(steps.Format, _published_first), (steps.Create, _created_as_final)], ids=["make", "call"]
)
def test_a_wrong_order_is_found(monkeypatch: pytest.MonkeyPatch, step: type, commands: object) -> None:
    monkeypatch.setattr(step, "commands", commands)
    with pytest.raises((DataLost, AssertionError, Refused)):
        test_blank_disks_become_the_array_whatever_is_cut_off_where(2)


def test_a_plan_that_takes_members_for_blank_is_found() -> None:
    def careless(wanted: Wanted, seen: Seen) -> steps.Step | None:
        try:
            return next_step(wanted, seen)
        except Refused:
            return steps.Create(tuple(device.path for device in seen.devices))

    with pytest.raises(DataLost):
        reachable(WANTED, [world_of("member", "blank")], careless)


# What no world of disks shows.


def seen(*devices: Device, arrays: tuple[Array, ...] = (), mounted: str | None = None) -> Seen:
    return Seen(devices, arrays, mounted)


FIRST, SECOND = Device("/dev/a", "8:0", 1 << 30), Device("/dev/b", "8:16", 1 << 30)
ARRAY = Array("md127", "9:127", "/node", frozenset({"8:0", "8:16"}), "raid0", 2, "clean", 1 << 30)


@pytest.mark.parametrize(
    ("there", "said"),
    [
        (seen(FIRST, replace(FIRST, path="/dev/c")), "/dev/a and /dev/c are one device"),
        (seen(FIRST, replace(SECOND, holders=("dm-0",))), "/dev/b is in use by dm-0"),
        (seen(FIRST, SECOND, mounted="8:32"), r"another device \(8:32\) is mounted"),
        (
            seen(FIRST, SECOND, arrays=(replace(ARRAY, members=frozenset({"8:0", "8:48"})),)),
            r"/dev/a belong to the running array md127, as do devices that were not named \(8:48\)",
        ),
    ],
)
def test_what_is_odd_about_devices_is_refused(there: Seen, said: str) -> None:
    with pytest.raises(Refused, match=said):
        next_step(WANTED, there)


def whole(**changes: object) -> Seen:
    devices = tuple(
        Device(device.path, device.number, 1 << 30, member(WANTED.name, role, "A").record)
        for role, device in enumerate((FIRST, SECOND))
    )
    size = sum(device.record.data_bytes for device in devices if device.record)
    array = replace(ARRAY, size_bytes=size, file_system="ext4/1")
    return Seen(devices, (replace(array, **changes),))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"level": "linear"}, "has level linear instead of raid0"),
        ({"disks": 3}, "has members 3 instead of 2"),
        ({"size_bytes": 4096}, "has size 4096 instead of"),
        ({"file_system": "xfs/1"}, "holds xfs/1 instead of ext4"),
        ({"file_system": ""}, "holds no file system instead of ext4"),
    ],
)
def test_a_running_array_is_verified(changes: dict[str, object], said: str) -> None:
    assert isinstance(next_step(WANTED, whole()), steps.Mount)
    with pytest.raises(Refused, match=said):
        next_step(WANTED, whole(**changes))


@pytest.mark.parametrize("state", ["inactive", "broken", "clear", "readonly"])
def test_a_running_array_that_does_not_serve_is_put_together_anew(state: str) -> None:
    assert isinstance(next_step(WANTED, whole(state=state)), steps.Stop)
    mounted = replace(whole(state=state), mounted=ARRAY.number)
    assert isinstance(next_step(WANTED, mounted), steps.Unmount)


def test_names_fit_into_records_and_are_nobody_elses() -> None:
    arrays = [Wanted(array, MOUNT, 0) for array in ("a/pod-0", "a/pod-1", "x" * 400)]
    names = {name for array in arrays for name in (array.name, array.draft)}
    assert len(names) == 6
    assert all(len(f"any:{name}".encode()) <= 32 for name in names)
