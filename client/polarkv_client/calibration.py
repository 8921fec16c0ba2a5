"""A calibration: rates that `polarkv calibrate` measured, in a JSON file for the client's gate and the planner."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec

from polarkv_client.errors import ConfigurationError

_Rate = Annotated[float, msgspec.Meta(ge=0, le=1e15)]


class Rates(NamedTuple):
    """What is known; 0: nothing yet. Loads in bytes/s by the tier in which chunks were found, prefill in tokens/s."""

    prefill_tokens_per_s: float = 0.0
    memory_bytes_per_s: float = 0.0
    disk_bytes_per_s: float = 0.0


class Calibration(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What was measured; 0: it was not. Loads by the tier in which chunks were found."""

    measured: str = ""  # when, ISO 8601
    host: str = ""
    prefill_tokens_per_s: _Rate = 0.0
    store_bytes_per_s: _Rate = 0.0
    memory_bytes_per_s: _Rate = 0.0
    disk_bytes_per_s: _Rate = 0.0

    def rates(self) -> Rates:
        """As the gate begins with them."""
        return Rates(self.prefill_tokens_per_s, self.memory_bytes_per_s, self.disk_bytes_per_s)

    def write(self, path: Path) -> None:
        """Write the file, whole or not at all."""
        beside = path.with_name(f".{path.name}.{os.getpid()}")
        beside.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n")
        beside.replace(path)


def read_calibration(path: Path) -> Calibration:
    """Read such a file.

    Raises:
        ConfigurationError: it cannot be read, or is none.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=Calibration)
    except OSError as error:
        raise ConfigurationError("calibration", str(path), f"name a readable file ({error.strerror})") from error
    except msgspec.DecodeError as error:
        fix = f"is no calibration ({error}); 'polarkv calibrate --output FILE' writes one"
        raise ConfigurationError("calibration", str(path), fix) from error
