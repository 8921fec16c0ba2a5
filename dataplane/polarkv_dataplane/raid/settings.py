"""Settings of the program that assembles a cache node's array."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, model_validator

from polarkv_client.errors import ConfigurationError
from polarkv_client.settings_cli import Section
from polarkv_dataplane.raid.state import Wanted
from polarkv_dataplane.runtime.settings import Settings

MOST_MEMBERS = 64


class RaidSettings(Settings):
    """What the program is told at its start."""

    array: str = Field(
        min_length=1, description="Name of the array, the same in every life of the cache node and nobody else's."
    )
    devices: list[str] = Field(description="Block devices of all members, in any order.")
    mount: Path = Field(description="Directory at which the array's file system is mounted.")
    owner: int = Field(default=0, ge=0, description="Number of the user and group that own the file system's root.")
    overwrite: list[str] = Field(
        default=[], description="Contents of devices that may be lost, as a refusal names them; `ext4/UUID`, for one."
    )
    retry_ms: int = Field(
        default=20_000, ge=0, description="Time for which a step that fails is tried again before the program gives up."
    )

    @model_validator(mode="after")
    def _check(self) -> RaidSettings:
        if not 1 <= len(self.devices) <= MOST_MEMBERS:
            raise ConfigurationError("devices", self.devices, f"name 1 to {MOST_MEMBERS} devices")
        for name in (*self.devices, str(self.mount)):
            if not name.startswith("/"):
                field = "mount" if name == str(self.mount) else "devices"
                raise ConfigurationError(field, name, "use an absolute path")
        return self

    def wanted(self) -> Wanted:
        """What must be there in the end."""
        return Wanted(self.array, str(self.mount), self.owner, frozenset(self.overwrite))


RAID = Section("raid", RaidSettings)
