"""Rules of the house that hold for files that do not exist yet; each returns what breaks it, one sentence an item."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path

SOURCE_ROOTS = ("client", "dataplane", "operator")
PYTHON_ROOTS = (*SOURCE_ROOTS, "tests", "bench", "demo", "docs", "scripts")
FILE_LINES = 500
FUNCTION_LINES = 70
CORE = "dataplane/polarkv_dataplane/manager/core"
CORE_LINES = 600
WAITS = {"wait_until", "wait_until_async", "eventually"}  # their third argument, or timeout_s, is the limit
LEAST_WAIT_S = 10

# Written in pieces, because these rules also read this file.
MACHINE_PATH = re.compile(r"(?<![\w.~/-])/(?:" + "|".join(("wo" "rk", "ro" "ot", "ho" "me", "Us" "ers")) + r")/")
REGISTRY_HOST = re.compile(
    "|".join(
        re.escape(host)
        for host in (
            "py" "pi.org", "pythonhosted" ".org", "download.pytorch" ".org", "registry.npm" "js", "npm" "js.org",
            "proxy.go" "lang", "crates" ".io", "repo.mav" "en", "mav" "en.org", "deb.deb" "ian", "security.deb" "ian",
        )
    )
)  # fmt: skip


def files(root: Path) -> Iterator[Path]:
    """Yield the files of the tree: what git tracks or would track, or every file where there is no repository."""
    if (root / ".git").exists():
        command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(command, check=True, capture_output=True, timeout=30).stdout.decode().split("\0")
        yield from (path for name in sorted(set(names)) if name and (path := root / name).is_file())
    else:
        yield from sorted(path for path in root.rglob("*") if path.is_file())


def python_files(root: Path, tops: tuple[str, ...] = PYTHON_ROOTS) -> Iterator[tuple[Path, str]]:
    """Yield (path, path from ``root``) of the Python files under ``tops``."""
    for path in files(root):
        name = path.relative_to(root)
        if path.suffix == ".py" and name.parts[0] in tops:
            yield path, name.as_posix()


def line_count(path: Path) -> int:
    """Count the lines of a text file."""
    return len(path.read_text(encoding="utf-8").splitlines())


LAYOUT_TOKENS = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER
}  # fmt: skip


def code_line_count(path: Path) -> int:
    """Count the lines that hold code: neither blank, nor only a comment, nor a docstring."""
    text = path.read_text(encoding="utf-8")
    code = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in LAYOUT_TOKENS:
            code |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if ast.get_docstring(node) is not None:
            code -= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(code)


def parse(path: Path) -> ast.Module:
    """Parse a Python file."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def roots_are_not_packages(root: Path) -> list[str]:
    """No Python file directly in a source root: ``operator/__init__.py`` would shadow the standard library's module."""
    return [
        f"{path.relative_to(root)}: no Python file may lie directly in {top}/; move it into the package below"
        for top in SOURCE_ROOTS
        for path in sorted((root / top).glob("*.py"))
    ]


def files_are_short(root: Path) -> list[str]:
    """A file has at most ``FILE_LINES`` lines."""
    return [
        f"{name}: {lines} lines, the limit is {FILE_LINES}"
        for path, name in python_files(root)
        if (lines := line_count(path)) > FILE_LINES
    ]


