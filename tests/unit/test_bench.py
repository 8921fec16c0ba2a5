"""The benchmark: a disturbed sample does not count, a missing measurement never passes, every byte is checked."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from bench.buffers import anonymous_region
from bench.measure import LookupBench, make_batches, run_round
from bench.quiet import usable
from bench.results import Results
from bench.subject import KIB, MIB, SIZES_BYTES, WORKING_SET_BYTES, Batch, Subject, SubjectError
from bench.targets import TARGETS, judge


class Dictionary(Subject):
    """A store in this process; can be told to flip a byte or to forget a key."""

    def __init__(self, *, flip: bool = False, lose: bool = False) -> None:
        super().__init__()
        self.values: dict[str, bytearray] = {}
        self._flip, self._lose = flip, lose

    def start(self, region_bytes: int) -> None:
        self.allocate(region_bytes)
        self.source.fill_random(region_bytes)

    def put(self, batch: Batch) -> None:
        for key, offset in zip(batch.keys, batch.offsets, strict=True):
            self.values[key] = bytearray(self.source.view(offset, batch.value_bytes))
        if self._flip:
            self.values[batch.keys[-1]][-1] ^= 1
        if self._lose:
            del self.values[batch.keys[0]]

    def get(self, batch: Batch) -> None:
        for key, offset in zip(batch.keys, batch.offsets, strict=True):
            self.target.view(offset, batch.value_bytes)[:] = self.values[key]

    def forget(self, keys: Sequence[str]) -> None:
        for key in keys:
            self.values.pop(key, None)

    def lookup(self, keys: Sequence[str]) -> int:
        return sum(key in self.values for key in keys)

    def close(self) -> None:
        self.values.clear()


def test_a_round_verifies_and_forgets() -> None:
    subject = Dictionary()
    subject.start(8 * MIB)
    result = run_round(subject, "round-0", 256 * KIB, 8 * MIB)
    assert result.put_gbps > 0 and result.get_gbps > 0
    assert subject.values == {}


def test_one_wrong_bit_fails_the_round() -> None:
    subject = Dictionary(flip=True)
    subject.start(4 * MIB)
    with pytest.raises(SubjectError, match="verification failed"):
        run_round(subject, "round-0", MIB, 4 * MIB)


def test_a_lookup_that_misses_is_no_measurement() -> None:
    subject = Dictionary(lose=True)
    subject.start(4 * MIB)
    with pytest.raises(SubjectError, match="did not find them all"):
        LookupBench(subject).run(512, seconds=0.01)


@pytest.mark.parametrize("size", SIZES_BYTES)
def test_batches_cover_the_working_set_once(size: int) -> None:
    batches = make_batches("t", size, WORKING_SET_BYTES)
    assert sum(batch.total_bytes for batch in batches) == WORKING_SET_BYTES
    assert len({key for batch in batches for key in batch.keys}) == WORKING_SET_BYTES // size
    assert {len(batch.keys) for batch in batches} == {16 if size == 16 * MIB else 32}


def test_quiet_samples_count_and_the_quietest_three_otherwise() -> None:
    assert usable([0.0, 0.9, 0.05, 0.1]) == [0, 2, 3]
    assert usable([0.5, 0.9, 0.05, 0.7]) == [0, 2, 3]


def test_disturbed_samples_do_not_move_the_median() -> None:
    results = Results()
    for value, busy in ((10.0, 0.0), (1.0, 0.8), (11.0, 0.02), (12.0, 0.01)):
        results.series(MIB, "row").add({"get": value}, busy)
    found = results.rate(MIB, "row", "get")
    assert found is not None and (found.median, found.low, found.used) == (11.0, 10.0, 3)


def test_what_was_not_measured_never_passes() -> None:
    verdicts = judge(Results())
    assert len(verdicts) == sum(len(target.points) for target in TARGETS)
    assert {one.word for one in verdicts} == {"NOT MEASURED"}


@pytest.mark.parametrize(("ours", "word"), [(4.0, "PASS"), (3.9, "MISS")])
def test_the_tcp_target_uses_the_best_congestion_control(ours: float, word: str) -> None:
    results = Results()
    results.series(MIB, "TCP stream").add({"bbr": 3.0, "cubic": 5.0}, 0.0)
    results.series(MIB, "polarkv-tcp").add({"get": ours}, 0.0)
    verdict = next(one for one in judge(results) if one.text.startswith("tcp get / single") and one.point == "1 MiB")
    assert verdict.word == word


def test_a_region_compares_every_byte() -> None:
    first, second = anonymous_region(MIB), anonymous_region(MIB)
    assert first.equals(second, MIB)
    second.view()[MIB - 1] ^= 1
    assert not first.equals(second, MIB)
