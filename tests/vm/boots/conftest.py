"""Tests here boot guests themselves, on this machine: ``python -m tests.vm.support test`` runs them last."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip these tests where nobody asked for virtual machines: on first use their kernel is compiled."""
    if os.environ.get("POLARKV_VM_BOOTS"):
        return
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="boots virtual machines: `make test-vm`"))
