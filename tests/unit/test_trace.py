"""The trace reader, the generator and the LRU they are judged by."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from polarkv_client.cli.trace import (
    BLOCK_TOKENS,
    CONVERSATION_REQUESTS,
    DEFAULT_SEED,
    Request,
    generate_trace,
    lru_hit_rate,
    read_trace,
)
from polarkv_client.errors import ConfigurationError

REAL_TRACE = Path(__file__).parents[3] / "shared" / "data" / "conversation_trace.jsonl"
REFERENCES, DISTINCT = 288_500, 182_790
HIT_PERCENT = {None: 36.6, 50_000: 35.5, 20_000: 28.7, 10_000: 21.1, 5_000: 11.0, 2_000: 5.4, 1_000: 4.4}


def request(*hash_ids: int) -> Request:
    return Request(timestamp_ms=0, input_length=len(hash_ids) * BLOCK_TOKENS, output_length=1, hash_ids=list(hash_ids))


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


GOOD = '{"timestamp": 3000, "input_length": 700, "output_length": 5, "hash_ids": [0, 7]}'


def test_reads_requests_in_order_and_skips_empty_lines(tmp_path: Path) -> None:
    found = list(read_trace(write(tmp_path / "t.jsonl", GOOD, "", GOOD.replace("[0, 7]", "[]"))))
    assert found == [Request(3000, 700, 5, [0, 7]), Request(3000, 700, 5, [])]


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("{not json", "malformed"),
        ("[]", "object"),
        (GOOD.replace('"hash_ids"', '"hashes"'), "hash_ids"),
        (GOOD.replace("7]", '"x"]'), r"\$.hash_ids\[1\]"),
        (GOOD.replace("7]", "-7]"), r"\$.hash_ids\[1\]"),
        (GOOD.replace("7]", "4294967296]"), r"\$.hash_ids\[1\]"),
        (GOOD.replace("3000", "-1"), r"\$.timestamp"),
        (GOOD.replace("700", "1.5"), r"\$.input_length"),
    ],
)
def test_a_bad_line_is_named_with_its_field(tmp_path: Path, line: str, named: str) -> None:
    trace = read_trace(write(tmp_path / "t.jsonl", GOOD, line))
    assert next(trace).hash_ids == [0, 7]
    with pytest.raises(ConfigurationError, match=rf"(?s)t\.jsonl, line 2.*{named}"):
        next(trace)


def test_bytes_that_are_no_text_are_refused_with_their_line(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(b'\xff\xfe{"timestamp": 0}\n')
    with pytest.raises(ConfigurationError, match=r"t\.jsonl, line 1"):
        list(read_trace(path))


def test_a_missing_file_is_refused_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"nowhere\.jsonl.*No such file"):
        list(read_trace(tmp_path / "nowhere.jsonl"))


def test_lru_by_hand() -> None:
    trace = [request(1, 2), request(1, 3), request(2)]
    assert lru_hit_rate(trace) == pytest.approx(2 / 5)
    assert lru_hit_rate(trace, 2) == pytest.approx(1 / 5)  # 3 pushed 2 out, because 1 had just been used
    assert lru_hit_rate(trace, 1) == 0
    assert lru_hit_rate([]) == 0


@pytest.mark.skipif(not REAL_TRACE.exists(), reason=f"the public trace is not at {REAL_TRACE}")
def test_the_public_trace_has_its_published_figures() -> None:
    trace = list(read_trace(REAL_TRACE))
    assert len(trace) == CONVERSATION_REQUESTS
    assert sum(len(r.hash_ids) for r in trace) == REFERENCES
    assert abs(len({h for r in trace for h in r.hash_ids}) - DISTINCT) <= 1
    for blocks, percent in HIT_PERCENT.items():
        assert round(100 * lru_hit_rate(trace, blocks), 1) == percent


@pytest.mark.parametrize("seed", [DEFAULT_SEED, 0, 4])
def test_the_generated_trace_has_the_public_ones_statistics(seed: int) -> None:
    trace = list(generate_trace(seed))
    assert len(trace) == CONVERSATION_REQUESTS
    assert sum(len(r.hash_ids) for r in trace) == pytest.approx(REFERENCES, rel=0.05)
    assert len({h for r in trace for h in r.hash_ids}) == pytest.approx(DISTINCT, rel=0.05)
    for blocks, percent in HIT_PERCENT.items():
        assert 100 * lru_hit_rate(trace, blocks) == pytest.approx(percent, abs=2.5), blocks


def test_the_generated_trace_depends_on_its_seed_alone() -> None:
    first = list(generate_trace(7, 300))
    assert first == list(generate_trace(7, 300))
    assert first != list(generate_trace(8, 300))
    assert first == list(generate_trace(7, 900))[:300]


def test_the_generated_trace_is_well_formed(tmp_path: Path) -> None:
    parents: dict[int, int | None] = {}
    before_ms = 0
    lines = []
    for r in generate_trace(1, 2_000):
        assert len(r.hash_ids) == -(-r.input_length // BLOCK_TOKENS)
        assert r.output_length >= 1
        assert r.timestamp_ms >= before_ms
        before_ms = r.timestamp_ms
        for parent, block in zip([None, *r.hash_ids], r.hash_ids, strict=False):
            assert parents.setdefault(block, parent) == parent  # an id stands for its whole prefix
        names = {"timestamp": r.timestamp_ms, "input_length": r.input_length, "output_length": r.output_length}
        lines.append(json.dumps({**names, "hash_ids": r.hash_ids}))
    assert list(read_trace(write(tmp_path / "t.jsonl", *lines))) == list(generate_trace(1, 2_000))


def test_no_requests_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="requests=0"):
        next(generate_trace(1, 0))
