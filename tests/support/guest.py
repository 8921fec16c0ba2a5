"""Whether tests run in the virtual machine of tests/vm, and how much slower it is than this machine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

IN_GUEST = Path("/run/polarkv-vm/state").exists()
# Where every instruction is emulated, all that tests limit or wait for is given so many times as long.
EMULATED = 10
SLOWNESS = EMULATED if IN_GUEST and os.environ.get("POLARKV_VM_MACHINE") == "qemu" else 1

T = TypeVar("T")


def slower(settings: Mapping[str, T]) -> dict[str, T]:
    """Settings whose times (``…_ms``) are as much longer as the machine is slower."""
    return {
        name: value * SLOWNESS if name.endswith("_ms") and isinstance(value, int) else value  # type: ignore[misc]
        for name, value in settings.items()
    }
