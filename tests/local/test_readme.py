"""The README's "Use it", typed as it stands there, against a cluster that its own first line starts."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from polarkv_client.config import CONNECTION_FILE
from tests.support.readme import README, blocks, polarkv_lines

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a README, as a clone is; its path is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="polarkv-readme-") as name:
        shutil.copy(README, name)
        try:
            yield Path(name)
        finally:
            if (Path(name) / ".polarkv").exists():
                polarkv(Path(name), ["down"])


def python(folder: Path, arguments: list[str]) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("POLARKV_")}
    run = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, timeout=90, text=True,
        stdin=subprocess.DEVNULL, capture_output=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, f"{arguments}: exit code {run.returncode}\n{run.stdout}{run.stderr}"
    return run.stdout


def polarkv(folder: Path, arguments: list[str]) -> str:
    return python(folder, ["-m", "polarkv_dataplane.cli", *arguments])


def test_what_the_readme_says_to_type_works(folder: Path) -> None:
    up, *others = polarkv_lines()
    assert (up[0], [line[0] for line in others]) == ("up", ["put", "get", "status"])
    polarkv(folder, up)
    assert (folder / ".polarkv" / CONNECTION_FILE).exists()
    for line in others:
        polarkv(folder, line)
    assert (folder / "copy.md").read_bytes() == README.read_bytes()
    (example,) = blocks("python")
    said = example.splitlines()[-1].partition("# ")[2]
    assert python(folder, ["-c", example]).strip() == said == "1024 True"
