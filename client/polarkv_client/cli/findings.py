"""What a check of `polarkv doctor` finds, and how the checks look at a machine."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from polarkv_client.host import read_text


class Level(StrEnum):
    """How bad it is: ``warn`` works but slower or with less; ``fail`` does not work."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. ``fix`` is empty when there is nothing to do."""

    check: str
    level: Level
    found: str
    fix: str = ""


def has_capability(number: int) -> bool:
    """Whether this process has a capability in its effective set."""
    match = re.search(r"^CapEff:\s*([0-9a-f]+)", read_text("/proc/self/status"), re.MULTILINE)
    return bool(match and int(match[1], 16) >> number & 1)
