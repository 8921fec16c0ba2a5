"""How long a request may wait for the cache: for a part of the time that computing what it would load takes.

A cache that has gone silent says nothing of it. Deadlines that fit long prompts would then make a short request many
times as late as an engine without a cache. So the wait is measured by the request: by the pace at which this engine
has computed prompts until now, or, before it has computed any, the calibration's.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

from polarkv_client.client import Operations
from polarkv_client.connectors.settings import ConnectorConfig

_KEPT = 16  # measurements, of which a fast one counts: first steps, pauses and busy neighbours only make them slower
_LEAST_S = 0.05  # a cache that is near answers within it, also on a host whose cores are all busy
_UNKNOWN_S = 1.0  # what is missing then is computed, and measured by that
_MISSES = 256


class Patience:
    """One engine's. Safe for several threads: what is measured is replaced whole.

    Args:
        share: of the time that computing takes; 0: wait as long as the deadlines say.
        tokens_per_s: the pace to begin with; 0: unknown.
    """

    def __init__(self, share: float, tokens_per_s: float = 0.0) -> None:
        self._share = share
        self._kept: tuple[float, ...] = ()
        self._token_s = 1 / tokens_per_s if tokens_per_s else 0.0

    @classmethod
    def of(cls, config: ConnectorConfig, operations: Operations) -> Patience:
        """As the settings say, with the calibrated pace where there is one."""
        gate = operations.gate
        return cls(config.patience, gate.rates.prefill_tokens_per_s if gate is not None else 0.0)

    def computed(self, tokens: int, seconds: float) -> None:
        """The engine computed so many tokens of prompts in so long."""
        if tokens > 0 and seconds > 0:
            self._kept = (*self._kept[1 - _KEPT :], seconds / tokens)
            self._token_s = sorted(self._kept)[len(self._kept) // 4]

    def wait_ms(self, tokens: int, most_ms: int) -> int:
        """How long to wait for KV of so many tokens, ``most_ms`` at most."""
        if not self._share:
            return most_ms
        bound_s = max(self._share * self._token_s * tokens, _LEAST_S) if self._token_s else _UNKNOWN_S
        return min(most_ms, round(bound_s * 1000))


class Misses:
    """The pace of an engine that tells nothing but lookups and stores: from a miss to the store of what was missing.

    That is no less than computing takes, and no more than the request waited without the cache.
    """

    def __init__(self, patience: Patience, clock: Callable[[], float] = time.monotonic) -> None:
        self._patience = patience
        self._clock = clock
        self._lock = threading.Lock()
        self._since: OrderedDict[bytes, tuple[float, int]] = OrderedDict()

    def looked_up(self, keys: Sequence[bytes], found: int, chunk_tokens: int) -> None:
        """Of ``keys``, each of so many tokens, the first ``found`` are there; the others will be computed."""
        if found >= len(keys):
            return
        with self._lock:
            self._since[keys[found]] = self._clock(), (len(keys) - found) * chunk_tokens
            self._since.move_to_end(keys[found])
            if len(self._since) > _MISSES:
                self._since.popitem(last=False)

    def stored(self, keys: Sequence[bytes]) -> None:
        """These have been computed."""
        with self._lock:
            missed = [self._since.pop(key) for key in keys if key in self._since]
        now = self._clock()
        for since, tokens in missed:
            self._patience.computed(tokens, now - since)
