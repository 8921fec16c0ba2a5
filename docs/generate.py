"""Write the docs that are generated from code, or check that they are fresh.

Each file in ``docs/generators`` names what it writes (``OUTPUT``, a path from the repository's root) and has
``render()``, which returns the whole text. With ``--check`` nothing is written, and a stale or missing file makes the
exit code 1.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def rendered(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield (path from the repository's root, whole text) of every generator in ``folder``, by name."""
    for path in sorted(folder.glob("*.py")):
        names = runpy.run_path(str(path))
        yield names["OUTPUT"], names["render"]()


def main(argv: list[str] | None = None, root: Path = ROOT) -> int:
    """Write or check every generated file under ``root``; return the exit code."""
    parser = argparse.ArgumentParser(description="Write the docs that are generated from code.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail when a file is stale")
    check = parser.parse_args(argv).check
    stale = []
    for name, text in rendered(root / "docs" / "generators"):
        output = root / name
        if output.exists() and output.read_text(encoding="utf-8") == text:
            continue
        stale.append(name)
        if not check:
            output.parent.mkdir(parents=True, exist_ok=True)
            output.write_text(text, encoding="utf-8")
            print(f"wrote {name}")
    if check and stale:
        print(f"stale: {', '.join(stale)}; run 'make docs' and commit the result", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
