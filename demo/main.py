"""`make demo`: what a shared KV cache does for a prompt that was seen before, on this machine, in a few minutes.

Run it from a checkout, with the environment that `make demo` builds. Exit code 0 says that every check held.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    # The folder's own name is the package, from wherever the script is started.
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from demo.show import main

    sys.exit(main())
