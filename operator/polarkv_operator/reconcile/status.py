"""The status of a cluster, from what was seen and decided. Pure; the caller writes it if it differs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from polarkv_client.states import NodeState
from polarkv_operator.api.cache_nodes import TransportMode
from polarkv_operator.api.cluster import PolarKVCluster
from polarkv_operator.api.status import (
    AutoscalingStatus,
    CacheNodeStatus,
    Condition,
    ConditionStatus,
    ConditionType,
    PolarKVClusterStatus,
)
from polarkv_operator.reconcile import autoscale
from polarkv_operator.reconcile.plan.rollout import Rollout
from polarkv_operator.reconcile.plan.scale import Scaling
from polarkv_operator.reconcile.plan.trouble import Trouble
from polarkv_operator.reconcile.plan.world import World, read_time, show_time
from polarkv_operator.resources import names

MOST_MESSAGE = 1024


@dataclass(frozen=True)
class Fact:
    """A condition before it has a time."""

    type: ConditionType
    holds: bool | None
    reason: str
    message: str


@dataclass(frozen=True)
class Facts:
    """All that the status speaks of. ``silence`` is why the manager does not answer; ``problems`` need somebody."""

    wanted: int
    world: World
    scaling: Scaling
    rollout: Rollout
    image: str
    silence: str = ""
    manager_current: bool = True
    problems: tuple[tuple[str, str], ...] = ()  # reason, message
    troubles: tuple[Trouble, ...] = ()
    rdma: Mapping[str, str] | None = None  # by node
    paused: bool = False
    rate: float | None = None
    decision: autoscale.Decision | None = None


def make_status(cluster: PolarKVCluster, facts: Facts, old: Mapping[str, Any], now_s: int) -> dict[str, Any]:
    """The status as the API server takes it. What has not changed since ``old``, which is there, keeps its time."""
    active = [node for node in facts.world.nodes if node.state is NodeState.ACTIVE and node.ordinal < facts.wanted]
    conditions = [
        _ready(facts, len(active)),
        _progressing(facts, len(active)),
        _degraded(facts),
        _manager(facts),
        Fact(ConditionType.SPEC_VALID, True, "Valid", "every field is understood"),
        _rdma(cluster, facts),
    ]
    status = PolarKVClusterStatus(
        observed_generation=cluster.metadata.generation,
        conditions=_timed(conditions, cluster.metadata.generation, old, now_s),
        endpoint=names.endpoint(cluster),
        replicas=sum(1 for node in facts.world.nodes if node.uid),
        ready_replicas=len(active),
        selector=names.selector_text(cluster),
        nodes=f"{len(active)}/{facts.wanted}",
        served_bytes_per_second=None if facts.rate is None else int(float(f"{facts.rate:.1e}")),
        served=None if facts.rate is None else autoscale.show_rate(float(f"{facts.rate:.1e}")),
        cache_nodes=[
            CacheNodeStatus(name=node.name, state=node.state, message=_waiting(facts, node.name))
            for node in facts.world.nodes
            if node.uid or node.ordinal < max(facts.wanted, facts.world.current)  # managers remember those that left
        ],
        autoscaling=autoscaling_status(facts.decision, old.get("autoscaling") or {}),
        image=facts.image if not facts.rollout.outdated and facts.manager_current else old.get("image"),
        secrets_generation=(
            old.get("secretsGeneration") if facts.rollout.outdated else cluster.spec.security.secrets_generation
        ),
    )
    return status.to_object()


def refused_status(error: str, generation: int, old: Mapping[str, Any], now_s: int) -> dict[str, Any]:
    """The status of a cluster whose spec is not understood: what was said before stays, and is not of this spec."""
    invalid = Fact(ConditionType.SPEC_VALID, False, "Invalid", f"{error}; nothing is changed until it is")
    others = [found for found in old.get("conditions", ()) if found["type"] != ConditionType.SPEC_VALID]
    timed = [condition.to_object() for condition in _timed([invalid], generation, old, now_s)]
    return {**old, "observedGeneration": generation, "conditions": [*others, *timed]}


def autoscaling_status(decision: autoscale.Decision | None, old: Mapping[str, Any]) -> AutoscalingStatus | None:
    """What is kept of a decision. While it is the same, so is its message: figures would change it all the time."""
    if decision is None:
        return None
    memory = decision.memory
    made = AutoscalingStatus(
        desired_replicas=memory.desired,
        reason=decision.reason,
        message=decision.message,
        last_scale_time=_time(memory.scaled_s),
        pending_replicas=memory.pending,
        pending_since=_time(memory.pending_since_s),
        figures_time=_time(memory.sampled_s),
    )
    same = ("desiredReplicas", "reason", "pendingReplicas", "pendingSince")
    fresh = made.to_object()
    if old.get("message") and all(fresh.get(name) == old.get(name) for name in same):
        return made.model_copy(update={"message": old["message"]})
    return made


def read_memory(old: Mapping[str, Any], replicas: int) -> autoscale.Memory:
    """What was kept; where nothing was, or nobody can read it, autoscaling begins with ``replicas``."""
    kept = old.get("autoscaling") or {}
    try:
        read = AutoscalingStatus.model_validate(kept)
        return autoscale.Memory(
            read.desired_replicas,
            _seconds(read.last_scale_time),
            read.pending_replicas,
            _seconds(read.pending_since),
            _seconds(read.figures_time),
        )
    except ValueError:
        return autoscale.Memory(replicas)


def _ready(facts: Facts, active: int) -> Fact:
    def fact(holds: bool, reason: str, message: str) -> Fact:
        return Fact(ConditionType.READY, holds, reason, message)

    if facts.silence:
        return fact(False, "ManagerUnavailable", f"the manager does not answer: {facts.silence}")
    shown = f"{active} of {facts.wanted} cache nodes are Active"
    if active >= facts.wanted:
        return fact(True, "AllActive", shown)
    if facts.rollout.outdated and active >= max(1, facts.wanted - 1):
        return fact(True, "RollingOut", f"{shown}; one changes")
    return fact(False, "CacheNodesMissing", f"{shown}{_and(facts.rollout.waits_for)}{_and(_first(facts.troubles))}")


def _progressing(facts: Facts, active: int) -> Fact:
    def fact(holds: bool, reason: str, message: str) -> Fact:
        return Fact(ConditionType.PROGRESSING, holds, reason, message)

    if facts.world.current > facts.wanted:
        return fact(True, "ScalingDown", facts.scaling.waits_for or f"to {facts.wanted} cache nodes")
    if facts.world.current < facts.wanted:
        return fact(True, "ScalingUp", f"from {facts.world.current} to {facts.wanted} cache nodes")
    if facts.rollout.outdated and facts.paused:
        return fact(False, "Paused", facts.rollout.waits_for)
    if facts.rollout.outdated:
        return fact(True, "RollingOut", f"{facts.rollout.outdated} cache nodes to go{_and(facts.rollout.waits_for)}")
    if not facts.manager_current:
        return fact(True, "RollingOut", "the manager changes")
    if active < facts.wanted:
        return fact(True, "Starting", f"{active} of {facts.wanted} cache nodes are Active")
    return fact(False, "Settled", "everything is as the spec says")


def _degraded(facts: Facts) -> Fact:
    problems = [*facts.problems, *(("PodFailing", trouble.text) for trouble in facts.troubles if trouble.hopeless)]
    if problems:
        return Fact(ConditionType.DEGRADED, True, problems[0][0], "; ".join(text for _, text in problems))
    return Fact(ConditionType.DEGRADED, False, "AsExpected", "nothing needs attention")


def _manager(facts: Facts) -> Fact:
    if facts.silence:
        return Fact(ConditionType.MANAGER_AVAILABLE, False, "Silent", facts.silence)
    return Fact(ConditionType.MANAGER_AVAILABLE, True, "Answers", "its admin API answers")


def _rdma(cluster: PolarKVCluster, facts: Facts) -> Fact:
    transport = cluster.spec.cache_nodes.transport

    def fact(holds: bool | None, reason: str, message: str) -> Fact:
        return Fact(ConditionType.RDMA_READY, holds, reason, message)

    if transport.mode is TransportMode.TCP:
        return fact(False, "NotWanted", "cacheNodes.transport.mode is TCP")
    if transport.resource_name is None:
        return fact(False, "NoDevice", "cacheNodes.transport.resourceName names no RDMA device: TCP serves")
    serving = [node.name for node in facts.world.nodes if node.state is NodeState.ACTIVE]
    if not serving:
        return fact(None, "NoCacheNodes", "no cache node is Active")
    without = [name for name in serving if not (facts.rdma or {}).get(name)]
    if without:
        return fact(False, "NotOffered", f"{', '.join(without)} offers no RDMA: see the log of its slab server")
    return fact(True, "Offered", f"{len(serving)} cache nodes offer RDMA")


def _timed(facts: Sequence[Fact], generation: int, old: Mapping[str, Any], now_s: int) -> list[Condition]:
    before = {found["type"]: found for found in old.get("conditions") or ()}
    made = []
    for fact in facts:
        status = ConditionStatus.UNKNOWN if fact.holds is None else ConditionStatus(str(fact.holds))
        same = before.get(fact.type, {})
        since = same.get("lastTransitionTime") if same.get("status") == status else None
        made.append(Condition(
            type=fact.type, status=status, reason=fact.reason, message=fact.message[:MOST_MESSAGE],
            last_transition_time=since or show_time(now_s), observed_generation=generation,
        ))  # fmt: skip
    return made


def _waiting(facts: Facts, name: str) -> str | None:
    return next((trouble.text for trouble in facts.troubles if trouble.text.startswith((f"{name} ", f"{name},"))), None)


def _first(troubles: Sequence[Trouble]) -> str:
    return troubles[0].text if troubles else ""


def _and(text: str) -> str:
    return f"; {text}" if text else ""


def _time(at_s: int | None) -> str | None:
    return None if at_s is None else show_time(at_s)


def _seconds(text: str | None) -> int | None:
    return None if text is None else read_time(text)
