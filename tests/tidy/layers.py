"""Who may import what, as sentences. They read every module's own imports, so they bind modules that come later too.

The contracts in ``pyproject.toml`` also follow imports from module to module, for packages that exist.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.tidy.checks import SOURCE_ROOTS, parse, python_files


@dataclass(frozen=True)
class Only:
    """Of the project's modules, only those in ``allowed`` import ``names``."""

    names: tuple[str, ...]
    allowed: tuple[str, ...]

    def forbids(self, module: str, imported: str) -> bool:
        return within(imported, self.names) and not within(module, self.allowed)

    def __str__(self) -> str:
        return f"only {' and '.join(self.allowed)} may import {', '.join(self.names)}"


@dataclass(frozen=True)
class Never:
    """The modules in ``modules`` never import ``names``."""

    modules: tuple[str, ...]
    names: tuple[str, ...]

    def forbids(self, module: str, imported: str) -> bool:
        return within(module, self.modules) and within(imported, self.names)

    def __str__(self) -> str:
        return f"{', '.join(self.modules)} may not import {', '.join(self.names)}"


LAYERS = (
    Never(("polarkv_client",), ("polarkv_dataplane", "polarkv_operator")),
    Never(("polarkv_dataplane",), ("polarkv_operator",)),
    Never(("polarkv_operator",), ("polarkv_dataplane",)),
    # Events and `now` in, outcomes and effects out: what makes exhaustive search possible.
    Never(
        ("polarkv_dataplane.manager.core", "polarkv_dataplane.manager.records"),
        (
            "asyncio", "time", "datetime", "random", "secrets", "uuid", "os", "pathlib", "io", "socket", "ssl",
            "select", "subprocess", "threading", "multiprocessing", "concurrent", "queue", "logging", "fastapi",
            "starlette", "uvicorn", "uvloop", "httpx", "prometheus_client", "sqlite3", "asyncpg", "pymysql",
        ),
    ),
    Only(("kopf",), ("polarkv_operator.handlers",)),
    # Each binding of libibverbs in one file: the rest knows the seam.
    Only(("pyverbs",), ("polarkv_client.transport.verbs.pyverbs_binding",)),
    Only(("ibverbs",), ("polarkv_client.transport.verbs.ibverbs_binding",)),
    Only(("vllm", "sglang", "torch", "lmcache"), ("polarkv_client.connectors",)),
    # What changes the cluster is in one file; the election changes its Lease and nothing else.
    Only(
        ("polarkv_operator.clients.kube.Writer",),
        (
            "polarkv_operator.reconcile.execute", "polarkv_operator.reconcile.leader",
            "polarkv_operator.reconcile.operator", "polarkv_operator.webhooks",
        ),
    ),
    Never(
        (
            "polarkv_operator.resources", "polarkv_operator.api", "polarkv_operator.reconcile.plan",
            "polarkv_operator.reconcile.autoscale", "polarkv_operator.reconcile.events",
            "polarkv_operator.reconcile.status",
        ),
        ("kubernetes", "kubernetes_asyncio", "kopf", "httpx", "polarkv_operator.clients"),
    ),
)  # fmt: skip


def within(name: str, packages: tuple[str, ...]) -> bool:
    """Say whether ``name`` is one of ``packages`` or lies in one."""
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def module_name(path: str) -> str:
    """Turn ``client/polarkv_client/keys.py`` into ``polarkv_client.keys``."""
    parts = path.removesuffix(".py").split("/")[1:]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(tree: ast.Module, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """Yield (line, full name) of everything that a module imports, wherever in it the import stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                anchor = parts[: len(parts) - node.level + (1 if is_package else 0)]
                base = ".".join([*anchor, base] if base else anchor)
            # `from package import module` names a module as its second half.
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif (
            isinstance(node, ast.Call)
            and ast.unparse(node.func) in {"__import__", "import_module", "importlib.import_module"}
            and node.args
            and isinstance(node.args[0], ast.Constant)
        ):
            yield node.lineno, str(node.args[0].value)


def layers_hold(root: Path) -> list[str]:
    """Return every import under ``root`` that breaks a sentence of ``LAYERS``."""
    found = []
    for path, name in python_files(root, SOURCE_ROOTS):
        module = module_name(name)
        for line, imported in imports(parse(path), module, path.name == "__init__.py"):
            found += [f"{name}:{line}: imports {imported}: {rule}" for rule in LAYERS if rule.forbids(module, imported)]
    return found
