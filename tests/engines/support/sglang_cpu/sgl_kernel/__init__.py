"""Stands in for SGLang's kernels, whose packages are for GPUs: a dense model with torch's own attention calls none.

Every name is there and raises when it is called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

__version__ = "0.0.0"


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(f"the tests' sgl_kernel has no {name}")

    return missing
