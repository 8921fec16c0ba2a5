"""``python -m polarkv_client.install TARGET``: copy the client's bundle to where an engine finds it.

It runs in this project's image, as an init container, so the engine's image needs no shell and no Python of a certain
version. Doing it again is harmless: a container may be started twice.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from polarkv_client.bundled import MANIFEST

# Where the image keeps what scripts/client_bundle.sh has built.
BUNDLE = Path("/opt/polarkv/client")


def install(target: Path, bundle: Path = BUNDLE) -> None:
    """Copy ``bundle`` into the folder ``target``; the manifest comes last, so that half a copy is not one.

    Raises:
        OSError: it cannot be read or written, names the path.
    """
    if not (bundle / MANIFEST).is_file():
        raise FileNotFoundError(f"{bundle / MANIFEST}: no bundle is there; scripts/client_bundle.sh builds one")
    # The target itself is left as it is: it may be a volume that belongs to another user.
    for part in sorted(bundle.iterdir()):
        if part.is_dir():
            shutil.copytree(part, target / part.name, dirs_exist_ok=True)
    shutil.copy2(bundle / MANIFEST, target / MANIFEST)


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m polarkv_client.install", description=__doc__)
    parser.add_argument("target", type=Path, help="an existing folder, such as a mounted emptyDir")
    parser.add_argument("--bundle", type=Path, default=BUNDLE, help="what to copy (default: %(default)s)")
    given = parser.parse_args(arguments)
    try:
        install(given.target, given.bundle)
    except (OSError, shutil.Error) as error:
        print(f"error: the client library cannot be copied to {given.target}: {error}", file=sys.stderr)
        return 1
    print(f"the client library is in {given.target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
