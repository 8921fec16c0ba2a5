"""Directories as volumes: whose they are, which set they belong to, and that nobody else uses them."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from polarkv_client.errors import ConfigurationError

IDENTITY_FILE = "polarkv-volume.json"
_IGNORED = frozenset({"lost+found"})


@dataclass(frozen=True)
class Identity:
    """What a volume's identity file says. ``volumes`` are the set's, in the order in which keys are spread over them.

    While ``complete`` is false the set is being made, and no file has been written to any of its volumes yet.
    """

    volume: str
    node: str
    volumes: tuple[str, ...]
    complete: bool

    def write(self, folder: Path) -> None:
        """Put the identity file in its place, whole or not at all, and lasting."""
        content = {"version": 1, **self.__dict__, "volumes": list(self.volumes)}
        temporary = folder / f"{IDENTITY_FILE}.tmp"
        with temporary.open("w", encoding="utf-8") as file:
            json.dump(content, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(folder / IDENTITY_FILE)
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    @classmethod
    def read(cls, folder: Path, field: str) -> Identity | None:
        """The identity of a volume; None for an empty directory.

        Raises:
            ConfigurationError: there is something else in it.
        """
        path = folder / IDENTITY_FILE
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content["version"] != 1:
                fix = (
                    f"{IDENTITY_FILE} has version {content['version']}: upgrade this program, or name another directory"
                )
                raise ConfigurationError(field, str(folder), fix)
            return cls(
                str(content["volume"]),
                str(content["node"]),
                tuple(map(str, content["volumes"])),
                bool(content["complete"]),
            )
        except FileNotFoundError:
            others = {entry.name for entry in os.scandir(folder)} - _IGNORED - {f"{IDENTITY_FILE}.tmp"}
            if others:
                fix = f"it holds {sorted(others)[0]!r} and no {IDENTITY_FILE}: name an empty directory"
                raise ConfigurationError(field, str(folder), fix) from None
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            fix = f"{IDENTITY_FILE} cannot be read ({error}): restore it, or empty the directory"
            raise ConfigurationError(field, str(folder), fix) from error


class VolumeSet:
    """The locked directories of one disk server, in the set's order. Closing it gives the locks back."""

    def __init__(self, node: str, directories: Sequence[Path], require_mount: bool) -> None:
        """Lock and check every directory; make the set if all are empty.

        Raises:
            ConfigurationError: a directory is missing, not mounted, in use, another node's or another set's.
        """
        self._locks: list[int] = []
        try:
            for index, folder in enumerate(directories):
                self._locks.append(_lock(folder, f"directories.{index}", require_mount))
            self.folders = self._order(node, directories)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Unlock."""
        for descriptor in self._locks:
            os.close(descriptor)
        self._locks.clear()

    def _order(self, node: str, directories: Sequence[Path]) -> list[Path]:
        found = [Identity.read(folder, f"directories.{index}") for index, folder in enumerate(directories)]
        for index, identity in enumerate(found):
            if identity is not None and identity.node != node:
                fix = f"it belongs to the cache node {identity.node!r}, this is {node!r}: name this node's directory"
                raise ConfigurationError(f"directories.{index}", str(directories[index]), fix)
        if not any(identity is not None and identity.complete for identity in found):
            return self._make(node, directories)
        known = next(identity for identity in found if identity is not None and identity.complete)
        by_volume: dict[str, Path] = {}
        for index, identity in enumerate(found):
            field, folder = f"directories.{index}", directories[index]
            if identity is None:
                missing = sorted(set(known.volumes) - {other.volume for other in found if other is not None})
                fix = f"the set has {len(known.volumes)} volumes, which are all here: leave this directory out"
                if missing:
                    fix = f"it is empty, but volume {missing[0]} of this set is missing: mount it there"
                raise ConfigurationError(field, str(folder), fix)
            # An incomplete identity beside a complete one: the set's making was cut off at its very end.
            if identity.volumes != known.volumes or identity.volume in by_volume:
                raise ConfigurationError(field, str(folder), "it belongs to another set of volumes: name this set's")
            by_volume[identity.volume] = folder
            if not identity.complete:
                Identity(identity.volume, node, known.volumes, True).write(folder)
        for volume in known.volumes:
            if volume not in by_volume:
                fix = f"volume {volume} of this set is missing: the set has {len(known.volumes)}, name all of them"
                raise ConfigurationError("directories", [str(folder) for folder in directories], fix)
        return [by_volume[volume] for volume in known.volumes]

    @staticmethod
    def _make(node: str, directories: Sequence[Path]) -> list[Path]:
        volumes = tuple(str(uuid.uuid4()) for _ in directories)
        for complete in (False, True):
            for volume, folder in zip(volumes, directories, strict=True):
                Identity(volume, node, volumes, complete).write(folder)
        return list(directories)


def _lock(folder: Path, field: str, require_mount: bool) -> int:
    """An exclusive lock on a directory, made if need be; the descriptor that holds it."""
    try:
        if require_mount and not _on_own_mount(folder):
            raise ConfigurationError(field, str(folder), "no file system is mounted there: mount the volume")
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigurationError(
            field, str(folder), f"{error.strerror}: name a directory that can be written"
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise ConfigurationError(field, str(folder), "it cannot be written: give this user the right to")
    except BlockingIOError:
        os.close(descriptor)
        fix = "another process uses this directory: stop it, or name another directory"
        raise ConfigurationError(field, str(folder), fix) from None
    except BaseException:
        with contextlib.suppress(OSError):
            os.close(descriptor)
        raise
    return descriptor


def _on_own_mount(folder: Path) -> bool:
    """Whether the directory, or one above it but the root, is a mount point."""
    absolute = folder.absolute()
    return any(os.path.ismount(path) for path in (absolute, *absolute.parents) if path != Path("/"))
