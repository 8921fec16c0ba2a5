"""The program around the plan of an array: settings, tries, ends, and what mdadm says."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from polarkv_client.errors import ConfigurationError
from polarkv_dataplane.raid import observe, tools
from polarkv_dataplane.raid.plan import Refused
from polarkv_dataplane.raid.runner import MOST_STEPS, Runner, StepFailed
from polarkv_dataplane.raid.settings import RAID, RaidSettings
from polarkv_dataplane.raid.state import Device, Record, Seen
from polarkv_dataplane.raid.steps import Command
from polarkv_dataplane.runtime.stopping import Stop
from tests.support.raid_world import MOUNT, WANTED, Disk, World, apply, look

EXAMINED = """
          Magic : a92b4efc
        Version : 1.2
    Feature Map : 0x0
     Array UUID : 932a62b2:6555ce3b:01ae405b:f4e08cb2
           Name : {name}
  Creation Time : Mon Nov 30 02:42:57 2026
     Raid Level : raid0
   Raid Devices : 4

 Avail Dev Size : 520192 sectors (254.00 MiB 266.34 MB)
    Data Offset : 4096 sectors
   Super Offset : 8 sectors
          State : clean
    Device UUID : 12424040:a7d725a6:4c74a275:3106c2b5

    Update Time : Mon Nov 30 02:42:57 2026
       Checksum : 1909c663 - correct
         Events : 0

     Chunk Size : 512K

   Device Role : {role}
   Array State : AAAA ('A' == active, '.' == missing, 'R' == replacing)
"""


@pytest.mark.parametrize("name", ["polarkv-1", "any:polarkv-1", "host:polarkv-1  (local to host host)"])
@pytest.mark.parametrize(("role", "number"), [("Active device 2", 2), ("spare", None)])
def test_what_mdadm_says_of_a_member_is_read(name: str, role: str, number: int | None) -> None:
    assert observe.record_in(EXAMINED.format(name=name, role=role)) == Record(
        array_uuid="932a62b2:6555ce3b:01ae405b:f4e08cb2",
        name="polarkv-1",
        level="raid0",
        members=4,
        role=number,
        created="Mon Nov 30 02:42:57 2026",
        version="1.2",
        chunk_bytes=512 << 10,
        offset_bytes=4096 * 512,
        data_bytes=520192 * 512,
    )


@pytest.mark.parametrize("missing", ["Array UUID", "Raid Level", "Raid Devices", "Data Offset"])
def test_a_record_that_is_not_whole_is_none(missing: str) -> None:
    text = "\n".join(line for line in EXAMINED.splitlines() if missing not in line)
    assert observe.record_in(text) is None


def test_a_program_that_waits_for_a_device_in_the_kernel_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even SIGKILL ends one; here nothing kills it."""
    spared: list[subprocess.Popen[str]] = []

    def spare(process: subprocess.Popen[str]) -> None:
        spared.append(process)

    monkeypatch.setattr(subprocess.Popen, "kill", spare)
    monkeypatch.setattr(tools, "_KILLED_S", 0.05)
    with pytest.raises(tools.ToolFailed, match="did not end within 0 s: a device does not answer"):
        tools.run(("sleep", "60"), timeout_s=0.05)
    (process,) = spared
    assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.communicate()


class Machine:
    """A world that a runner acts on, and programs that fail as often as they are told to."""

    def __init__(self, *failures: str) -> None:
        self.world = World((Disk(), Disk()))
        self.failures = list(failures)
        self.ran: list[str] = []

    def look(self) -> Seen:
        return look(self.world)

    def act(self, command: Command) -> None:
        if self.failures and self.failures[0] == command.argv[0]:
            raise tools.ToolFailed(f"{self.failures.pop(0)} failed")
        self.ran.append(command.argv[0])
        *_, self.world = apply(self.world, command)


class Clock:
    def __init__(self, step_s: float) -> None:
        self.now_s, self.step_s = 0.0, step_s

    def __call__(self) -> float:
        self.now_s += self.step_s
        return self.now_s


class Impatient(Stop):
    """Does not wait between tries."""

    def wait(self, timeout_s: float | None = None) -> bool:
        return self.is_set()


def test_a_life_from_blank_disks_to_the_end() -> None:
    machine = Machine()
    runner = Runner(WANTED, machine.look, machine.act)
    assert runner.assemble(Stop())
    assert machine.ran == ["mdadm", "mkfs.ext4", "mdadm", "mdadm", "mkdir", "e2fsck", "mount"]
    runner.release()
    assert machine.ran[7:] == ["umount", "mdadm"]
    assert machine.world.running == ()


