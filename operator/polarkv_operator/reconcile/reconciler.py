"""One turn for one cluster: observe, plan, execute, status. All is looked at anew each time; nothing waits inside."""

from __future__ import annotations

import logging
import secrets as randomness
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from polarkv_client.states import NodeState
from polarkv_operator.api import SpecInvalid, parse
from polarkv_operator.api.autoscaling import AutoscalingSpec, ScalingDown, ScalingUp
from polarkv_operator.api.cluster import PolarKVCluster
from polarkv_operator.api.quantity import Quantity
from polarkv_operator.api.spec import MetadataStoreType
from polarkv_operator.clients.kube import ApiError, Object, Reader, Unreachable
from polarkv_operator.clients.manager import ManagerSilent
from polarkv_operator.reconcile import autoscale
from polarkv_operator.reconcile.execute import ChildRefused, Executor
from polarkv_operator.reconcile.observe import (
    CLAIM,
    CLUSTER,
    DEPLOYMENT,
    SECRET,
    STATEFUL_SET,
    Observed,
    Observer,
    make_world,
)
from polarkv_operator.reconcile.plan.children import Children, Key, key_of, plan_children
from polarkv_operator.reconcile.plan.rollout import RolloutRules, plan_rollout
from polarkv_operator.reconcile.plan.scale import plan_scaling
from polarkv_operator.reconcile.plan.trouble import Trouble, find_trouble
from polarkv_operator.reconcile.plan.world import Notice, World
from polarkv_operator.reconcile.status import Facts, make_status, read_memory, refused_status
from polarkv_operator.resources import cache_nodes, manager, names, render, secrets
from polarkv_operator.resources.common import Release, image

SOON_S, LATER_S, STEADY_S, SAMPLE_S = 2.0, 10.0, 30.0, 5.0
_TOKEN_BYTES = 32
_log = logging.getLogger(__name__)


@dataclass
class Rates:
    """What is remembered of one cluster's bandwidth; lost with the operator, and measured again within two samples."""

    sample: autoscale.Sample | None = None
    rate: float | None = None
    at_s: float = float("-inf")


