"""Everything that can ever happen in tiny worlds, or up to a horizon where faults make them large: no rule breaks.

In all but the last world nobody verifies a checksum: leases, tickets, quarantine, fences, tombstones and incarnations
hold by themselves. The last one is where only the header's checksum can tell: a node comes back with memory on which
writers of a former life are still at work.
"""

import pytest

from tests.model.scope import STILL, Scope
from tests.model.search import search

BOTH = ("Flush", "Discard")
FAST = [
    Scope("no fault, no end of time"),
    Scope("no disk", files=0),
    Scope("drains", drains=BOTH, drain_budget=1, horizon_ms=2),
]
DEEP = [
    Scope("readers that are late", prompt_readers=False),
    Scope("room for both keys on disk", files=2, horizon_ms=5),
    Scope("drains, again and again", drains=BOTH, drain_budget=2, horizon_ms=2),
    Scope("a disk that fails", failures=1, horizon_ms=3),
    Scope("a disk that repeats itself", echoes=1, horizon_ms=3),
    Scope("an admin at work", admin=True, horizon_ms=2),
    Scope("pins and prefetches", prefetch=True, pins=1, horizon_ms=2),
    Scope("a disk that reorders", ordered_disk=False, admin=True, horizon_ms=3),
    Scope("the node dies", fresh_crashes=1, returns=1, unprompted=False, horizon_ms=STILL),
    Scope("the node dies, and has no disk", fresh_crashes=1, returns=1, unprompted=False, files=0, horizon_ms=3),
    Scope("the node comes back with its memory", returns=1, prompt_readers=False, horizon_ms=2),
    Scope("the node comes back, and has no disk", returns=1, files=0, prompt_readers=False, horizon_ms=5),
    Scope("the manager dies", restarts=1, returns=1, horizon_ms=1),
    Scope("the manager dies, checksums", checksums=True, restarts=1, returns=1, horizon_ms=1),
]


def explore(scope: Scope) -> None:
    result = search(scope)
    print(f"\n{result}")
    assert result.violation is None, result
    assert result.states > 100, "a world in which nothing happens proves nothing"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("scope", FAST, ids=lambda scope: scope.name)
def test_no_history_breaks_a_rule(scope: Scope) -> None:
    explore(scope)


@pytest.mark.deep
@pytest.mark.timeout(900)
@pytest.mark.parametrize("scope", DEEP, ids=lambda scope: scope.name)
def test_no_history_with_faults_breaks_a_rule(scope: Scope) -> None:
    explore(scope)
