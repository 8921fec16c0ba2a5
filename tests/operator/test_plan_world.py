"""Scaling and rollouts in every state that a tiny cluster can reach, and rules whose removal is noticed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from polarkv_operator.reconcile.plan import rollout, scale
from polarkv_operator.reconcile.plan.world import CacheNode, DeletePod, World
from tests.operator.small_cluster import Broken, Cluster, Place, happenings, operate, search, settle

pytestmark = pytest.mark.timeout(240)
START = Cluster((Place(), Place()), replicas=2, wanted=2)


def search_and_settle() -> int:
    """How many states were reached; each settles from there. Raises Broken."""
    reached, known = search(START), set[Cluster]()
    for cluster in reached:
        settle(cluster, known)
    return len(reached)


@pytest.mark.deep
def test_no_invariant_breaks_and_every_state_settles() -> None:
    assert search_and_settle() > 10_000


def test_larger_clusters_at_random() -> None:
    chance = random.Random(5)
    for _ in range(100):
        cluster = Cluster((Place(),) * 5, 5, 5, wishes=6, templates=3, crashes=4, restarts=2)
        for _ in range(80):
            happened = [*happenings(cluster), cluster]
            cluster = operate(cluster) if chance.random() < 0.4 else chance.choice(happened)
        settle(cluster, set(), 300)


def _leave_at_once(node: CacheNode, timeout_s: int, now_s: int) -> bool:
    return True


def _leave_when_asked(node: CacheNode, timeout_s: int, now_s: int) -> bool:
    return node.drain is not None


def _never_cancel(world: World, wanted: int, timeout_s: int) -> scale.Scaling:
    return replace(_real_scaling(world, wanted, timeout_s), steps=())


def _all_at_once(world: World, wanted: int, rules: rollout.RolloutRules) -> rollout.Rollout:
    steps = []
    for node in world.nodes:
        alone = replace(world, nodes=(node,), current=0)
        steps += list(_real_rollout(alone, wanted, rules).steps)
    return rollout.Rollout(len(steps), tuple(steps))


def _delete_undrained(node: CacheNode, rules: rollout.RolloutRules, now_s: int) -> tuple[DeletePod, None, str]:
    return DeletePod(node.name, node.uid), None, ""


def _never_finish(node: CacheNode, rules: rollout.RolloutRules, now_s: int) -> tuple[None, None, str]:
    return None, None, "?"


_real_scaling, _real_rollout = scale.plan_scaling, rollout.plan_rollout
MUTANTS: dict[str, tuple[str, Callable[..., object]]] = {
    "replicas are lowered at once": ("polarkv_operator.reconcile.plan.scale._may_leave", _leave_at_once),
    "replicas are lowered once a drain has begun": (
        "polarkv_operator.reconcile.plan.scale._may_leave", _leave_when_asked),
    "scaling up does not take back": ("tests.operator.small_cluster.plan_scaling", _never_cancel),
    "all nodes are rolled at once": ("tests.operator.small_cluster.plan_rollout", _all_at_once),
    "pods are deleted undrained": ("polarkv_operator.reconcile.plan.rollout._advance", _delete_undrained),
    "a rollout never ends": ("polarkv_operator.reconcile.plan.rollout._advance", _never_finish),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_a_rule_that_is_removed_is_missed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, mutant = MUTANTS[name]
    monkeypatch.setattr(target, mutant)
    with pytest.raises(Broken):
        search_and_settle()
