"""Each rule finds a breach that is planted in a small tree, and passes the same tree without it."""

from pathlib import Path

import pytest

from tests.tidy import checks
from tests.tidy.layers import layers_hold
from tests.tidy.test_tidy import RULES

CORE = "dataplane/polarkv_dataplane/manager/core"
CLIENT, OPERATOR = "client/polarkv_client", "operator/polarkv_operator"

CLEAN = {
    "client/polarkv_client/keys.py": "import xxhash\n",
    "client/polarkv_client/connectors/vllm.py": "import torch\n",
    "client/polarkv_client/transport/verbs/pyverbs_binding.py": "from pyverbs import device\n",
    f"{CORE}/slots.py": '"""Slots."""\n\n# Why.\nfrom .timeline import y\n',
    "operator/polarkv_operator/handlers.py": "import kopf\n",
    "tests/unit/test_a.py": "import asyncio\n\n\nasync def test() -> None:\n    await asyncio.sleep(0)\n",
    "Makefile": "X := 1\n.PHONY: help\nhelp: ## List\n\t@echo a:b\n",
    "README.md": "[x](docs/a.md#part) [y](https://example.org) `[z](gone.md)`\n",
    "docs/a.md": "[back](../README.md)\n",
}


def long_function(lines: int) -> str:
    return "def f() -> None:\n" + "    x = 1\n" * (lines - 1)


BREACHES: list[tuple[str, str, str, str]] = [
    # (rule, file, its text, a part of what the rule says)
    ("roots_are_not_packages", "operator/__init__.py", "", "operator/__init__.py"),
    ("roots_are_not_packages", "client/helper.py", "", "client/helper.py"),
    ("files_are_short", "bench/a.py", "x = 1\n" * (checks.FILE_LINES + 1), "501 lines"),
    ("functions_are_short", "demo/a.py", long_function(checks.FUNCTION_LINES + 1), "f has 71 lines"),
    ("core_is_small", f"{CORE}/big.py", "x = 1\n" * checks.CORE_LINES, "601 lines of code"),
    ("tests_do_not_sleep", "tests/unit/test_b.py", "import time\ntime.sleep(1)\n", "test_b.py:2"),
    ("tests_do_not_sleep", "tests/unit/test_b.py", "from time import sleep\n", "test_b.py:1"),
    ("tests_do_not_sleep", "tests/unit/test_b.py", "import asyncio\nasyncio.sleep(0.1)\n", "outside a polling loop"),
    ("waits_have_time", "tests/unit/test_b.py", "wait_until(f, 'it', 5)\n", "test_b.py:1: waits 5 s at most"),
    ("waits_have_time", "tests/unit/test_b.py", "a.eventually(f, 'it', timeout_s=0.5)\n", "waits 0.5 s at most"),
    ("no_machine_is_named", "docs/b.md", "see `/wo" "rk/main`", "a machine's path"),
    ("no_machine_is_named", "docs/b.md", "from https://py" "pi.org/simple", "a registry's host"),
    ("links_resolve", "docs/b.md", "[gone](nowhere.md)", "nowhere.md"),
    ("links_resolve", "docs/b.md", "[gone]: nowhere.md", "nowhere.md"),
    ("targets_are_documented", "Makefile", "lint: venv\n\tx\n", "'lint'"),
    ("layers_hold", f"{CLIENT}/a.py", "from polarkv_dataplane import slab", "polarkv_dataplane.slab"),
    ("layers_hold", "dataplane/polarkv_dataplane/a.py", "import polarkv_operator.api", "polarkv_operator.api"),
    ("layers_hold", f"{OPERATOR}/a.py", "import polarkv_dataplane", "polarkv_dataplane"),
    ("layers_hold", f"{OPERATOR}/a.py", "def f() -> None:\n    import kopf\n", "polarkv_operator.handlers"),
    ("layers_hold", f"{CLIENT}/client.py", "import torch", "only polarkv_client.connectors"),
    ("layers_hold", f"{CLIENT}/a.py", "import_module('pyverbs.qp')", "pyverbs.qp"),
    ("layers_hold", f"{CORE}/clock.py", "from time import monotonic", "time.monotonic"),
    ("layers_hold", f"{CORE}/__init__.py", "if __debug__:\n    import logging\n", "logging"),
    ("layers_hold", f"{OPERATOR}/reconcile/plan.py", "from ..clients import kube", "polarkv_operator.clients"),
    ("layers_hold", f"{OPERATOR}/resources/pod.py", "from kubernetes import client", "kubernetes.client"),
]  # fmt: skip


def plant(root: Path, tree: dict[str, str]) -> None:
    for name, text in tree.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_clean_tree_passes(tmp_path: Path, rule: object) -> None:
    plant(tmp_path, CLEAN)
    assert callable(rule) and rule(tmp_path) == []


@pytest.mark.parametrize(("rule", "name", "text", "message"), BREACHES)
def test_a_breach_is_found(tmp_path: Path, rule: str, name: str, text: str, message: str) -> None:
    plant(tmp_path, CLEAN | {name: text})
    by_name = {function.__name__: function for function in RULES}
    found = by_name[rule](tmp_path)
    assert len(found) == 1 and message in found[0]


def test_every_rule_has_a_breach() -> None:
    assert {breach[0] for breach in BREACHES} == {rule.__name__ for rule in RULES}


def test_a_relative_import_is_resolved_from_a_package(tmp_path: Path) -> None:
    plant(tmp_path, {f"{OPERATOR}/api/__init__.py": "from ..clients import kube\n"})
    assert len(layers_hold(tmp_path)) == 1