@dataclass
class Reconciler:
    """Turns for clusters; threads may share one, as long as a cluster is in one hand at a time.

    ``clock`` is monotonic, ``wall`` counts seconds since the epoch.
    """

    api: Reader
    observer: Observer
    executor: Executor
    release: Release
    clock: Callable[[], float]
    wall: Callable[[], float]
    rates: dict[str, Rates] = field(default_factory=dict)
    # Secrets that could not be written because their names are taken: made anew each turn, they would restart pods.
    withheld: dict[str, dict[str, Object]] = field(default_factory=dict)

    def turn(self, key: str) -> float | None:
        """Bring one cluster (``namespace/name``) a step nearer to its spec.

        Returns after how many seconds it wants to be looked at again; None: it is gone.

        Raises:
            ApiError, NotLeading: it could not be done; it is to be tried again later.
        """
        namespace, _, name = key.partition("/")
        body = self.api.get(CLUSTER, namespace, name)
        if body is None or body["metadata"].get("deletionTimestamp"):
            # Nothing to do: its children are its own, and go with it whether the operator is there or not.
            self.rates.pop(key, None)
            self.withheld.pop(key, None)
            return None
        try:
            return self._turn(key, body, parse(body))
        except (SpecInvalid, ChildRefused) as error:
            self.executor.say(body, [Notice("SpecInvalid", str(error), warning=True)])
            old = body.get("status") or {}
            self._put_status(body, refused_status(str(error), body["metadata"]["generation"], old, int(self.wall())))
            return STEADY_S

    def _turn(self, key: str, body: Object, cluster: PolarKVCluster) -> float:
        release = replace(self.release, has_pod_monitors=self.observer.pod_monitors_exist(cluster.namespace))
        observed = self.observer.observe(cluster, release.has_pod_monitors)
        old: Mapping[str, Any] = body.get("status") or {}
        now_s = int(self.wall())
        world = make_world(cluster, observed, now_s)
        rate = self._rate(key, observed, cluster)
        wanted, decision = self._wanted(cluster, observed, world, old, rate, now_s)
        scaling = plan_scaling(world, wanted, cluster.spec.scale_down.drain_timeout_seconds)
        existing = {**self.withheld.get(key, {}), **_secrets(observed)}
        contents = secrets.complete(cluster, existing, lambda: randomness.token_urlsafe(_TOKEN_BYTES))
        desired = render.children(cluster, release, contents, scaling.replicas)
        children = self._children(body, cluster, observed, desired)
        taken = {name for kind, name in children.taken if kind == SECRET.name}
        self.withheld[key] = {
            name: each
            for each in desired
            if each["kind"] == SECRET.name and (name := each["metadata"]["name"]) in taken
        }
        self.executor.write(children)
        current = _manager_is_current(cluster, observed, children)
        if any(manifest["kind"] == STATEFUL_SET.name for manifest in children.write):
            world = replace(world, revision_known=False)
        rules = cluster.spec.rollout
        rollout = plan_rollout(
            replace(world, manager_answers=world.manager_answers and current),
            wanted,
            RolloutRules(rules.paused, rules.drain_mode, rules.drain_timeout_seconds),
        )
        problems, notices = self._problems(cluster, observed, children)
        notices += [*scaling.notices, *rollout.notices, *_decided(decision)]
        problems += self._steps(cluster, observed, [*scaling.steps, *rollout.steps])
        notices += [Notice(reason, text, warning=True) for reason, text in problems]
        self.executor.say(body, notices)
        facts = Facts(
            wanted, world, scaling, rollout, image(cluster, release), observed.silence, current, tuple(problems),
            tuple(_troubles(cluster, observed, wanted, now_s)), _rdma(observed), rules.paused, rate, decision,
        )  # fmt: skip
        self._put_status(body, make_status(cluster, facts, old, now_s))
        return _again_s(facts, cluster)

    def _wanted(
        self, cluster: PolarKVCluster, observed: Observed, world: World, old: Mapping[str, Any],
        rate: float | None, now_s: int,
    ) -> tuple[int, autoscale.Decision | None]:  # fmt: skip
        """How many cache nodes there should be: what autoscaling decides, or what the spec (a person, an HPA) says."""
        spec = cluster.spec.autoscaling
        if spec is None:
            return cluster.spec.cache_nodes.replicas, None
        present = world.current if observed.child(STATEFUL_SET, names.cache(cluster)) else None
        memory = read_memory(old, cluster.spec.cache_nodes.replicas if present is None else present)
        active = sum(1 for node in world.nodes if node.state is NodeState.ACTIVE)
        decision = autoscale.decide(policy_of(spec), memory, rate, active, now_s)
        return decision.replicas, decision

    def _rate(self, key: str, observed: Observed, cluster: PolarKVCluster) -> float | None:
        """Bytes per second served, from what the manager counts; None: not known."""
        rates = self.rates.setdefault(key, Rates())
        spec = cluster.spec.autoscaling
        timeout_s = spec.behavior.metrics_timeout_seconds if spec else 4 * STEADY_S
        now_s = self.clock()
        if observed.manager is not None and (rates.sample is None or now_s - rates.sample.at_s >= SAMPLE_S):
            counted = {
                autoscale.Counter(observed.manager.epoch, node.name): node.read_bytes
                for node in observed.manager.nodes
                if node.read_bytes is not None
            }
            sample = autoscale.Sample(now_s, counted)
            rates.rate = autoscale.rate_bytes_per_s(rates.sample, sample, timeout_s)
            rates.sample, rates.at_s = sample, now_s
        return rates.rate if now_s - rates.at_s <= timeout_s else None

    def _children(self, body: Object, cluster: PolarKVCluster, observed: Observed, desired: list[Object]) -> Children:
        known: dict[Key, Object] = dict(observed.children)
        for manifest in desired:
            if key_of(manifest) not in known and (found := self.observer.unlabelled(manifest)) is not None:
                known[key_of(manifest)] = found
        planned = plan_children(desired, known, body["metadata"]["uid"], names.CLUSTER_LABEL)
        write = [
            manifest
            for manifest in planned.write
            if (found := known.get(key_of(manifest))) is None or self.executor.differs_for_good(manifest, found)
        ]
        return replace(planned, write=tuple(write))

    def _problems(
        self, cluster: PolarKVCluster, observed: Observed, children: Children
    ) -> tuple[list[tuple[str, str]], list[Notice]]:
        """What needs somebody, and what was done about volumes."""
        problems = [
            ("NameTaken", f"{kind} {name} is there and is not this cluster's: delete it, or rename the cluster")
            for kind, name in children.taken
        ]
        notices = self._metadata_volume(cluster, observed, problems)
        live = observed.child(STATEFUL_SET, names.cache(cluster))
        differences = cache_nodes.differences_in_volumes(cluster, live) if live is not None else []
        if differences:
            return problems + [("VolumesDiffer", text) for text in differences], notices
        wanted = cluster.spec.cache_nodes.storage.volume_size
        for at, claim in ((at, claim) for at, claims in observed.claims.items() for claim in claims):
            if text := cache_nodes.difference_in_claim(cluster, claim):
                problems += [("VolumesDiffer", text)] if at in observed.pods else []
                continue
            notices += self._grow(claim, wanted, problems)
        return problems, notices

    def _metadata_volume(
        self, cluster: PolarKVCluster, observed: Observed, problems: list[tuple[str, str]]
    ) -> list[Notice]:
        """What is done about the metadata store's volume; what cannot be done is added to ``problems``."""
        store = cluster.spec.manager.metadata_store
        claim = observed.child(CLAIM, names.metadata_volume(cluster))
        if claim is None or store.type is not MetadataStoreType.SQLITE:
            return []
        if text := manager.difference_in_metadata_volume(cluster, claim):
            problems.append(("VolumesDiffer", text))
            return []
        return self._grow(claim, store.volume_size, problems)

    def _grow(self, claim: Object, wanted: Quantity, problems: list[tuple[str, str]]) -> list[Notice]:
        """Have a volume grow that is there and smaller than wanted; who refuses it is added to ``problems``."""
        name, asked = claim["metadata"]["name"], Quantity.parse(claim["spec"]["resources"]["requests"]["storage"])
        if asked.value >= wanted.value or claim.get("status", {}).get("phase") != "Bound":
            return []
        try:
            self.executor.grow(claim, str(wanted))
        except Unreachable:
            raise
        except ApiError as error:
            problems.append(("VolumeCannotGrow", f"{name} stays at {asked}: {error.message}"))
            return []
        return [Notice("GrowingVolume", f"{name} grows from {asked} to {wanted}")]

    def _steps(self, cluster: PolarKVCluster, observed: Observed, steps: list[Any]) -> list[tuple[str, str]]:
        """Take the steps of the plans; returns what came in between. What is left is planned again."""
        if not steps:
            return []
        address = self.observer.address(cluster, observed.children)
        assert address is not None, "without a token no manager answers, and nothing is planned"
        for step in steps:
            try:
                objection = self.executor.step(cluster.namespace, address, step)
            except ManagerSilent as error:
                _log.info("%s/%s: %s", cluster.namespace, cluster.name, error)
                return []
            if objection:
                _log.info("%s/%s: %s: %s", cluster.namespace, cluster.name, step, objection)
        return []

    def _put_status(self, body: Object, status: Object) -> None:
        if status != (body.get("status") or {}):
            self.executor.status(body, status)


