"""Which wire version to speak."""

from __future__ import annotations

from polarkv_client import errors
from polarkv_client.protocol.wire import WIRE_VERSION, WIRE_VERSION_MIN


def common_version(wire_min: int, wire_max: int) -> int:
    """The newest wire version that both ends speak.

    Raises:
        VersionMismatch: there is none.
    """
    wire = min(wire_max, WIRE_VERSION)
    if wire < max(wire_min, WIRE_VERSION_MIN):
        raise errors.VersionMismatch(
            f"the peer speaks wire versions {wire_min} to {wire_max}, this manager {WIRE_VERSION_MIN} to "
            f"{WIRE_VERSION}: upgrade the older one"
        )
    return wire
