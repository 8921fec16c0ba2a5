"""Control groups of a test cluster: one child group of the caller's own, removed when the cluster is gone.

With cgroup v1 that is one group in each hierarchy; with v2 one group, whose controllers are handed down.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

MOUNT = Path("/sys/fs/cgroup")
# What kubelet and runc ask for, where the machine has it; "systemd" is a hierarchy without a controller.
V1 = ("cpu", "cpuacct", "cpuset", "memory", "devices", "freezer", "blkio", "pids", "hugetlb", "systemd")


def is_v2() -> bool:
    """Whether the machine has the unified hierarchy alone."""
    return (MOUNT / "cgroup.controllers").exists()


def hierarchies() -> list[str]:
    """The cgroup v1 hierarchies that are mounted here, in the order of :data:`V1`."""
    return [name for name in V1 if (MOUNT / name / "cgroup.procs").exists()]


def own_groups() -> list[Path]:
    """The groups of this process, one a hierarchy."""
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines()]
    paths = {name: path for _, names, path in lines for name in names.removeprefix("name=").split(",")}
    if is_v2():
        return [MOUNT / paths[""].lstrip("/")]
    return [MOUNT / name / paths[name].lstrip("/") for name in hierarchies()]


def make(group: Path) -> None:
    """Make a group that processes can be moved into."""
    group.mkdir(exist_ok=True)
    # Of cgroup v1: a new cpuset has no processors and takes no process until it is given some.
    for file in ("cpuset.cpus", "cpuset.mems"):
        given = group.parent / file
        if not is_v2() and given.exists():
            (group / file).write_text(given.read_text(encoding="ascii"), encoding="ascii")


def hand_down() -> None:
    """Cgroup v2, in a new cgroup namespace: move this process to a leaf, so that its group may limit
    children."""
    leaf = MOUNT / "init"
    leaf.mkdir(exist_ok=True)
    (leaf / "cgroup.procs").write_text("0", encoding="ascii")
    offered = (MOUNT / "cgroup.controllers").read_text(encoding="ascii").split()
    (MOUNT / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in offered), encoding="ascii")


def remove(groups: list[Path]) -> bool:
    """Remove groups and what is below them; return whether all are gone (a process may take a moment to leave)."""
    for group in groups:
        for folder, _, _ in os.walk(group, topdown=False):
            with suppress(OSError):
                Path(folder).rmdir()
    return not any(group.exists() for group in groups)
