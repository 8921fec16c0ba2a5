"""Cache node servers as processes of their own, for tests that kill them; and which processes are still there."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

_CODE = """
import json, sys
from polarkv_dataplane.{role}.server import run_{role}
from polarkv_dataplane.{role}.settings import {name}Settings
run_{role}({name}Settings(**json.loads(sys.argv[1])))
"""


def alive(pids: Iterable[int]) -> list[int]:
    """Those that run. One may end at any time, also between two looks at it."""
    found = []
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append(pid)
    return found


@contextmanager
def server_process(role: str, settings: dict[str, object], log: Path) -> Iterator[subprocess.Popen[str]]:
    """Run a slab or disk server until the block ends; its output goes to ``log``."""
    code = _CODE.format(role=role, name=role.capitalize())
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", code, json.dumps(settings, default=str)],
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait(30)
