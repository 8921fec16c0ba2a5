"""Which Python binding of libibverbs is used, and what is missing where there is none.

``ibverbs`` first: in the same kernel an operation costs it a third of what it costs pyverbs (docs/design/rdma.md).
"""

from __future__ import annotations

import importlib
from typing import NamedTuple

from polarkv_client import errors
from polarkv_client.transport.verbs.seam import Binding

AUTO = "auto"
_PACKAGE = "polarkv_client.transport.verbs"
_WAYS = {"ibverbs": ("ibverbs_binding", "IbverbsBinding"), "pyverbs": ("pyverbs_binding", "PyverbsBinding")}
FIX = (
    "pip install 'polarkv-cluster[rdma]' and the system's libibverbs with its providers (Debian: apt-get install "
    "ibverbs-providers), or the system's own binding (python3-pyverbs)"
)


class Choice(NamedTuple):
    """The binding, or None and for each of them why not."""

    binding: Binding | None
    missing: dict[str, str]


def choose(wanted: str = AUTO) -> Choice:
    """The first binding that can be imported, or the ``wanted`` one alone ("ibverbs" or "pyverbs")."""
    missing: dict[str, str] = {}
    for name, (module, kind) in _WAYS.items():
        if wanted not in (AUTO, name):
            continue
        try:
            made: Binding = getattr(importlib.import_module(f"{_PACKAGE}.{module}"), kind)()
        except (ImportError, OSError) as error:  # it is not installed, or libibverbs is not, or not the one it wants
            missing[name] = str(error)
            continue
        return Choice(made, missing)
    return Choice(None, missing)


def need(wanted: str = AUTO) -> Binding:
    """As :func:`choose`.

    Raises:
        Unavailable: there is none; the text says why, and the fix.
    """
    choice = choose(wanted)
    if choice.binding is None:
        why = "; ".join(f"{name}: {text}" for name, text in choice.missing.items())
        raise errors.Unavailable(f"no binding of libibverbs ({why}): {FIX}")
    return choice.binding
