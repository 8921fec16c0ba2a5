"""Which Events are worth writing: the same one not again and again, and never a flood. Pure; time is a parameter."""

from __future__ import annotations

import hashlib
from collections import OrderedDict

from polarkv_operator.reconcile.plan.world import Notice

AGAIN_S = 600.0
BURST, REFILL_S = 30, 10.0
MOST_REMEMBERED = 20_000


class EventFilter:
    """Remembers what was said of each cluster."""

    def __init__(self) -> None:
        self._said: OrderedDict[tuple[str, str], tuple[float, int]] = OrderedDict()  # when, how often
        self._tokens: OrderedDict[str, tuple[float, float]] = OrderedDict()  # by uid: how many, when

    def admit(self, uid: str, notice: Notice, now_s: float) -> int:
        """How often this has been said, this time included; 0: not now.

        The same notice is said again after ten minutes at the earliest; a cluster has 30 at once and one more every ten
        seconds.
        """
        key = (uid, fingerprint(notice))
        last_s, times = self._said.get(key, (float("-inf"), 0))
        if now_s - last_s < AGAIN_S or not self._spend(uid, now_s):
            return 0
        self._said[key] = (now_s, times + 1)
        self._said.move_to_end(key)
        while len(self._said) > MOST_REMEMBERED:
            self._said.popitem(last=False)
        return times + 1

    def forget(self, uid: str, notice: Notice) -> None:
        """It was not written after all."""
        self._said.pop((uid, fingerprint(notice)), None)

    def _spend(self, uid: str, now_s: float) -> bool:
        tokens, since_s = self._tokens.get(uid, (float(BURST), now_s))
        tokens = min(BURST, tokens + (now_s - since_s) / REFILL_S)
        spent = tokens >= 1
        self._tokens[uid] = (tokens - 1 if spent else tokens, now_s)
        self._tokens.move_to_end(uid)
        while len(self._tokens) > MOST_REMEMBERED:
            self._tokens.popitem(last=False)
        return spent


def fingerprint(notice: Notice) -> str:
    """A short name of what is said."""
    return hashlib.sha256(f"{notice.reason}\n{notice.message}".encode()).hexdigest()[:16]
