"""What is wanted, and what is there: plain data, from which :mod:`.plan` takes the next step."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

CHUNK_BYTES = 512 << 10
LEVEL = "raid0"


@dataclass(frozen=True)
class Wanted:
    """The array that must be there in the end.

    ``array`` is its name, the same in every life of the cache node. ``owner`` is the number of the user and group that
    the file system's root belongs to. ``overwrite`` names contents (as :attr:`Device.contents` shows them) that may be
    lost: whoever names them has seen them.
    """

    array: str
    mount: str
    owner: int
    overwrite: frozenset[str] = frozenset()

    @property
    def _digest(self) -> str:
        return hashlib.sha256(self.array.encode()).hexdigest()[:16]

    @property
    def name(self) -> str:
        """The name in the members' records of an array that is whole. Those have 32 bytes, the array's name any."""
        return f"polarkv-{self._digest}"

    @property
    def draft(self) -> str:
        """The name of an array that is being made: nothing of value was ever written to it."""
        return f"{self.name}-new"


@dataclass(frozen=True)
class Record:
    """What a member says of its array (md's superblock, version 1). ``role`` is None for a spare."""

    array_uuid: str
    name: str
    level: str
    members: int
    role: int | None
    created: str
    version: str = "1.2"
    chunk_bytes: int = CHUNK_BYTES
    offset_bytes: int = 0
    data_bytes: int = 0


@dataclass(frozen=True)
class Device:
    """A block device that was named. ``number`` is its major and minor number, ``signatures`` is what it holds.

    A signature is a type and, where it has one, its UUID: ``ext4/1b4e…``. A member's record is in ``record``, not in
    ``signatures``. ``holders`` are what uses the device, arrays aside.
    """

    path: str
    number: str
    size_bytes: int
    record: Record | None = None
    signatures: tuple[str, ...] = ()
    holders: tuple[str, ...] = ()

    @property
    def contents(self) -> str:
        """All that it holds, in one word; empty for a blank device."""
        member = () if self.record is None else (f"md/{self.record.array_uuid}",)
        return "+".join((*member, *self.signatures))


@dataclass(frozen=True)
class Array:
    """An array that the kernel has, with at least one of the devices in it. ``members`` are their numbers.

    ``path`` is a device node of our own making: names below /dev are whoever's. ``state`` is md's word for it.
    ``file_system`` is the signature on it, empty for none.
    """

    kernel_name: str
    number: str
    path: str
    members: frozenset[str]
    level: str
    disks: int
    state: str
    size_bytes: int
    chunk_bytes: int = CHUNK_BYTES
    file_system: str = ""


@dataclass(frozen=True)
class Seen:
    """What is there. ``mounted`` is the number of the device mounted at the wanted place, ``owner`` its root's."""

    devices: tuple[Device, ...]
    arrays: tuple[Array, ...] = field(default=())
    mounted: str | None = None
    owner: int | None = None