def functions_are_short(root: Path) -> list[str]:
    """A function has at most ``FUNCTION_LINES`` lines, its signature and docstring included."""
    return [
        f"{name}:{node.lineno}: {node.name} has {lines} lines, the limit is {FUNCTION_LINES}"
        for path, name in python_files(root)
        for node in ast.walk(parse(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (lines := (node.end_lineno or node.lineno) - node.lineno + 1) > FUNCTION_LINES
    ]


def core_is_small(root: Path) -> list[str]:
    """The manager's core, all files together, can be read in one sitting (explanations are not counted)."""
    total = sum(code_line_count(path) for path, name in python_files(root) if name.startswith(f"{CORE}/"))
    return [f"{CORE}: {total} lines of code together, the limit is {CORE_LINES}"] if total > CORE_LINES else []


def tests_do_not_sleep(root: Path) -> list[str]:
    """A test waits for a condition with a deadline (``tests.support.waiting``), never for time to pass."""
    found = []
    for path, name in python_files(root, ("tests",)):
        tree = parse(path)
        polls = {
            id(call)
            for loop in ast.walk(tree)
            if isinstance(loop, ast.While | ast.For | ast.AsyncFor)
            for call in ast.walk(loop)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module == "time" and "sleep" in {a.name for a in node.names}:
                found.append(f"{name}:{node.lineno}: imports time.sleep; use tests.support.waiting")
            if not isinstance(node, ast.Call):
                continue
            call, arguments = ast.unparse(node.func), [ast.unparse(argument) for argument in node.args]
            if call == "time.sleep":
                found.append(f"{name}:{node.lineno}: sleeps; use tests.support.waiting")
            elif call == "asyncio.sleep" and arguments != ["0"] and id(node) not in polls:
                found.append(f"{name}:{node.lineno}: sleeps outside a polling loop; use tests.support.waiting")
    return found


def waits_have_time(root: Path) -> list[str]:
    """A test waits at least ``LEAST_WAIT_S`` for what must come, which costs nothing where it comes: machines are busy.

    What is to run out (``pytest.raises(TimeoutError)``) may do so sooner.
    """
    found = []
    for path, name in python_files(root, ("tests",)):
        tree = parse(path)
        to_run_out = {
            id(call)
            for block in ast.walk(tree)
            if isinstance(block, ast.With)
            and any("raises(TimeoutError" in ast.unparse(item.context_expr) for item in block.items)
            for call in ast.walk(block)
        }
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or id(node) in to_run_out:
                continue
            if ast.unparse(node.func).rpartition(".")[2] not in WAITS:
                continue
            limit = node.args[2] if len(node.args) > 2 else None
            limit = next((each.value for each in node.keywords if each.arg == "timeout_s"), limit)
            seconds = limit.value if isinstance(limit, ast.Constant) else None
            if isinstance(seconds, int | float) and seconds < LEAST_WAIT_S:
                found.append(f"{name}:{node.lineno}: waits {seconds} s at most, {LEAST_WAIT_S} are the least")
    return found


def no_machine_is_named(root: Path) -> list[str]:
    """No file names a path of the machine it was written on, or a package registry's host."""
    found = []
    for path in files(root):
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(lines, 1):
            for kind, pattern in (("a machine's path", MACHINE_PATH), ("a registry's host", REGISTRY_HOST)):
                if match := pattern.search(line):
                    found.append(f"{path.relative_to(root)}:{number}: names {kind}, {match.group()!r}")
    return found


LINK = re.compile(r"\[[^\]\n]*\]\(\s*<?([^)\s>]+)>?[^)\n]*\)|^\[[^\]\n]+\]:\s*(\S+)", re.MULTILINE)
CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)


def links_resolve(root: Path) -> list[str]:
    """Every markdown link to a file of the repository leads to one."""
    found = []
    for path in files(root):
        if path.suffix != ".md":
            continue
        text = CODE.sub("", path.read_text(encoding="utf-8"))
        for match in LINK.finditer(text):
            target = (match.group(1) or match.group(2)).partition("#")[0]
            if not target or re.match(r"[a-z][a-z0-9+.-]*:", target):
                continue
            base = root if target.startswith("/") else path.parent
            if not (base / target.lstrip("/")).exists():
                found.append(f"{path.relative_to(root)}: link to {target!r}, which is not there")
    return found


# Not a variable's value for one target: ``test: SUITES ?= tests``.
TARGET = re.compile(r"^(?P<names>[A-Za-z0-9_.%/ -]+?):(?!=)(?! *\w+ *[?:+]?=)(?P<rest>.*)$", re.MULTILINE)


def targets_are_documented(root: Path) -> list[str]:
    """Every make target has the one line that ``make help`` prints."""
    found = []
    for match in TARGET.finditer((root / "Makefile").read_text(encoding="utf-8")):
        for name in match["names"].split():
            if not name.startswith(".") and not re.search(r"## \S", match["rest"]):
                found.append(f"Makefile: target {name!r} has no '## one line' for make help")
    return found
