"""A tiny cluster for exhaustive search: places with pods, what the manager says of them, and all that may happen."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from polarkv_client.states import DrainMode, NodeState
from polarkv_operator.reconcile.plan.rollout import RolloutRules, plan_rollout
from polarkv_operator.reconcile.plan.scale import plan_scaling
from polarkv_operator.reconcile.plan.world import (
    CacheNode,
    CancelDrain,
    DeletePod,
    Drain,
    Purpose,
    StartDrain,
    Step,
    World,
)

NOW_S, TIMEOUT_S = 100_000, 600
A, J, D, R = NodeState.ACTIVE, NodeState.JOINING, NodeState.DRAINING, NodeState.DRAINED


class Broken(AssertionError):
    """An invariant does not hold."""


@dataclass(frozen=True)
class Place:
    """A pod and its node. ``drain`` is the operator's note: purpose, mode, whether it has taken too long."""

    pod: bool = True
    outdated: bool = False
    state: NodeState | None = A
    drain: tuple[Purpose, DrainMode, bool] | None = None
    long_absent: bool = False

    def node(self, ordinal: int) -> CacheNode:
        note = None
        if self.drain is not None:
            purpose, mode, overdue = self.drain
            note = Drain(purpose, mode, NOW_S - TIMEOUT_S if overdue else NOW_S)
        return CacheNode(
            ordinal,
            f"c-cache-{ordinal}",
            uid="u" if self.pod else "",
            ready=self.pod and self.state is not None,
            outdated=self.pod and self.outdated,
            state=self.state,
            absent_s=100 if self.long_absent else 0,
            proved=self.state is A,
            drain=note,
        )


@dataclass(frozen=True)
class Cluster:
    """The state of the world; the last four fields bound what may still happen to it."""

    places: tuple[Place, ...]
    replicas: int
    wanted: int
    wishes: int = 2
    templates: int = 1
    crashes: int = 1
    restarts: int = 1

    def world(self) -> World:
        present = [place.node(ordinal) for ordinal, place in enumerate(self.places) if place.pod or place.state]
        return World(tuple(present), self.replicas, NOW_S)

    def put(self, ordinal: int, place: Place) -> Cluster:
        return replace(self, places=(*self.places[:ordinal], place, *self.places[ordinal + 1 :]))

    def settled(self) -> bool:
        """Nothing is left to do."""
        return self.replicas == self.wanted and all(
            place == Place() if ordinal < self.wanted else not place.pod for ordinal, place in enumerate(self.places)
        )


def operate(cluster: Cluster, *, check: bool = True) -> Cluster:
    """One turn of the operator: plan, then do it. Raises Broken."""
    world = cluster.world()
    scaling = plan_scaling(world, cluster.wanted, TIMEOUT_S)
    rollout = plan_rollout(world, cluster.wanted, RolloutRules(timeout_s=TIMEOUT_S))
    after = cluster
    for step in (*scaling.steps, *rollout.steps):
        after = execute(after, step, check)
    if check:
        check_scaling(after, scaling.replicas)
        check_rollout(after)
    return replace(after, replicas=scaling.replicas)


def execute(cluster: Cluster, step: Step, check: bool) -> Cluster:
    ordinal = int(step.node.rsplit("-", 1)[1])
    place = cluster.places[ordinal]
    if isinstance(step, DeletePod):
        if check and not (place.state is R or place.long_absent or _was_stuck(place)):
            raise Broken(f"a pod is deleted that is {place.state}")
        return cluster.put(ordinal, replace(place, pod=False, state=None, drain=None, long_absent=False))
    if isinstance(step, CancelDrain):
        return cluster.put(ordinal, replace(place, drain=None, state=A if place.state in (D, R) else place.state))
    assert isinstance(step, StartDrain)
    overdue = step.drain.since_s < NOW_S
    state = D if place.state in (A, R) else place.state
    return cluster.put(ordinal, replace(place, drain=(step.drain.purpose, step.drain.mode, overdue), state=state))


def _was_stuck(place: Place) -> bool:
    return place.state is J and place.drain is not None and place.drain[2]


def check_scaling(cluster: Cluster, replicas: int) -> None:
    for ordinal in range(replicas, cluster.replicas):
        place = cluster.places[ordinal]
        drained = place.state in (R, D) and place.drain is not None  # draining again, what is drained, ends at once
        if place.pod and not (drained or place.long_absent or _was_stuck(place)):
            raise Broken(f"replicas go to {replicas} below an undrained node: {place}")
    for ordinal in range(cluster.wanted):
        drain = cluster.places[ordinal].drain
        if drain is not None and drain[0] is Purpose.SCALE_DOWN:
            raise Broken("a node that is wanted is still drained for a scale-down")


def check_rollout(cluster: Cluster) -> None:
    staying = cluster.places[: cluster.wanted]
    rolled = [place for place in staying if place.drain is not None and place.drain[0] is Purpose.ROLLOUT]
    if len(rolled) > 1:
        raise Broken("two nodes are drained by a rollout")


def happenings(cluster: Cluster) -> Iterator[Cluster]:
    """Everything that may happen next, but the operator's turn."""
    yield from progress(cluster)
    for wanted in range(len(cluster.places) + 1):
        if cluster.wishes and wanted != cluster.wanted:
            yield replace(cluster, wanted=wanted, wishes=cluster.wishes - 1)
    if cluster.templates:
        places = tuple(replace(place, outdated=True) for place in cluster.places)
        yield replace(cluster, places=places, templates=cluster.templates - 1)
    if cluster.restarts:
        places = tuple(replace(place, state=None) for place in cluster.places)
        yield replace(cluster, places=places, restarts=cluster.restarts - 1)
    for ordinal, place in enumerate(cluster.places):
        if cluster.crashes and place.pod and place.state is not None:
            yield replace(cluster.put(ordinal, replace(place, state=None)), crashes=cluster.crashes - 1)
        if place.drain is not None and not place.drain[2]:
            yield cluster.put(ordinal, replace(place, drain=(*place.drain[:2], True)))


def progress(cluster: Cluster) -> Iterator[Cluster]:
    """What goes on by itself: controllers, cache nodes, the manager."""
    for ordinal, place in enumerate(cluster.places):
        if place.pod and ordinal >= cluster.replicas:
            yield cluster.put(ordinal, Place(pod=False, state=None))
        elif not place.pod and ordinal < cluster.replicas:
            yield cluster.put(ordinal, Place(state=None))
        elif place.pod and place.state is None:
            yield cluster.put(ordinal, replace(place, state=J, long_absent=False))
            if not place.long_absent:
                yield cluster.put(ordinal, replace(place, long_absent=True))
        elif place.state in (J, D):
            yield cluster.put(ordinal, replace(place, state=A if place.state is J else R))


def search(start: Cluster) -> set[Cluster]:
    """Everything that can be reached. Raises Broken."""
    seen, todo = {start}, [start]
    while todo:
        cluster = todo.pop()
        for reached in (operate(cluster), *happenings(cluster)):
            if reached not in seen:
                seen.add(reached)
                todo.append(reached)
    return seen


def settle(cluster: Cluster, known: set[Cluster], turns: int = 60) -> None:
    """Let the operator and all that goes on by itself take turns until nothing is left to do. Raises Broken.

    ``known`` are states that settle; those on the way are added.
    """
    way = []
    for _ in range(turns):
        way.append(cluster)
        if cluster in known or cluster.settled():
            known.update(way)
            return
        cluster = operate(cluster)
        cluster = next(progress(cluster), cluster)
    raise Broken(f"it does not end: {cluster}")
