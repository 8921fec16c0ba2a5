"""Libraries that come along with an injected client, for what the host environment does not have.

An injected client lies in a folder of its own, the only one on PYTHONPATH::

    bundle.json             what is in it
    python/polarkv_client/  this package, alone
    libraries/common/       its dependencies, pure Python
    libraries/cp312/        its compiled dependencies, a folder for each version of Python

PYTHONPATH comes before an environment's own packages. The dependencies are therefore not on it: they are put behind
everything else when this package is imported, so that an engine's own pydantic or httpx is never hidden by ours.

Imported before anything else of the package and by any Python 3, also one that is too old: standard library only.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from importlib.util import find_spec

MANIFEST = "bundle.json"
LIBRARIES = "libraries"


def attach(package_file: str) -> None:
    """Make the bundled libraries importable, if ``package_file`` lies in a bundle; otherwise nothing happens.

    Raises:
        ImportError: this Python is too old, or there are no libraries for it; says which versions there are.
    """
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(package_file))))
    try:
        with open(os.path.join(root, MANIFEST), encoding="utf-8") as file:
            bundle = json.load(file)
    except (FileNotFoundError, NotADirectoryError):
        return
    here = "%d.%d" % sys.version_info[:2]  # noqa: UP031
    if sys.version_info[:2] < _numbers(bundle["requires_python"])[:2]:
        raise ImportError(
            f"polarkv_client needs Python {bundle['requires_python']} or newer and this is {here}: use an image of the "
            f"engine with a newer Python, or take the label polarkv.io/inject off the pod"
        )
    _tell_of_old_libraries(bundle["requires"])
    for folder in (f"cp{sys.version_info[0]}{sys.version_info[1]}", "common"):
        path = os.path.join(root, LIBRARIES, folder)
        if os.path.isdir(path) and path not in sys.path:
            sys.path.append(path)
    missing = [module for module in bundle["compiled"] if find_spec(module) is None]
    if missing:
        raise ImportError(
            f"polarkv_client has no {', '.join(missing)} for Python {here} on {os.uname().machine}: it brings them for "
            f"{', '.join(bundle['pythons'])} on {bundle['machine']}; install them in the engine's image"
        )


def _tell_of_old_libraries(requires: dict[str, str]) -> None:
    """The host's libraries are used as they are, also those that are older than what was tested: better than none."""
    # Takes longest of all that this module needs, and nobody else needs it at every start.
    from importlib import metadata

    for name, least in requires.items():
        try:
            found = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        if _numbers(found) < _numbers(least):
            logging.getLogger(__name__).warning(
                "this environment's %s is %s; polarkv_client is made for %s or newer", name, found, least
            )


def _numbers(version: str) -> tuple[int, ...]:
    """A version's leading numbers: enough to tell an older release."""
    numbers = []
    for part in version.split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)