def test_what_fails_is_planned_anew_from_what_is_there() -> None:
    machine = Machine("mkfs.ext4", "mount", "mount")
    assert Runner(WANTED, machine.look, machine.act, now=Clock(1.0)).assemble(Impatient())
    assert machine.world.mounted is not None


def test_what_goes_on_failing_ends_with_what_was_said() -> None:
    machine = Machine(*["mount"] * 100)
    with pytest.raises(StepFailed, match=r"^mount failed$"):
        Runner(WANTED, machine.look, machine.act, retry_s=20.0, now=Clock(5.0)).assemble(Impatient())
    assert machine.failures.count("mount") >= 90


def test_a_stop_ends_it_between_steps() -> None:
    machine, stop = Machine(), Stop()

    def act(command: Command) -> None:
        machine.act(command)
        stop.set()

    assert not Runner(WANTED, machine.look, act).assemble(stop)
    assert machine.ran == ["mdadm"]


def test_an_array_that_somebody_else_changes_all_the_time_is_given_up() -> None:
    machine = Machine()
    ran: list[Command] = []
    with pytest.raises(StepFailed, match=f"no end after {MOST_STEPS} steps"):
        Runner(WANTED, machine.look, ran.append).assemble(Stop())
    assert len(ran) == MOST_STEPS


def test_a_refusal_is_not_tried_again() -> None:
    looks = []

    def refused() -> Seen:
        looks.append(1)
        return Seen((Device("/dev/a", "8:0", 1 << 30, signatures=("ext4/1",)),))

    with pytest.raises(Refused, match=r"/dev/a holds ext4/1: .*POLARKV_RAID_OVERWRITE=ext4/1$"):
        Runner(WANTED, refused).assemble(Stop())
    assert looks == [1]


@pytest.mark.parametrize(
    ("program", "said"),
    [
        (("no-such-program",), "no-such-program is not there: install"),
        ((sys.executable, "-c", "import sys; print('why', file=sys.stderr); exit(3)"), r"failed \(3\): why"),
        ((sys.executable, "-c", "import time; time.sleep(60)"), "did not end within 0 s"),
    ],
)
def test_a_program_that_fails_is_named_with_what_it_said(program: tuple[str, ...], said: str) -> None:
    with pytest.raises(tools.ToolFailed, match=said):
        tools.run(program, timeout_s=0.3 if "sleep" in program[-1] else 30.0)


SETTINGS = {
    "POLARKV_RAID_ARRAY": "space/pod-0",
    "POLARKV_RAID_DEVICES": "/dev/polarkv/0,/dev/polarkv/1",
    "POLARKV_RAID_MOUNT": MOUNT,
    "POLARKV_RAID_OWNER": "65532",
}


def test_settings_come_from_the_environment() -> None:
    settings: RaidSettings = RAID.load({}, environment={**SETTINGS, "POLARKV_RAID_OVERWRITE": "md/1,ext4/2"})
    wanted = settings.wanted()
    assert (wanted.array, wanted.mount, wanted.owner) == (WANTED.array, WANTED.mount, WANTED.owner)
    assert wanted.overwrite == {"md/1", "ext4/2"}
    assert wanted.name == WANTED.name


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("ARRAY", "", "raid.array"),
        ("DEVICES", "", "name 1 to 64 devices"),
        ("DEVICES", "sda,/dev/b", "raid.devices.*use an absolute path"),
        ("MOUNT", "data", "raid.mount.*use an absolute path"),
        ("OWNER", "-1", "raid.owner"),
    ],
)
def test_wrong_settings_are_named(variable: str, value: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        RAID.load({}, environment={**SETTINGS, f"POLARKV_RAID_{variable}": value})


@pytest.mark.parametrize(
    ("make", "said"),
    [(lambda path: path, "No such file"), (lambda path: path.touch() or path, "no block device")],
    ids=["missing", "file"],
)
def test_a_path_that_is_no_device_is_named(tmp_path: Path, make: Callable[[Path], Path], said: str) -> None:
    path = make(tmp_path / "device")
    with pytest.raises(ConfigurationError, match=said):
        observe.see(WANTED, [str(path)])


def test_what_is_mounted_is_found_by_place(tmp_path: Path) -> None:
    assert observe.mounted_at("/proc") is not None
    assert observe.mounted_at("/proc/") == observe.mounted_at("/proc")
    assert observe.mounted_at(str(tmp_path / "nothing")) is None
    assert observe.state_of(None) == observe.state_of(observe.mounted_at("/proc")) == ""
