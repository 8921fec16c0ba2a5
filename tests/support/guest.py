"""Whether tests run in the virtual machine of tests/vm."""

from __future__ import annotations

from pathlib import Path

IN_GUEST = Path("/run/polarkv-vm/state").exists()
