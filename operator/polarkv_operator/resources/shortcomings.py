"""What a spec may ask for and this release's images cannot do yet: said in a condition, not passed over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from polarkv_operator.api.cluster import PolarKVCluster
from polarkv_operator.resources import raid


@dataclass(frozen=True)
class Shortcoming:
    """A field that asks for more than there is. ``blocks``: cache nodes cannot start because of it."""

    field: str
    message: str
    blocks: bool


# (whether the spec asks for it, what is missing); an entry goes when its part is built.
_MISSING: tuple[tuple[Callable[[PolarKVCluster], bool], Shortcoming], ...] = (
    (
        raid.is_needed,
        Shortcoming(
            "spec.cacheNodes.storage.layout",
            "RAID0 needs polarkv_dataplane.raid, which the images of this release do not have: the container "
            f"{raid.NAME!r} cannot start; use JBOD",
            blocks=True,
        ),
    ),
)


def of(cluster: PolarKVCluster) -> list[Shortcoming]:
    """What this cluster asks for in vain."""
    return [shortcoming for asked, shortcoming in _MISSING if asked(cluster)]
