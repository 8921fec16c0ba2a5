"""The rules of the house, run on the house."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tidy import checks
from tests.tidy.layers import layers_hold

ROOT = Path(__file__).resolve().parents[2]

RULES: list[Callable[[Path], list[str]]] = [
    checks.roots_are_not_packages,
    checks.files_are_short,
    checks.functions_are_short,
    checks.core_is_small,
    checks.tests_do_not_sleep,
    checks.waits_have_time,
    checks.no_machine_is_named,
    checks.links_resolve,
    checks.targets_are_documented,
    layers_hold,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule(rule: Callable[[Path], list[str]]) -> None:
    broken = rule(ROOT)
    assert not broken, "\n" + "\n".join(broken)


def test_help_lists_every_target() -> None:
    command = ["make", "--no-print-directory", "help"]  # make names the directory when make runs these tests
    shown = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=30).stdout
    listed = {line.split()[0] for line in shown.splitlines() if line.strip()}
    targets = {
        name
        for match in checks.TARGET.finditer((ROOT / "Makefile").read_text(encoding="utf-8"))
        for name in match["names"].split()
        if not name.startswith(".")
    }
    assert listed == targets


def test_the_checks_see_the_house() -> None:
    """A walk that finds nothing would make every rule pass."""
    names = {name for _, name in checks.python_files(ROOT)}
    assert {"client/polarkv_client/__init__.py", "tests/tidy/checks.py"} <= names