def policy_of(spec: AutoscalingSpec) -> autoscale.Policy:
    """The decision's terms from the spec's."""

    def pace(side: ScalingUp | ScalingDown) -> autoscale.Pace:
        return autoscale.Pace(side.stabilization_window_seconds, side.max_nodes, side.period_seconds)

    behavior = spec.behavior
    return autoscale.Policy(
        spec.min_replicas,
        spec.max_replicas,
        spec.target_bandwidth.per_node_bytes_per_second,
        pace(behavior.scale_up),
        pace(behavior.scale_down),
        behavior.tolerance_percent / 100,
        behavior.metrics_timeout_seconds,
    )


def _secrets(observed: Observed) -> dict[str, Object]:
    return {name: found for (kind, name), found in observed.children.items() if kind == SECRET.name}


def _manager_is_current(cluster: PolarKVCluster, observed: Observed, children: Children) -> bool:
    """Whether the manager runs what the spec says. It goes first: cache nodes come back to the one that stays."""
    found = observed.child(DEPLOYMENT, names.manager(cluster))
    if found is None or any(manifest["kind"] == DEPLOYMENT.name for manifest in children.write):
        return False
    status = found.get("status") or {}
    seen = status.get("observedGeneration") == found["metadata"]["generation"]
    return bool(seen and status.get("updatedReplicas", 0) >= cluster.spec.manager.replicas)


def _troubles(cluster: PolarKVCluster, observed: Observed, wanted: int, now_s: int) -> list[Trouble]:
    """What is wrong with pods; what has taken too long is hopeless as well."""
    timeout_s = cluster.spec.rollout.ready_timeout_seconds
    pods = [(pod, observed.claims.get(at, [])) for at, pod in sorted(observed.pods.items()) if at < wanted]
    pods += [(pod, []) for pod in observed.manager_pods]
    found = [find_trouble(pod, claims) for pod, claims in pods if "deletionTimestamp" not in pod["metadata"]]
    return [replace_hopeless(trouble, now_s - trouble.since_s >= timeout_s) for trouble in found if trouble is not None]


def replace_hopeless(trouble: Trouble, overdue: bool) -> Trouble:
    """What has taken too long needs somebody, whatever it is."""
    return trouble._replace(hopeless=True) if overdue else trouble


def _rdma(observed: Observed) -> dict[str, str]:
    return {node.name: node.rdma or "" for node in observed.manager.nodes} if observed.manager else {}


def _decided(decision: autoscale.Decision | None) -> list[Notice]:
    if decision is None or decision.reason in ("AsNeeded", "MetricsMissing"):
        return []
    return [Notice(decision.reason, decision.message)]


def _again_s(facts: Facts, cluster: PolarKVCluster) -> float:
    """Pods and controllers are watched. Drains and inventories are not: only the manager knows of them."""
    if not facts.silence and (facts.world.current != facts.wanted or (facts.rollout.outdated and not facts.paused)):
        return SOON_S
    waits = facts.silence or sum(1 for node in facts.world.nodes if node.serving) < facts.wanted
    return LATER_S if waits or cluster.spec.autoscaling else STEADY_S
