"""Steps of the plan, and the commands that each is. A step may be cut off anywhere and is then planned anew."""

from __future__ import annotations

from dataclasses import dataclass

from polarkv_dataplane.raid.state import CHUNK_BYTES, LEVEL, Array, Wanted

BLOCK_BYTES = 4096
# A cache has few and large files: at the default, inodes take 1.6 % of the disks.
INODE_RATIO_BYTES = 64 << 10
_SHORT_S = 60.0
_LONG_S = 540.0


@dataclass(frozen=True)
class Command:
    """A program and its arguments; ``accepted`` are the exit statuses that mean success."""

    argv: tuple[str, ...]
    timeout_s: float = _SHORT_S
    accepted: tuple[int, ...] = (0,)


def _assemble(name: str, uuid: str, paths: tuple[str, ...], *more: str) -> Command:
    # The configuration files of a machine or an image may say something else of these devices.
    options = ("--assemble", "--config=none", f"/dev/md/{name}", f"--uuid={uuid}", *more)
    return Command(("mdadm", *options, *paths))


@dataclass(frozen=True)
class Stop:
    """Take an array that is not mounted out of the kernel; its members keep what they hold."""

    array: Array

    def commands(self, wanted: Wanted) -> list[Command]:
        """What it runs."""
        return [Command(("mdadm", "--stop", self.array.path))]


@dataclass(frozen=True)
class Create:
    """Make a draft of the array. Every member's record is one write, and says that it is a draft."""

    paths: tuple[str, ...]

    def commands(self, wanted: Wanted) -> list[Command]:
        """What it runs."""
        options = (
            "--create", "--config=none", f"/dev/md/{wanted.draft}", f"--name={wanted.draft}", "--homehost=any",
            "--run", "--force", "--metadata=1.2", f"--level={LEVEL}", f"--chunk={CHUNK_BYTES >> 10}K",
            f"--raid-devices={len(self.paths)}",
        )  # fmt: skip
        return [Command(("mdadm", *options, *self.paths))]


@dataclass(frozen=True)
class Clean:
    """Remove what else a draft's members hold, so that nothing takes them for what they were."""

    paths: tuple[str, ...]

    def commands(self, wanted: Wanted) -> list[Command]:
        """What it runs."""
        return [Command(("wipefs", "--all", "--types", "nolinux_raid_member", path)) for path in self.paths]


@dataclass(frozen=True)
class Assemble:
    """Put the array together."""

    uuid: str
    paths: tuple[str, ...]

    def commands(self, wanted: Wanted) -> list[Command]:
        """What it runs."""
        return [_assemble(wanted.name, self.uuid, self.paths)]


@dataclass(frozen=True)
class Format:
    """Make the file system on a draft; when that is lasting, call it the array that was wanted."""

    array: Array
    uuid: str
    paths: tuple[str, ...]

    def commands(self, wanted: Wanted) -> list[Command]:
        """What it runs."""
        stride = self.array.chunk_bytes // BLOCK_BYTES
        options = (
            "-q", "-F", "-t", "ext4", "-b", str(BLOCK_BYTES), "-m", "0", "-i", str(INODE_RATIO_BYTES),
            "-E", f"stride={stride},stripe-width={stride * len(self.paths)},nodiscard,"
            f"root_owner={wanted.owner}:{wanted.owner}",
        )  # fmt: skip
        return [
            Command(("mkfs.ext4", *options, self.array.path), _LONG_S),
            *Stop(self.array).commands(wanted),
            *Publish(self.uuid, self.paths).commands(wanted),
        ]


@dataclass(frozen=True)
class Publish:
    """Put a draft that has its file system together under the name of an array that is whole."""

    uuid: str
    paths: tuple[str, ...]

    def commands(self, wanted: Wanted) -> list[Command]:
        """What it runs."""
        return [_assemble(wanted.name, self.uuid, self.paths, "--update=name", f"--name={wanted.name}")]


@dataclass(frozen=True)
class Mount:
    """Mount the file system, after its journal was replayed and what that can mend was mended."""

    array: Array

    def commands(self, wanted: Wanted) -> list[Command]:
        """What it runs."""
        return [
            Command(("mkdir", "-p", wanted.mount)),
            Command(("e2fsck", "-p", self.array.path), _LONG_S, accepted=(0, 1)),
            Command(("mount", "-t", "ext4", "-o", "noatime,nodev,nosuid,noexec", self.array.path, wanted.mount)),
        ]


@dataclass(frozen=True)
class Own:
    """Give the file system's root to the user that the servers run as."""

    def commands(self, wanted: Wanted) -> list[Command]:
        """What it runs."""
        return [Command(("chown", f"{wanted.owner}:{wanted.owner}", wanted.mount))]


@dataclass(frozen=True)
class Unmount:
    """Unmount the file system, which writes what is not on the disks yet."""

    def commands(self, wanted: Wanted) -> list[Command]:
        """What it runs."""
        return [Command(("umount", wanted.mount))]


Step = Stop | Create | Clean | Assemble | Format | Publish | Mount | Own | Unmount
