"""What stands between a connector and its engine: whatever fails here costs a miss, never a request.

``attach`` makes the client; ``harmless`` wraps what an engine calls. A connector's own defects are turned into misses
in ``harmless`` alone, as the cache's are in ``client.py``.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar, cast

from polarkv_client.client import Operations
from polarkv_client.connectors.settings import ConnectorConfig
from polarkv_client.errors import ConfigurationError, GoldenMismatch, Unauthorized, VersionMismatch

log = logging.getLogger(__name__)
Method = TypeVar("Method", bound=Callable[..., Any])
_ATTACH_MS = 2000
_SAY_AGAIN_S = 60.0


def attach(config: ConnectorConfig) -> Operations:
    """The client of one process. A cache that cannot be reached is no error: it is tried again all the time.

    A version that is not spoken (or keys that differ) is said loudly, once: a rolled-back manager serves again, and an
    engine must start while a cluster is being upgraded.

    Raises:
        ConfigurationError: the manager is there and refuses the token.
    """
    operations = Operations(config)
    try:
        operations.connect(operations.scope(_ATTACH_MS))
    except Unauthorized as error:
        operations.close()
        raise ConfigurationError(
            "token", "…", f"set POLARKV_TOKEN to a token that {config.endpoint} knows ({error})"
        ) from None
    except (VersionMismatch, GoldenMismatch) as error:
        log.error("no KV is loaded or stored until client and manager are of fitting versions: %s", error)
    return operations


class Complaints:
    """Says each kind of trouble once a minute at most, and counts all of it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._said: dict[str, float] = {}
        self.count = 0

    def note(self, what: str, error: BaseException) -> None:
        """Count it; log it with its trace unless that was done a moment ago."""
        with self._lock:
            self.count += 1
        if self.due(what):
            log.error("%s: a defect became misses", what, exc_info=error)

    def due(self, what: str) -> bool:
        """Whether something of this kind is to be said: it has not been for a minute."""
        now = self._clock()
        with self._lock:
            if now - self._said.get(what, -_SAY_AGAIN_S) < _SAY_AGAIN_S:
                return False
            self._said[what] = now
            return True


complaints = Complaints()


def harmless(instead: Callable[[], object]) -> Callable[[Method], Method]:
    """Decorate a method that an engine calls: should it raise, ``instead()`` is answered."""

    def decorate(method: Method) -> Method:
        @functools.wraps(method)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            try:
                return method(*args, **kwargs)
            except Exception as error:
                complaints.note(method.__qualname__, error)
                return instead()

        return cast(Method, guarded)

    return decorate
