"""Tests here run in the virtual machine that ``python -m tests.vm.support test`` boots; elsewhere they are skipped."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.guest import EMULATED, IN_GUEST

HERE = Path(__file__).parent
BOOTS = HERE / "boots"


def give_more_time(items: list[pytest.Item]) -> None:
    """Lengthen the limits of tests whose every instruction is emulated."""
    for item in items:
        marker = item.get_closest_marker("timeout")
        limit_s = float(marker.args[0] if marker else item.config.getini("timeout"))
        item.add_marker(pytest.mark.timeout(limit_s * EMULATED), append=False)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip these tests outside of the guest: they change arrays, links and routes, and need a kernel that has them."""
    if os.environ.get("POLARKV_VM_MACHINE") == "qemu":
        give_more_time([item for item in items if HERE in item.path.parents])
    if IN_GUEST:
        return
    for item in items:
        if HERE in item.path.parents and BOOTS not in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="runs in a virtual machine: `make test-vm`"))
