"""Arrays for real: md, ext4 and four disks, without udev."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

from polarkv_dataplane.raid import observe
from polarkv_dataplane.raid.__main__ import main
from polarkv_dataplane.raid.plan import Refused
from polarkv_dataplane.raid.runner import Runner, StepFailed, execute
from polarkv_dataplane.raid.state import Wanted
from polarkv_dataplane.raid.steps import Command
from polarkv_dataplane.runtime.stopping import Stop
from tests.support.guest import SLOWNESS
from tests.support.waiting import wait_until

PROGRAM = (sys.executable, "-m", "polarkv_dataplane.raid")
OWNER = 65532
MIB = 1 << 20


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60 * SLOWNESS, check=False)
    assert done.returncode == 0, (command, done.stdout, done.stderr)
    return done.stdout


@pytest.fixture
def disks() -> Iterator[list[str]]:
    """Four blank disks; afterwards nothing uses them."""
    paths = os.environ["POLARKV_VM_DISKS"].split()[:4]
    for path in paths:
        blank(path)
    yield paths
    # A test that failed may have left a mount, and the next one must not fail for that.
    for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines():
        if line.startswith(str(observe.NODES)):
            run("umount", line.split()[1])
    for folder in Path("/sys/block").glob("md*"):
        if (folder / "md/array_state").read_text(encoding="ascii").strip() != "clear":
            run("mdadm", "--stop", f"/dev/{folder.name}")


def blank(path: str) -> None:
    """As a new disk: zeros wherever anything is looked for."""
    with Path(path).open("r+b") as disk:
        size = disk.seek(0, os.SEEK_END)
        for offset in (0, size - 4 * MIB):
            disk.seek(offset)
            disk.write(bytes(4 * MIB))


@pytest.fixture
def wanted(tmp_path: Path) -> Wanted:
    return Wanted("space/pod-0", str(tmp_path / "array" / "data"), OWNER)


def runner(wanted: Wanted, disks: list[str], **options: object) -> Runner:
    return Runner(wanted, partial(observe.see, wanted, disks), **options)  # type: ignore[arg-type]


@contextmanager
def held(wanted: Wanted, disks: list[str]) -> Iterator[Path]:
    """The array, for the length of the block; its mount."""
    each = runner(wanted, disks)
    assert each.assemble(Stop())
    try:
        yield Path(wanted.mount)
    finally:
        each.release()


def filled(wanted: Wanted, disks: list[str]) -> bytes:
    """Make the array, and store something that touches every member; return what."""
    content = os.urandom(8 * MIB)
    with held(wanted, disks) as mount:
        (mount / "cache").write_bytes(content)
    return content


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """What a life of the array has left on four disks, for tests of what comes after it."""
    return Made(tmp_path_factory.mktemp("made"))


class Made:
    """Made on first use: making it takes as long as most tests."""

    def __init__(self, folder: Path) -> None:
        self._wanted = Wanted("space/pod-0", str(folder / "data"), OWNER)
        self._content = b""
        self._written: list[dict[int, bytes]] = []  # of each disk, by offset

    def put(self, disks: list[str]) -> bytes:
        """Have the disks hold it; what is stored."""
        if not self._content:
            self._content = filled(self._wanted, disks)
            self._written = [written(disk) for disk in disks]
        for disk, pieces in zip(disks, self._written, strict=True):
            blank(disk)
            with Path(disk).open("r+b") as file:
                for offset, piece in pieces.items():
                    file.seek(offset)
                    file.write(piece)
        return self._content


def written(path: str) -> dict[int, bytes]:
    """All of a disk that is not zero."""
    zeros = bytes(MIB)
    with Path(path).open("rb") as disk:
        pieces = enumerate(iter(partial(disk.read, MIB), b""))
        return {number * MIB: piece for number, piece in pieces if piece != zeros}


def refusal(wanted: Wanted, disks: list[str]) -> str:
    with pytest.raises(Refused) as refused:
        runner(wanted, disks).assemble(Stop())
    return str(refused.value)


def state(path: str) -> bytes:
    """The first 4 MiB of a disk: records, signatures, the file system's first blocks."""
    with Path(path).open("rb") as disk:
        return disk.read(4 * MIB)


