"""Scaling: cache nodes join at once, and leave from the highest ordinal down, each only once it is drained.

Invariants, which are also what the user is told:

1. The number of replicas is never lowered below a cache node that still serves.
2. Raising the number takes back the nodes that were on their way out.
3. A drain that takes too long drops what is left to copy, and says so; it still has to end.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from polarkv_client.states import DrainMode, NodeState
from polarkv_operator.reconcile.plan.world import (
    CacheNode,
    CancelDrain,
    Drain,
    Notice,
    Purpose,
    StartDrain,
    Step,
    World,
    names,
)


@dataclass(frozen=True)
class Scaling:
    """``replicas`` is what the StatefulSet gets now; ``waits_for`` says what the rest waits for."""

    replicas: int
    steps: tuple[Step, ...] = ()
    notices: tuple[Notice, ...] = ()
    waits_for: str = ""


def plan_scaling(world: World, wanted: int, timeout_s: int) -> Scaling:
    """Decide the next steps from ``world.current`` to ``wanted`` cache nodes."""
    steps: list[Step] = []
    notices: list[Notice] = []
    returning = [node for node in world.nodes if node.ordinal < wanted and node.drained_for(Purpose.SCALE_DOWN)]
    if returning and world.manager_answers:
        steps += [CancelDrain(node.name, node.uid) for node in returning if node.there]
        notices.append(Notice("DrainCancelled", f"{wanted} cache nodes are wanted again: {names(returning)} stay"))
    if wanted >= world.current:
        if wanted > world.current:
            notices.append(Notice("ScalingUp", f"from {world.current} to {wanted} cache nodes"))
        return Scaling(wanted, tuple(steps), tuple(notices))
    if not world.manager_answers:
        wait = f"{world.current - wanted} cache nodes leave once the manager answers: only it can drain them"
        return Scaling(world.current, (), (), wait)
    leaving = [world.at(ordinal) for ordinal in range(world.current - 1, wanted - 1, -1)]
    for node in leaving:
        if node is not None and node.there:
            _drain(node, timeout_s, world.now_s, steps, notices)
    replicas = world.current
    for node in leaving:
        if node is not None and not _may_leave(node, timeout_s, world.now_s):
            break
        replicas -= 1
    if replicas < world.current:
        gone = [node for node in leaving[: world.current - replicas] if node is not None]
        notices.append(Notice("ScalingDown", f"from {world.current} to {replicas} cache nodes: {names(gone)} leave"))
    stay = [node for node in leaving if node is not None and not _may_leave(node, timeout_s, world.now_s)]
    wait = ", ".join(f"{node.name} is {node.state or 'not registered'}" for node in stay)
    return Scaling(replicas, tuple(steps), tuple(notices), f"leaving: {wait}" if stay else "")


def _drain(node: CacheNode, timeout_s: int, now_s: int, steps: list[Step], notices: list[Notice]) -> None:
    """Begin a drain, begin it again where the manager has forgotten it, or drop what took too long."""
    if not node.drained_for(Purpose.SCALE_DOWN) or node.drain is None:
        if node.absent:
            return
        drain = Drain(Purpose.SCALE_DOWN, DrainMode.FLUSH, now_s)
        steps.append(StartDrain(node.name, node.uid, drain))
        notices.append(Notice("Draining", f"{node.name} leaves: its memory is copied to its disks first"))
    elif node.drain.mode is DrainMode.FLUSH and node.overdue(timeout_s, now_s) and node.state is NodeState.DRAINING:
        steps.append(StartDrain(node.name, node.uid, replace(node.drain, mode=DrainMode.DISCARD)))
        text = f"{node.name} was not drained after {timeout_s} s: what its disks do not have yet is dropped"
        notices.append(Notice("DrainTimedOut", text, warning=True))
    elif node.state is NodeState.ACTIVE:
        steps.append(StartDrain(node.name, node.uid, node.drain))


def _may_leave(node: CacheNode, timeout_s: int, now_s: int) -> bool:
    if node.state is NodeState.JOINING:
        # It gives no slots yet and cannot be drained. One that never joins must not keep the others from leaving.
        return node.drained_for(Purpose.SCALE_DOWN) and node.overdue(timeout_s, now_s)
    return node.gone or node.state is NodeState.DRAINED
