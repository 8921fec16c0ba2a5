"""Load or recompute, by measured rates."""

from __future__ import annotations

from pathlib import Path

import pytest

from polarkv_client.calibration import Calibration, Rates, read_calibration
from polarkv_client.config import ClientConfig
from polarkv_client.errors import ConfigurationError
from polarkv_client.gate import PROBE_EVERY, Amount, LoadGate, Pace, load_gate
from polarkv_client.states import Tier

LENGTHS = [1000] * 4  # of 10 tokens each


def never() -> list[Tier]:
    raise AssertionError("asked for tiers where they make no difference")


def admits(gate: LoadGate, tiers: list[Tier] | None = None) -> bool:
    return gate.admit(LENGTHS, 10, never if tiers is None else lambda: tiers)


def test_fast_loads_are_made_and_slow_ones_are_not() -> None:
    assert admits(LoadGate(Rates(100, 10_001, 10_001)))  # 40 tokens take 0.4 s, as do 4000 bytes at 10 kB/s
    assert not admits(LoadGate(Rates(100, 9_999, 9_999)))


def test_nothing_measured_yet_is_tried() -> None:
    assert admits(LoadGate(Rates(100)))


@pytest.mark.parametrize(
    ("tiers", "admitted"),
    [
        ([Tier.MEMORY] * 4, True),
        ([Tier.DISK] * 4, False),
        ([Tier.MEMORY] * 3 + [Tier.DISK], True),
        ([Tier.DISK] * 3 + [Tier.MEMORY], False),
        ([], True),  # nothing there: the load ends at once
    ],
)
def test_where_chunks_lie_decides_between(tiers: list[Tier], admitted: bool) -> None:
    assert admits(LoadGate(Rates(100, 20_000, 5_500)), tiers) is admitted


def test_some_skipped_loads_are_made_to_measure_again() -> None:
    gate = LoadGate(Rates(100, 1, 1))
    made = [admits(gate, [Tier.DISK]) for _ in range(3 * PROBE_EVERY)]
    assert made.count(True) == 3
    for _ in range(120):  # it became fast
        gate.loaded([Tier.MEMORY] * 4, LENGTHS, 0.01)
        gate.loaded([Tier.DISK] * 4, LENGTHS, 0.01)
    assert admits(gate)


def test_probes_are_not_spent_on_what_is_not_there() -> None:
    """Else a stale rate would stay for ever with clients that seldom find something: probes measured nothing."""
    gate = LoadGate(Rates(100, 1, 1))
    assert [admits(gate) for _ in range(PROBE_EVERY - 1)] == [False] * (PROBE_EVERY - 1)
    assert [admits(gate, []) for _ in range(5)] == [True] * 5  # nothing there: they end at once
    assert admits(gate, [Tier.DISK])
    assert not admits(gate)


@pytest.mark.parametrize("hit_every", [1, 3, 50])
def test_no_rate_locks_loads_out_for_ever(hit_every: int) -> None:
    """Both tiers were a thousand times slower than they are, and few requests find anything."""
    gate = LoadGate(Rates(100, 10, 10))
    for number in range(400 * hit_every):
        turn, hit = divmod(number, hit_every)
        there = [] if hit else [Tier.DISK if turn % 2 else Tier.MEMORY] * 4
        if admits(gate, there) and there:
            gate.loaded(there, LENGTHS, 0.01)
    assert admits(gate, [Tier.MEMORY] * 4)
    assert admits(gate, [Tier.DISK] * 4)


def test_rates_follow_measurements_by_tier() -> None:
    gate = LoadGate(Rates(100))
    gate.loaded([Tier.MEMORY] * 4, LENGTHS, 1.0)
    assert (gate.rates.memory_bytes_per_s, gate.rates.disk_bytes_per_s) == (4000, 0)
    gate.loaded([Tier.MEMORY] * 2 + [Tier.DISK] * 2, LENGTHS, 2.0)  # half a second of it was memory's
    assert gate.rates.memory_bytes_per_s == pytest.approx(4000)
    assert gate.rates.disk_bytes_per_s == pytest.approx(2000 / 1.5)
    gate.loaded([Tier.NONE] * 4, LENGTHS, 9.0)
    gate.loaded([Tier.MEMORY] * 4, LENGTHS, 0.0)
    assert gate.rates.memory_bytes_per_s == 4000
    assert gate.load_s(Amount(4000, 0)) == 1


def test_a_mixed_load_faster_than_memory_alone_makes_no_infinite_disk() -> None:
    gate = LoadGate(Rates(100, 10))
    gate.loaded([Tier.MEMORY, Tier.DISK], [1000, 1000], 1.0)
    assert gate.rates.disk_bytes_per_s == 4000


def test_short_loads_do_not_speak_for_long_ones() -> None:
    """Every load costs 0.1 s, and a byte 10 µs: short ones have a rate that would forbid long ones."""
    gate = LoadGate(Rates(prefill_tokens_per_s=100))  # 10 tokens, 1000 bytes: 0.1 s
    for chunks in (1, 2, 1, 3, 1, 2, 1, 1) * 4:
        gate.loaded([Tier.MEMORY] * chunks, [1000] * chunks, 0.1 + chunks * 0.01)
    assert gate.load_s(Amount(20_000, 0)) == pytest.approx(0.3, rel=0.01)
    assert gate.admit([1000] * 20, 10, lambda: [Tier.MEMORY] * 20)
    assert not gate.admit([1000] * 20, 10, lambda: [Tier.MEMORY])  # one chunk is there: not worth what a load costs


def test_a_line_is_never_below_nothing() -> None:
    falling = Pace().measured(1000, 2.0).measured(2000, 1.0)
    assert falling.seconds_for(10_000) == falling.seconds_for(1) > 0
    steep = Pace().measured(1000, 0.1).measured(2000, 9.0)
    assert steep.seconds_for(1) > 0
    assert Pace().seconds_for(5) == Pace.of(10).seconds_for(0) == 0
    assert Pace.of(10).seconds_for(20) == pytest.approx(2)


def test_a_calibration_is_written_and_read(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    made = Calibration("2026-01-01T00:00:00+00:00", "h", 100.0, 1.0, 2.0, 3.0)
    made.write(path)
    assert read_calibration(path) == made
    assert made.rates() == Rates(100, 2, 3)
    assert [file.name for file in tmp_path.iterdir()] == ["c.json"]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"prefill_tokens_per_s": -1}', '{"prefil": 1}', '{"host": 3}'])
def test_a_file_that_is_no_calibration_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "c.json").write_text(text)
    with pytest.raises(ConfigurationError, match=r"c\.json.*polarkv calibrate"):
        read_calibration(tmp_path / "c.json")


def test_the_settings_decide_whether_there_is_a_gate(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    Calibration(prefill_tokens_per_s=5.0).write(path)
    config = ClientConfig(endpoint="tcp://a:1", calibration=path)
    gate = load_gate(config)
    assert gate is not None
    assert gate.rates == Rates(5)
    assert load_gate(config.model_copy(update={"recompute_gate": False})) is None
    assert load_gate(ClientConfig(endpoint="tcp://a:1")) is None
    Calibration(memory_bytes_per_s=5.0).write(path)
    assert load_gate(config) is None  # nothing to compare with
    with pytest.raises(ConfigurationError, match="readable"):
        load_gate(config.model_copy(update={"calibration": tmp_path / "none"}))
