"""client_bundle.py TARGET --uv UV: build what injection copies into inference pods (run by client_bundle.sh).

The client package, and its dependencies for several versions of Python: pure ones once, compiled ones for each version.
How it is laid out and found again is in client/polarkv_client/bundled.py. Wheels only, pinned by constraints.txt, for
this machine's architecture.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from email.parser import HeaderParser
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
# The oldest C library that an engine's image has: Ubuntu 20.04's.
C_LIBRARY = "manylinux_2_31"
_LEAST = re.compile(r"([A-Za-z0-9_.-]+)>=([0-9.]+)")


def build(target: Path, uv: str, pythons: tuple[str, ...] = PYTHONS) -> None:
    """Write a bundle to ``target``, which must not be there yet.

    Raises:
        subprocess.CalledProcessError: a wheel cannot be had; uv has said which.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    requires = dict(_LEAST.match(each).groups() for each in project["dependencies"])  # type: ignore[union-attr]
    libraries = target / "libraries"
    libraries.mkdir(parents=True)
    compiled: set[str] = set()
    for python in pythons:
        with tempfile.TemporaryDirectory() as scratch:
            _install(Path(scratch), uv, python, project["dependencies"])
            compiled |= _sort_in(Path(scratch), libraries, f"cp{python.replace('.', '')}")
    shutil.copytree(
        ROOT / "client" / "polarkv_client",
        target / "python" / "polarkv_client",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    manifest = {
        "version": project["version"],
        "requires_python": project["requires-python"].removeprefix(">="),
        "requires": requires,
        "compiled": sorted(compiled),
        "pythons": list(pythons),
        "machine": platform.machine(),
    }
    (target / "bundle.json").write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def _install(folder: Path, uv: str, python: str, dependencies: list[str]) -> None:
    command = [
        uv, "pip", "install", "--quiet", "--target", str(folder), "--python-version", python, "--no-build",
        "--python-platform", f"{platform.machine()}-{C_LIBRARY}", "--constraint", str(ROOT / "constraints.txt"),
    ]  # fmt: skip
    subprocess.run([*command, *dependencies], check=True)


def _sort_in(folder: Path, libraries: Path, version: str) -> set[str]:
    """Move what is pure to ``common``, the rest to ``version``; return the top-level modules of the rest."""
    compiled = set()
    for information in sorted(folder.glob("*.dist-info")):
        wheel = HeaderParser().parsestr((information / "WHEEL").read_text(encoding="utf-8"))
        is_pure = all(tag.endswith("-none-any") for tag in wheel.get_all("Tag", []))
        place = libraries / ("common" if is_pure else version)
        place.mkdir(exist_ok=True)
        for name in _top_level(information):
            if not is_pure and not name.endswith(".dist-info"):
                compiled.add(name.partition(".")[0])
            # The same wheel as for the versions before.
            if not (place / name).exists():
                shutil.move(folder / name, place / name)
    return compiled


def _top_level(information: Path) -> set[str]:
    """What a distribution put into its folder, apart from programs and caches."""
    lines = (information / "RECORD").read_text(encoding="utf-8").splitlines()
    names = {line.partition(",")[0].partition("/")[0] for line in lines}
    return {name for name in names if name not in {"", "..", "bin", "__pycache__"}}


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", type=Path, help="a folder that is not there yet")
    parser.add_argument("--uv", default="uv", help="the program uv")
    parser.add_argument("--pythons", default=",".join(PYTHONS), help="versions (default: %(default)s)")
    given = parser.parse_args()
    try:
        build(given.target, given.uv, tuple(given.pythons.split(",")))
    except subprocess.CalledProcessError as error:
        sys.exit(error.returncode)


if __name__ == "__main__":
    main()
