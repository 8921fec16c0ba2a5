"""Which Python binding of libibverbs is used, and what is missing where there is none.

``ibverbs`` first: in the same kernel an operation costs it a third of what it costs pyverbs (docs/design/rdma.md).
"""

from __future__ import annotations

import importlib
import os
from typing import NamedTuple

from polarkv_client import errors
from polarkv_client.transport.verbs.seam import Binding

VARIABLE = "POLARKV_RDMA_BINDING"
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


def choose(wanted: str | None = None) -> Choice:
    """The first binding that can be imported, or the ``wanted`` one (else the one that POLARKV_RDMA_BINDING names).

    Raises:
        ConfigurationError: there is no binding of that name.
    """
    wanted = wanted or os.environ.get(VARIABLE) or ""
    if wanted and wanted not in _WAYS:
        raise errors.ConfigurationError(VARIABLE, wanted, f"use {' or '.join(_WAYS)}, or leave it unset")
    missing: dict[str, str] = {}
    for name, (module, kind) in _WAYS.items():
        if wanted and name != wanted:
            continue
        try:
            made: Binding = getattr(importlib.import_module(f"{_PACKAGE}.{module}"), kind)()
        except (ImportError, OSError) as error:  # it is not installed, or libibverbs is not, or not the one it wants
            missing[name] = str(error)
            continue
        return Choice(made, missing)
    return Choice(None, missing)


def need(wanted: str | None = None) -> Binding:
    """As :func:`choose`.

    Raises:
        Unavailable: there is none; the text says why, and the fix. ConfigurationError: as :func:`choose`.
    """
    choice = choose(wanted)
    if choice.binding is None:
        why = "; ".join(f"{name}: {text}" for name, text in choice.missing.items())
        raise errors.Unavailable(f"no binding of libibverbs ({why}): {FIX}")
    return choice.binding
