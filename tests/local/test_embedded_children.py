"""A supervised process: when it is started again, and what is kept of its log."""

from __future__ import annotations

import json
import select
from pathlib import Path

import pytest

from polarkv_dataplane.embedded import children
from polarkv_dataplane.embedded.children import FIRST_WAIT_S, LONGEST_WAIT_S, STABLE_S, Child
from polarkv_dataplane.embedded.places import Places, ensure_secrets, read_json


def ended_child(folder: Path) -> Child:
    """A child that was started with a command that does not exist, and has ended."""
    child = Child("nonsense", ["nonsense"], folder / "nonsense.log", {})
    assert select.select([child.start()], [], [], 20)[0], "it did not end"
    return child


def test_waits_double_up_to_a_bound_and_start_anew_after_a_stable_life(tmp_path: Path) -> None:
    child = ended_child(tmp_path)
    now = child.started_at + 0.5
    assert child.ended(now) == 2
    assert (child.pid, child.failures, child.due_at - now) == (None, 1, pytest.approx(FIRST_WAIT_S))
    assert "ended with code 2 after 0.5 s" in child.last_end
    assert "nonsense" in child.tail()
    for failures, wait_s in ((1, 2 * FIRST_WAIT_S), (4, 16 * FIRST_WAIT_S), (40, LONGEST_WAIT_S)):
        child.failures = failures
        assert child.wait_s() == pytest.approx(wait_s)
    child = ended_child(tmp_path)
    child.failures = 7
    now = child.started_at + STABLE_S
    child.ended(now)
    assert (child.failures, child.due_at - now) == (1, pytest.approx(FIRST_WAIT_S))


def test_a_log_has_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "LOG_LIMIT_BYTES", 1000)
    child = Child("x", [], tmp_path / "x.log", {})
    child.trim_log()  # there is none yet
    with child.log.open("a") as log:  # as a process has it: appending, all the time
        for round_ in range(3):
            log.write(f"{round_}" * 2000 + "\nlast words\n")
            log.flush()
            assert "last words" in child.tail()
            child.trim_log()
            assert child.log.stat().st_size == 0
            kept = child.log.with_suffix(".log.1").read_text()
            assert (len(kept), kept.endswith("last words\n"), f"{round_}" in kept) == (1000, True, True)


def test_secrets_are_made_once_and_kept(tmp_path: Path) -> None:
    places = Places(tmp_path)
    first = ensure_secrets(places)
    secret = places.secret.read_text()
    assert ensure_secrets(places) == first
    assert places.secret.read_text() == secret
    # Tenants that somebody added stay.
    tokens = read_json(places.tokens)
    tokens["tenants"]["other"] = {"token": "another-token", "quota_bytes": 5}
    places.tokens.write_text(json.dumps(tokens))
    assert ensure_secrets(places) == first
    assert read_json(places.tokens) == tokens
