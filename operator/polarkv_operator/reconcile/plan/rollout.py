"""Rolling changes: one cache node at a time, drained before its pod goes, serving again before the next one's turn.

Invariants:

1. At most one cache node is out of service because of a rollout, and none is taken out while another one is missing.
2. A pod is deleted only if its node is drained, or the manager serves nothing from it.
3. What no longer has to change, because the spec went back or the rollout was paused, serves again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from polarkv_client.states import DrainMode, NodeState
from polarkv_operator.reconcile.plan.world import (
    CacheNode,
    CancelDrain,
    DeletePod,
    Drain,
    Notice,
    Purpose,
    StartDrain,
    Step,
    World,
)


@dataclass(frozen=True)
class RolloutRules:
    """What the spec says about rollouts."""

    paused: bool = False
    mode: DrainMode = DrainMode.FLUSH
    timeout_s: int = 600


@dataclass(frozen=True)
class Rollout:
    """``outdated`` counts nodes that still have to change; ``waits_for`` says what the next step waits for."""

    outdated: int
    steps: tuple[Step, ...] = ()
    notices: tuple[Notice, ...] = ()
    waits_for: str = ""


def plan_rollout(world: World, wanted: int, rules: RolloutRules) -> Rollout:
    """Decide the next step for nodes below ``wanted`` (the others leave anyway)."""
    staying = sorted((n for n in world.nodes if n.ordinal < wanted), key=lambda node: -node.ordinal)
    # What comes back from a scale-down is taken back first.
    outdated = [n for n in staying if n.uid and n.outdated and not n.drained_for(Purpose.SCALE_DOWN)]
    under_way = [node for node in staying if node.there and node.drained_for(Purpose.ROLLOUT)]
    if not world.manager_answers:
        return Rollout(len(outdated), waits_for="the manager does not answer: only it can drain" if outdated else "")
    if not world.revision_known:
        return Rollout(len(outdated), waits_for="the StatefulSet's controller has not seen the change yet")
    chosen = None if rules.paused else next((node for node in under_way if node.outdated), None)
    back = tuple(CancelDrain(node.name, node.uid) for node in under_way if node is not chosen)
    notices = tuple(Notice("DrainCancelled", f"{step.node} does not have to change: it serves again") for step in back)
    if rules.paused or not outdated:
        wait = f"{len(outdated)} cache nodes have to change: rollout.paused is set" if outdated else ""
        return Rollout(len(outdated), back, notices, wait)
    if chosen is None:
        missing = [node for node in staying if not node.serving and node not in outdated]
        missing_places = [at for at in range(min(wanted, world.current)) if world.at(at) is None]
        if missing or missing_places:
            wait = _describe(missing[0]) if missing else f"cache node {missing_places[0]} has no pod yet"
            return Rollout(len(outdated), back, notices, wait)
        # Of those that are out of service already, nothing is taken away.
        chosen = next((node for node in outdated if not node.serving), outdated[0])
    step, notice, wait = _advance(chosen, rules, world.now_s)
    steps = back if step is None else (*back, step)
    return Rollout(len(outdated), steps, (*notices, notice) if notice else notices, wait)


def _advance(node: CacheNode, rules: RolloutRules, now_s: int) -> tuple[Step | None, Notice | None, str]:
    """The next step of one node's change: (step, notice, what is waited for)."""
    if node.terminating:
        return None, None, f"{node.name} stops"
    if node.state is NodeState.DRAINED:
        text = f"{node.name} is drained: its pod is made anew"
        return DeletePod(node.name, node.uid), Notice("Replacing", text), text
    if node.absent:
        if not node.gone:
            return None, None, f"{node.name} is not registered with the manager"
        text = f"{node.name} serves nothing: its pod is made anew"
        return DeletePod(node.name, node.uid), Notice("Replacing", text), text
    overdue = node.overdue(rules.timeout_s, now_s)
    if node.drain is None or not node.drained_for(Purpose.ROLLOUT):
        drain = Drain(Purpose.ROLLOUT, rules.mode, now_s)
        text = f"{node.name} has to change: it is drained ({rules.mode}) first"
        return StartDrain(node.name, node.uid, drain), Notice("Draining", text), text
    if node.state is NodeState.JOINING:
        if overdue:
            text = f"{node.name} has been Joining for {rules.timeout_s} s: its pod is made anew"
            return DeletePod(node.name, node.uid), Notice("Replacing", text, warning=True), text
        return None, None, f"{node.name} is Joining"
    if node.state is NodeState.ACTIVE:
        return StartDrain(node.name, node.uid, node.drain), None, f"{node.name} is drained"
    if overdue and node.drain.mode is DrainMode.FLUSH:
        text = f"{node.name} was not drained after {rules.timeout_s} s: what its disks do not have yet is dropped"
        discard = StartDrain(node.name, node.uid, replace(node.drain, mode=DrainMode.DISCARD))
        return discard, Notice("DrainTimedOut", text, warning=True), text
    return None, None, f"{node.name} is Draining"


def _describe(node: CacheNode) -> str:
    if not node.uid:
        return f"{node.name} has no pod yet"
    if node.terminating:
        return f"{node.name} stops"
    if node.absent or node.state is not NodeState.ACTIVE:
        return f"{node.name} is {node.state or 'not registered with the manager'}"
    return f"{node.name} is not ready" if not node.ready else f"{node.name} still reports what its disks hold"
