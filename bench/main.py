"""Entry point of `python bench/main.py`: the same as `python -m bench` from the top of the repository."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
