"""The demo's checks fail when what they claim is not so."""

from __future__ import annotations

from typing import Any

import pytest

from demo.checks import judge_replay, judge_runs
from demo.run import Run


def run(**changes: Any) -> Run:
    """A process that saw a prompt of 16 chunks of 256 tokens and a rest."""
    usual: dict[str, Any] = {"ttft_s": 10.0, "lookup_s": 0.001, "generated": [5, 6], "zeroed": [7, 8]}
    base = {"model": "m", "parameters": 1, "bytes_per_token": 4096, "prompt_tokens": 4160, "cacheable_tokens": 4096}
    return Run(**{**base, **usual, **changes})


def runs(tier: str, **changes: Any) -> dict[str, Run]:
    """The three runs of a good demo, with changes in one of them."""
    good: dict[str, dict[str, Any]] = {
        "cold": {"stored_chunks": 16, "stored_bytes": 1},
        "memory": {"ttft_s": 0.5, "loaded_tokens": 4096, "chunks_by_tier": {"memory": 16}},
        "disk": {"ttft_s": 0.6, "loaded_tokens": 4096, "chunks_by_tier": {"disk": 16}},
    }
    return {name: run(**{**fields, **(changes if name == tier else {})}) for name, fields in good.items()}


def failed(found: dict[str, Run]) -> list[str]:
    return [check.claim for check in judge_runs(found) if not check.held]


def test_a_good_demo_holds() -> None:
    checks = judge_runs(runs("none"))
    assert len(checks) == 9
    assert all(check.held for check in checks)


@pytest.mark.parametrize(
    ("tier", "changes", "claim"),
    [
        ("cold", {"loaded_tokens": 256}, "found nothing"),
        ("memory", {"generated": [5, 7]}, "tokens after a memory hit"),
        ("disk", {"generated": [5, 7]}, "tokens after a disk hit"),
        ("memory", {"zeroed": [5, 6]}, "zeroed"),
        ("memory", {"ttft_s": 2.1}, "memory hit: at most 0.2"),
        ("disk", {"ttft_s": 3.1}, "disk hit: at most 0.3"),
        ("disk", {"chunks_by_tier": {"disk": 15, "memory": 1}}, "came from disk"),
        ("memory", {"loaded_tokens": 3840}, "came from memory"),
        ("disk", {"chunks_by_tier": {}, "loaded_tokens": 0}, "came from disk"),
    ],
)
def test_each_claim_can_fail(tier: str, changes: dict[str, Any], claim: str) -> None:
    (only,) = failed(runs(tier, **changes))
    assert claim in only


def test_a_cold_run_that_stored_nothing_fails_both_hits() -> None:
    assert len(failed(runs("cold", stored_chunks=0))) == 2


def test_short_prompts_are_not_held_to_the_ratios() -> None:
    short = {name: run(**{**vars_of(one), "prompt_tokens": 1000}) for name, one in runs("disk", ttft_s=9.0).items()}
    assert failed(short) == []


def vars_of(one: Run) -> dict[str, Any]:
    return dict(vars(one))


@pytest.mark.parametrize(
    ("changes", "held"),
    [({}, True), ({"corrupted": 1}, False), ({"disk_hits": 0}, False), ({"memory_hits": 0}, False)],
)
def test_the_replay_is_judged(changes: dict[str, int], held: bool) -> None:
    report = {"memory_hits": 3, "disk_hits": 4, "corrupted": 0, **changes}
    assert all(check.held for check in judge_replay(report)) is held
