"""Load or recompute: skip a load that would take longer than computing, by rates that are measured all the time.

A rate that was bad once would never be measured again if every load were skipped: one skipped load in
:data:`PROBE_EVERY` is made all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from polarkv_client.calibration import Rates, read_calibration
from polarkv_client.config import ClientConfig
from polarkv_client.states import Tier

PROBE_EVERY = 16
_WEIGHT = 0.2  # of the newest measurement


class Amount(NamedTuple):
    """Bytes by the tier in which they lie."""

    memory: int
    disk: int


class LoadGate:
    """One client's gate, for all its threads: rates are replaced whole, and a lost update is one measurement less."""

    def __init__(self, rates: Rates) -> None:
        self.rates = rates
        self._skipped = 0

    def load_s(self, amount: Amount) -> float:
        """How long a load would take; what was never measured takes no time."""
        memory, disk = self.rates.memory_bytes_per_s, self.rates.disk_bytes_per_s
        return (amount.memory / memory if memory else 0.0) + (amount.disk / disk if disk else 0.0)

    def worth(self, tokens: int, amount: Amount) -> bool:
        """Whether these bytes come sooner than the tokens are computed."""
        return self.load_s(amount) * self.rates.prefill_tokens_per_s <= tokens

    def admit(self, lengths: Sequence[int], chunk_tokens: int, tiers: Callable[[], Sequence[Tier]]) -> bool:
        """Whether to load chunks of these lengths, of ``chunk_tokens`` tokens each: it is worth it, or a probe is due.

        ``tiers`` (of the prefix that is there) is only called where it makes a difference: it is a round trip.
        """
        tokens, size_bytes = chunk_tokens * len(lengths), sum(lengths)
        from_memory, from_disk = Amount(size_bytes, 0), Amount(0, size_bytes)
        if self.worth(tokens, from_memory) and self.worth(tokens, from_disk):
            return True
        if self.worth(tokens, from_memory) or self.worth(tokens, from_disk):
            found = tiers()
            if self.worth(chunk_tokens * len(found), amount_of(found, lengths)):
                return True
        self._skipped += 1
        return self._skipped % PROBE_EVERY == 0

    def loaded(self, tiers: Sequence[Tier], lengths: Sequence[int], seconds: float) -> None:
        """A load took so long and brought these. Of a mixed one, memory's part is taken to be as fast as ever."""
        amount = amount_of(tiers, lengths)
        if seconds <= 0 or not sum(amount):
            return
        rates = self.rates
        if not amount.disk:
            measured = _blend(rates.memory_bytes_per_s, amount.memory / seconds)
            self.rates = rates._replace(memory_bytes_per_s=measured)
            return
        left_s = seconds - self.load_s(Amount(amount.memory, 0))
        # At least a quarter of the time: else a slow estimate for memory would make disks look infinitely fast.
        measured = _blend(rates.disk_bytes_per_s, amount.disk / max(left_s, seconds / 4))
        self.rates = rates._replace(disk_bytes_per_s=measured)


def amount_of(tiers: Sequence[Tier], lengths: Sequence[int]) -> Amount:
    """Bytes by tier; what is in none does not count."""
    memory = sum(length for tier, length in zip(tiers, lengths, strict=False) if tier is Tier.MEMORY)
    disk = sum(length for tier, length in zip(tiers, lengths, strict=False) if tier is Tier.DISK)
    return Amount(memory, disk)


def load_gate(config: ClientConfig) -> LoadGate | None:
    """The gate that the settings ask for; None: nothing is known of prefill, or it is off.

    Raises:
        ConfigurationError: the calibration file is none.
    """
    if config.calibration is None or not config.recompute_gate:
        return None
    rates = read_calibration(config.calibration).rates()
    return LoadGate(rates) if rates.prefill_tokens_per_s else None


def _blend(before: float, measured: float) -> float:
    return measured if not before else before + _WEIGHT * (measured - before)
