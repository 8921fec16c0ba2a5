"""Every error that PolarKV raises, as one tree.

    PolarKVError
    ├── ConfigurationError        a setting is wrong: names the field, the value and the fix
    ├── ProtocolError             the peer sent something that cannot be understood
    │   ├── VersionMismatch       no wire version that both ends speak
    │   └── GoldenMismatch        client and manager hash the golden prompt differently
    ├── Unauthorized              the token is wrong or missing
    ├── Refused                   the peer understood and said no (stale incarnation, bad grant, unknown ticket)
    ├── Unavailable               the peer cannot be reached, or went away in the middle
    │   └── BreakerOpen           not tried: it failed a moment ago
    ├── DeadlineExceeded          the peer did not answer in time
    │   ├── LeaseEnded            it did, but the lease or ticket had ended before the last byte moved
    │   └── Cancelled             the caller no longer waits
    └── Damaged                   bytes that do not match their header or checksum

Only ``client.py`` turns these into misses. Everything below it raises them.
"""

from __future__ import annotations


class PolarKVError(Exception):
    """Root of the tree."""


class ConfigurationError(PolarKVError):
    """A setting is wrong. The text names the field, the value and the fix."""

    def __init__(self, field: str, value: object, fix: str) -> None:
        super().__init__(f"{field}={value!r}: {fix}")
        self.field = field
        self.value = value
        self.fix = fix

    def __reduce__(self) -> tuple[type[ConfigurationError], tuple[str, object, str]]:
        """For the way back from a worker process: an exception is otherwise made anew from its text alone."""
        return type(self), (self.field, self.value, self.fix)


class ProtocolError(PolarKVError):
    """The peer sent something that cannot be understood; the connection is useless from here on."""


class VersionMismatch(ProtocolError):
    """No wire version is spoken by both ends."""


class GoldenMismatch(ProtocolError):
    """Client and manager derive different keys from the golden prompt: every lookup would miss."""


class Unauthorized(PolarKVError):
    """The token is wrong, missing, or not allowed to do this."""


class Refused(PolarKVError):
    """The peer understood the request and refused it."""


class Unavailable(PolarKVError):
    """The peer cannot be reached, or the connection broke before the answer came."""


class BreakerOpen(Unavailable):
    """The peer failed a moment ago; it is not asked again until the breaker lets a probe through."""


class DeadlineExceeded(PolarKVError):
    """The answer did not come before the deadline."""


class LeaseEnded(DeadlineExceeded):
    """The lease or ticket ended before the last byte had moved: what was moved means nothing."""

    peer_silent = False  # true when nothing came from the peer any more: then it is the peer's failure


class Cancelled(DeadlineExceeded):
    """The caller no longer waits for this."""


class Damaged(PolarKVError):
    """Bytes that do not match their header or checksum."""
