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
_KEPT = 0.9  # of what was measured before, with each measurement


class Amount(NamedTuple):
    """Bytes by the tier in which they lie."""

    memory: int
    disk: int


class Pace(NamedTuple):
    """How long so many bytes take: sums over measurements, the newest of which weigh most, for a straight line.

    A line and not a rate, because long loads come from many cache nodes at once and short ones do not: judged by the
    rate of short loads, no long one would be worth it.
    """

    weight: float = 0.0
    size: float = 0.0
    seconds: float = 0.0
    size_size: float = 0.0
    size_seconds: float = 0.0

    @classmethod
    def of(cls, bytes_per_s: float) -> Pace:
        """Begin with a rate; 0: with nothing."""
        return cls().measured(bytes_per_s, 1.0) if bytes_per_s else cls()

    def measured(self, size_bytes: float, seconds: float) -> Pace:
        """With one measurement more."""
        new = (1.0, size_bytes, seconds, size_bytes * size_bytes, size_bytes * seconds)
        return Pace(*(_KEPT * before + more for before, more in zip(self, new, strict=True)))

    @property
    def bytes_per_s(self) -> float:
        """Of all that was measured; 0: nothing was."""
        return self.size / self.seconds if self.seconds else 0.0

    def seconds_for(self, size_bytes: float) -> float:
        """Neither the line's slope nor what every load costs is below zero; of nothing measured, nothing is known."""
        if not size_bytes or not self.weight:
            return 0.0
        mean, mean_s = self.size / self.weight, self.seconds / self.weight
        spread = self.size_size / self.weight - mean * mean
        if spread <= 1e-6 * mean * mean:  # all of one size
            return mean_s * size_bytes / mean
        slope = (self.size_seconds / self.weight - mean * mean_s) / spread
        slope = min(max(slope, 0.0), mean_s / mean)
        return mean_s + slope * (size_bytes - mean)


class LoadGate:
    """One client's gate, for all its threads: paces are replaced whole, and a lost update is one measurement less."""

    def __init__(self, rates: Rates) -> None:
        self._prefill_tokens_per_s = rates.prefill_tokens_per_s
        self._memory, self._disk = Pace.of(rates.memory_bytes_per_s), Pace.of(rates.disk_bytes_per_s)
        self._skipped = 0

    @property
    def rates(self) -> Rates:
        """What was measured, as rates."""
        return Rates(self._prefill_tokens_per_s, self._memory.bytes_per_s, self._disk.bytes_per_s)

    def load_s(self, amount: Amount) -> float:
        """How long a load would take; what was never measured takes no time."""
        return self._memory.seconds_for(amount.memory) + self._disk.seconds_for(amount.disk)

    def worth(self, tokens: int, amount: Amount) -> bool:
        """Whether these bytes come sooner than the tokens are computed."""
        return self.load_s(amount) * self._prefill_tokens_per_s <= tokens

    def admit(self, lengths: Sequence[int], chunk_tokens: int, tiers: Callable[[], Sequence[Tier]]) -> bool:
        """Whether to load chunks of these lengths, of ``chunk_tokens`` tokens each: it is worth it, or a probe is due.

        ``tiers`` (of the prefix that is there) is only called where it makes a difference: it is a round trip. A probe
        is only spent on a prefix that is there.
        """
        whole = self._worth_by_tier(chunk_tokens * len(lengths), sum(lengths))
        if all((*whole, *self._worth_by_tier(chunk_tokens, lengths[0]))):
            return True
        due = self._skipped + 1 >= PROBE_EVERY
        if any(whole) or due:  # more of a prefix is never less worth than a part of it
            found = tiers()
            # Of nothing, nothing would be measured: the probe stays due until there is something.
            if self.worth(chunk_tokens * len(found), amount_of(found, lengths)):
                return True
        self._skipped = 0 if due else self._skipped + 1
        return due

    def _worth_by_tier(self, tokens: int, size_bytes: int) -> tuple[bool, bool]:
        return self.worth(tokens, Amount(size_bytes, 0)), self.worth(tokens, Amount(0, size_bytes))

    def loaded(self, tiers: Sequence[Tier], lengths: Sequence[int], seconds: float) -> None:
        """A load took so long and brought these. Of a mixed one, memory's part is taken to be as fast as ever."""
        amount = amount_of(tiers, lengths)
        if seconds <= 0 or not sum(amount):
            return
        if not amount.disk:
            self._memory = self._memory.measured(amount.memory, seconds)
            return
        left_s = seconds - self._memory.seconds_for(amount.memory)
        # At least a quarter of the time: else a slow estimate for memory would make disks look infinitely fast.
        self._disk = self._disk.measured(amount.disk, max(left_s, seconds / 4))


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
