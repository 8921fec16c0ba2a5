"""The import contracts of pyproject.toml, on a copy of the packages with a breach planted in it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tidy.checks import SOURCE_ROOTS

ROOT = Path(__file__).resolve().parents[2]


def lint(tree: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(str(tree / top) for top in SOURCE_ROOTS)
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-logo", "--no-cache"]
    environment = os.environ | {"PYTHONPATH": path, "COLUMNS": "200"}
    return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=50, check=False)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for top in SOURCE_ROOTS:
        shutil.copytree(ROOT / top, tmp_path / top, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "line", "contract"),
    [
        ("operator/polarkv_operator/__init__.py", "import polarkv_dataplane", "never import each other BROKEN"),
        ("dataplane/polarkv_dataplane/__init__.py", "import polarkv_operator", "never import each other BROKEN"),
        ("client/polarkv_client/__init__.py", "import polarkv_operator", "The client imports neither"),
        # Not the core's own import: that of a module which the core imports.
        ("client/polarkv_client/states.py", "import random", "by any path BROKEN"),
    ],
)
def test_a_contract_is_broken(tree: Path, name: str, line: str, contract: str) -> None:
    with (tree / name).open("a", encoding="utf-8") as module:
        module.write(f"\n{line}\n")
    run = lint(tree)
    assert run.returncode == 1, run.stdout + run.stderr
    assert contract in run.stdout
    assert "1 broken" in run.stdout
