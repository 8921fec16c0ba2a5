"""Asks a script in an engine's environment how a connector differs from the installed interface."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.engines.support.environments import ROOT, Environment

MARK = "INTERFACE "


def differences_in(environment: Environment, module: str, *arguments: str, paths: Sequence[Path] = ()) -> list[str]:
    """What ``module`` printed behind :data:`MARK`: sentences, one for each difference; ``paths`` it can import from."""
    ran = subprocess.run(
        [environment.python, "-m", module, *arguments], env=environment.variables(ROOT, *paths), capture_output=True,
        text=True, timeout=150, check=False,
    )  # fmt: skip
    lines = [line for line in ran.stdout.splitlines() if line.startswith(MARK)]
    assert lines, ran.stderr[-4000:]
    found: list[str] = json.loads(lines[-1].removeprefix(MARK))
    return found
