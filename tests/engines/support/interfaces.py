"""Asks a script in an engine's environment how a connector differs from the installed interface."""

from __future__ import annotations

import functools
import json
import subprocess
from pathlib import Path
from typing import NamedTuple

from tests.engines.support.environments import ROOT, Environment

MARK = "INTERFACE "


class Differences(NamedTuple):
    """Sentences, one for each difference: as things are, and after a change of the engine has been planted."""

    now: list[str]
    changed: list[str]


@functools.cache  # importing an engine takes ten seconds
def differences_in(environment: Environment, module: str, paths: tuple[Path, ...] = ()) -> Differences:
    """What ``module`` printed behind :data:`MARK`, twice; ``paths`` it can import from."""
    ran = subprocess.run(
        [environment.python, "-m", module], env=environment.variables(ROOT, *paths), capture_output=True, text=True,
        timeout=150, check=False,
    )  # fmt: skip
    lines = [line.removeprefix(MARK) for line in ran.stdout.splitlines() if line.startswith(MARK)]
    assert len(lines) == len(Differences._fields), ran.stderr[-4000:]
    return Differences(*map(json.loads, lines))
