"""Lives of one array in guests that are cut off: each boot is a kernel of its own over the same disks."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.waiting import wait_until
from tests.vm.support import machine

BOOT_S = 120.0 if machine.chosen() is machine.KINDS["uml"] else 1200.0
DISKS = 4
DISK_BYTES = 256 << 20
pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def disks(tmp_path: Path) -> list[Path]:
    return [machine.make_disk(tmp_path / f"disk{number}", DISK_BYTES) for number in range(DISKS)]


def boot(disks: list[Path], *arguments: str) -> machine.Result:
    command = [sys.executable, "-m", "tests.vm.boots.life", *arguments]
    return machine.boot(command, disks=disks, timeout_s=BOOT_S)


def lived(disks: list[Path], *arguments: str, ends: int = 0) -> dict[str, Any]:
    """Boot, and return what the life said. ``ends`` is the status: a life that cuts its power never says one."""
    result = boot(disks, *arguments)
    assert result.status == ends, f"{result.output}\n{machine.explain(result, BOOT_S)}"
    said = [line for line in result.output.splitlines() if line.startswith("{")]
    answer: dict[str, Any] = json.loads(said[-1])
    return answer


def ran(disks: list[Path], *arguments: str) -> list[str]:
    """Boot a life that cuts its power; the commands that it ran before."""
    result = boot(disks, *arguments)
    assert result.status == machine.NEVER_RAN, f"{result.output}\n{machine.explain(result, BOOT_S)}"
    assert "Traceback" not in result.output, result.output
    return [line.split()[1] for line in result.output.splitlines() if line.startswith("ran ")]


def test_lives_of_an_array_that_are_cut_off_after_each_command(disks: list[Path]) -> None:
    # Each boot goes on from what the former left.
    assert ran(disks, "bring", "--commands", "1") == ["mdadm"]
    assert ran(disks, "bring", "--commands", "2") == ["mdadm", "mkfs.ext4"]
    assert ran(disks, "bring", "--commands", "3") == ["mdadm", "mkfs.ext4", "mdadm"]
    # A draft is given a file system anew, until the moment when it is called whole.
    assert ran(disks, "bring", "--commands", "4") == ["mdadm", "mkfs.ext4", "mdadm", "mdadm"]
    assert lived(disks, "serve", "--store", "40", "--end", "release")["loaded"] == 0
    for commands, expected in enumerate((["mdadm"], ["mdadm", "mkdir"], ["mdadm", "mkdir", "e2fsck"]), start=1):
        assert ran(disks[::-1], "bring", "--commands", str(commands)) == expected
    cut = boot(disks[::-1], "serve", "--load", "40", "--store", "40", "--end", "cut while storing")
    assert cut.status == machine.NEVER_RAN, cut.output
    served = lived(disks, "serve", "--load", "40", "--maybe", "60", "--end", "release")
    print(f"after a power cut under load: {served}")
    assert served["loaded"] == 40


def test_a_power_cut_inside_of_a_command_is_recovered_from(disks: list[Path]) -> None:
    for milliseconds in (250, 600):
        ran(disks, "bring", "--milliseconds", str(milliseconds))
    assert ran(disks, "bring")[-1] == "mount"


def test_nothing_of_this_machine_is_written(tmp_path: Path) -> None:
    place = tmp_path / "file"
    place.write_text("here", encoding="ascii")
    command = f"echo there >{place} && echo more >{tmp_path}/other && rm -rf {tmp_path}/gone && cat {place}"
    result = machine.boot(["bash", "-c", command], timeout_s=BOOT_S)
    assert (result.status, result.output) == (0, "there\n")
    assert place.read_text(encoding="ascii") == "here"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("command", "timeout_s", "status", "said"),
    [
        ("exit 3", BOOT_S, 3, "exit status 3"),
        ("exec cat /dev/zero >/dev/null", 8.0, machine.TIMED_OUT, "longer than its 8 s"),
        ("echo c >/proc/sysrq-trigger", BOOT_S, machine.NEVER_RAN, "sysrq triggered crash"),
    ],
)
def test_how_a_guest_ends_is_said(command: str, timeout_s: float, status: int, said: str) -> None:
    result = machine.boot(["bash", "-c", command], timeout_s=timeout_s)
    assert result.status == status
    assert said in machine.explain(result, timeout_s)


def test_a_guest_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.vm.support", "run", "--", "sleep", "300"]
    starter = psutil.Popen(command, env={**os.environ, "TMPDIR": str(tmp_path)})
    try:
        wait_until(lambda: len(starter.children()) == 2, "a guest and its guard", 60)
        # Its processes are of its own group, and some are not its children.
        groups = {os.getpgid(child.pid) for child in starter.children()}
    finally:
        starter.kill()
        starter.wait()

    def alive() -> list[psutil.Process]:
        return [each for each in psutil.process_iter() if group_of(each.pid) in groups]

    wait_until(lambda: not alive(), "all of the guest's processes to end", 20)


def group_of(pid: int) -> int:
    """The group of a process; 0 for one that is gone."""
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return 0
