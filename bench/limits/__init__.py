"""What this machine itself can do: the bounds against which systems are judged."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol


class Limit(Protocol):
    """`measure` answers named rates in GB/s (10^9 bytes a second) for one chunk size."""

    name: str

    def start(self, total_bytes: int, directory: Path) -> None: ...

    def measure(self, value_bytes: int) -> dict[str, float]: ...

    def describe(self) -> dict[str, str]: ...

    def close(self) -> None: ...