def written_sectors(path: str) -> int:
    return int(Path(f"/sys/class/block/{Path(path).name}/stat").read_text(encoding="ascii").split()[6])


def test_four_disks_become_one_striped_file_system(wanted: Wanted, disks: list[str]) -> None:
    with held(wanted, disks) as mount:
        seen = observe.see(wanted, disks)
        (array,) = seen.arrays
        assert (array.level, array.disks, array.chunk_bytes) == ("raid0", 4, 512 << 10)
        assert array.number == seen.mounted == observe.mounted_at(wanted.mount)
        assert (mount.stat().st_uid, mount.stat().st_gid) == (OWNER, OWNER)
        facts = run("dumpe2fs", "-h", array.path)
        assert "RAID stride:              128" in facts
        assert "RAID stripe width:        512" in facts
        assert "Reserved block count:     0" in facts
        before = [written_sectors(disk) for disk in disks]
        descriptor = os.open(mount / "direct", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
        os.close(descriptor)
        (mount / "spread").write_bytes(bytes(8 * MIB))
        os.sync()
        assert all(written_sectors(disk) - was > 2048 for disk, was in zip(disks, before, strict=True))
    assert observe.mounted_at(wanted.mount) is None
    assert observe.see(wanted, disks).arrays == ()


def test_the_array_comes_back_with_its_files_in_any_order_of_devices(
    wanted: Wanted, disks: list[str], made: Made
) -> None:
    content = made.put(disks)
    with held(wanted, disks[2:] + disks[1::-1]) as mount:
        assert (mount / "cache").read_bytes() == content


class Killed(BaseException):
    """The program was ended between two commands."""


def test_killed_after_each_command_it_goes_on(wanted: Wanted, disks: list[str]) -> None:
    # What no power cut does: the kernel still has arrays and mounts of the former life.
    def after(count: int) -> list[str]:
        done: list[str] = []

        def act(command: Command) -> None:
            execute(command)
            done.append(command.argv[0])
            if len(done) == count:
                raise Killed

        each = runner(wanted, disks, act=act)
        with suppress(Killed):
            assert each.assemble(Stop())
        return done

    assert after(1) == ["mdadm"]
    assert after(1) == ["mkfs.ext4"]
    assert after(2) == ["mkfs.ext4", "mdadm"]
    assert after(4) == ["mdadm", "mkfs.ext4", "mdadm", "mdadm"]
    assert after(2) == ["mkdir", "e2fsck"]
    assert after(3) == ["mkdir", "e2fsck", "mount"]
    assert after(9) == []
    runner(wanted, disks).release()


def test_an_array_under_another_name_is_the_right_one(wanted: Wanted, disks: list[str], made: Made) -> None:
    content = made.put(disks)
    run("mdadm", "--assemble", "--config=none", "/dev/md/somebody-elses-name", *disks)
    with held(wanted, disks) as mount:
        assert (mount / "cache").read_bytes() == content


def test_a_device_name_that_is_another_arrays_is_not_believed(wanted: Wanted, disks: list[str], tmp_path: Path) -> None:
    content = filled(wanted, disks[:2])
    other = Wanted("space/pod-1", str(tmp_path / "other"), OWNER)
    # The other array takes the number that the first one had, and the first one's name points to it.
    with held(other, disks[2:]) as mount:
        (mount / "cache").write_bytes(b"another's")
        name = Path("/dev/md") / wanted.name
        name.unlink(missing_ok=True)
        name.symlink_to(observe.see(other, disks[2:]).arrays[0].path)
        with held(wanted, disks[:2]) as ours:
            assert (ours / "cache").read_bytes() == content
        assert (mount / "cache").read_bytes() == b"another's"


def test_a_half_assembled_array_is_put_together(wanted: Wanted, disks: list[str], made: Made) -> None:
    content = made.put(disks)
    # As udev's rules do, one device after the other, when one comes late.
    for disk in disks[:3]:
        run("mdadm", "--incremental", disk)
    assert {array.state for array in observe.see(wanted, disks).arrays} == {"inactive"}
    with held(wanted, disks) as mount:
        assert (mount / "cache").read_bytes() == content


def test_a_missing_member_is_named_and_nothing_is_written(wanted: Wanted, disks: list[str], made: Made) -> None:
    content = made.put(disks)
    saved = state(disks[2])
    blank(disks[2])
    before = [state(disk) for disk in disks]
    said = refusal(wanted, disks)
    assert f"{disks[2]} holds nothing" in said
    assert "of which [0, 1, 3] are here" in said
    assert "name all" in refusal(wanted, disks[:2] + disks[3:])
    assert [state(disk) for disk in disks] == before
    with Path(disks[2]).open("r+b") as disk:
        disk.write(saved)
    with held(wanted, disks) as mount:
        assert (mount / "cache").read_bytes() == content


def test_foreign_contents_are_refused_and_lost_only_when_they_are_named(wanted: Wanted, disks: list[str]) -> None:
    run("mkfs.ext4", "-q", "-F", disks[0])
    run("mkfs.ext4", "-q", "-F", disks[3])
    with Path(disks[1]).open("r+b") as disk:
        disk.seek(MIB // 2)
        disk.write(b"a format that nobody else knows")
    before = [state(disk) for disk in disks]
    said = refusal(wanted, disks)
    assert f"{disks[0]} holds ext4/" in said
    lost = said.rpartition("POLARKV_RAID_OVERWRITE=")[2].split(",")
    assert len(lost) == 3
    assert any(text.startswith("unknown/") for text in lost)
    refusal(replace(wanted, overwrite=frozenset(lost[1:])), disks)
    assert [state(disk) for disk in disks] == before
    content = filled(replace(wanted, overwrite=frozenset(lost)), disks)
    assert "ext4" not in run("wipefs", "--json", "--no-act", *disks)
    with held(wanted, disks) as mount:
        assert (mount / "cache").read_bytes() == content


@pytest.mark.parametrize(
    ("level", "name", "said"),
    [("1", None, "raid1 array, not of raid0"), ("0", "theirs", "member of the array 'theirs'")],
)
def test_another_array_is_refused(wanted: Wanted, disks: list[str], level: str, name: str | None, said: str) -> None:
    options = [f"--level={level}", f"--name={name or wanted.name}", "--metadata=1.2", "--run", "--homehost=any"]
    run("mdadm", "--create", "/dev/md/made-by-hand", "--config=none", *options, "--raid-devices=4", *disks)
    assert said in refusal(wanted, disks)


def test_a_device_in_use_is_refused(wanted: Wanted, disks: list[str], tmp_path: Path) -> None:
    run("mkfs.ext4", "-q", "-F", disks[1])
    run("mount", disks[1], str(tmp_path))
    try:
        assert f"{disks[1]} is in use by something on this machine" in refusal(wanted, disks)
    finally:
        run("umount", str(tmp_path))


def test_another_file_system_at_the_place_is_refused(wanted: Wanted, disks: list[str]) -> None:
    Path(wanted.mount).mkdir(parents=True)
    run("mount", "-t", "tmpfs", "none", wanted.mount)
    try:
        assert "is mounted where the array belongs" in refusal(wanted, disks)
        runner(wanted, disks).release()
        assert observe.mounted_at(wanted.mount) is not None
    finally:
        run("umount", wanted.mount)


def test_a_file_that_is_still_open_keeps_the_array_and_is_said(wanted: Wanted, disks: list[str]) -> None:
    each = runner(wanted, disks, retry_s=0.0)
    assert each.assemble(Stop())
    with (Path(wanted.mount) / "open").open("wb"), pytest.raises(StepFailed, match=r"umount .* busy"):
        each.release()
    each.release()


def environment(wanted: Wanted, disks: list[str]) -> dict[str, str]:
    return {
        "POLARKV_RAID_ARRAY": wanted.array,
        "POLARKV_RAID_DEVICES": ",".join(disks),
        "POLARKV_RAID_MOUNT": wanted.mount,
        "POLARKV_RAID_OWNER": str(wanted.owner),
    }


def checked(variables: dict[str, str]) -> bool:
    """What ``check`` says; in this process, because here starting one takes longer than what it does."""
    return CliRunner().invoke(main, ["check"], env=variables).exit_code == 0


@pytest.mark.timeout(180)
def test_the_program_holds_the_array_until_it_is_told_to_end(wanted: Wanted, disks: list[str]) -> None:
    variables = environment(wanted, disks)
    assert not checked(variables)
    for sent, status in ((signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, 0)):
        command, surroundings = [*PROGRAM, "hold"], {**os.environ, **variables}
        process = subprocess.Popen(command, env=surroundings, stderr=subprocess.PIPE, text=True)
        try:
            assert process.stderr is not None
            assert any("is mounted at" in line for line in process.stderr)
            assert checked(variables)
            if sent is signal.SIGTERM:
                assert subprocess.run([*PROGRAM, "check"], env=surroundings, check=False).returncode == 0
            process.send_signal(sent)
            assert process.wait(timeout=30 * SLOWNESS) == status
        finally:
            process.kill()
            process.communicate()
    assert not checked(variables)
    assert observe.see(wanted, disks).arrays == ()


CONTAINER = """
set -eu
mount -t tmpfs -o mode=755 none /dev
mknod -m 666 /dev/null c 1 3
mkdir /dev/polarkv
{nodes}
mount -t tmpfs -o ro none /run
mount -o remount,ro,bind /
exec {program} hold
"""


@pytest.mark.timeout(180)
def test_as_in_a_container_without_udev(wanted: Wanted, disks: list[str], tmp_path: Path) -> None:
    # As under the operator: devices under names of their own, /dev of the container's own, one volume that is shared.
    shared = tmp_path / "array"
    shared.mkdir()
    run("mount", "-t", "tmpfs", "-o", "size=1M", "none", str(shared))
    run("mount", "--make-shared", str(shared))
    numbers = [os.stat(disk).st_rdev for disk in disks]
    nodes = [f"mknod /dev/polarkv/{i} b {os.major(n)} {os.minor(n)}" for i, n in enumerate(numbers)]
    script = CONTAINER.format(nodes="\n".join(nodes), program=shlex.join(PROGRAM))
    inside = environment(wanted, [f"/dev/polarkv/{index}" for index in range(len(disks))])
    # Of all mounts the volume alone reaches the outside.
    spaces = ["--mount", "--propagation", "unchanged", "--pid", "--fork", "--mount-proc", "--kill-child"]
    command = ["unshare", *spaces, "bash", "-c", script]
    container = subprocess.Popen(command, env={**os.environ, **inside})
    try:
        # What the servers' containers see, which are outside of its namespaces.
        wait_until(lambda: observe.mounted_at(wanted.mount) is not None, "the mount to be seen outside", 60)
        assert Path(wanted.mount).stat().st_uid == OWNER
        (first,) = psutil.Process(container.pid).children()
        first.terminate()
        assert container.wait(timeout=30 * SLOWNESS) == 0
        assert observe.mounted_at(wanted.mount) is None
        assert observe.see(wanted, disks).arrays == ()
    finally:
        container.kill()
        container.wait()
        run("umount", str(shared))
