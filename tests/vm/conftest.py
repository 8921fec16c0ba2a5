"""Tests here run in the virtual machine that ``python -m tests.vm.support test`` boots; elsewhere they are skipped."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent
IN_GUEST = Path("/run/polarkv-vm/state")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip these tests outside of the guest: they change arrays, links and routes, and need a kernel that has them."""
    if IN_GUEST.exists():
        return
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="runs in a virtual machine: `make test-vm`"))
