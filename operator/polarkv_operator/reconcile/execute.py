"""The only place that changes anything: in the API server by server-side apply, at the managers by their admin API."""

from __future__ import annotations

import json
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable
from hashlib import sha256

from polarkv_client.errors import PolarKVError
from polarkv_operator.api.cluster import API_VERSION, KIND
from polarkv_operator.clients.kube import ApiError, Kind, Object, Unreachable, Writer, kind_of
from polarkv_operator.clients.manager import Address, Managers
from polarkv_operator.reconcile.events import EventFilter, fingerprint
from polarkv_operator.reconcile.observe import CLAIM, CLUSTER, DRAIN_ANNOTATION, POD
from polarkv_operator.reconcile.plan.children import Children, differs, project
from polarkv_operator.reconcile.plan.world import CancelDrain, DeletePod, Notice, StartDrain, Step, show_time

COMPONENT = "polarkv-operator"
MOST_REMEMBERED = 50_000
_EVENT = Kind("v1", "Event")
_log = logging.getLogger(__name__)


class NotLeading(PolarKVError):
    """Another operator acts; this one must not."""


class ChildRefused(PolarKVError):
    """A child is not taken: something in the spec makes it invalid, or a quota or a policy forbids it."""

    def __init__(self, manifest: Object, error: ApiError) -> None:
        kind, name = manifest["kind"], manifest["metadata"]["name"]
        part = {"StatefulSet": "spec.cacheNodes", "Deployment": "spec.manager"}.get(kind, "spec")
        super().__init__(f"{part}: {kind} {name} made from it is refused: {error.message}")


class Executor:
    """Does what was planned. Every method raises NotLeading, ApiError, or ManagerSilent where it asks a manager."""

    def __init__(self, api: Writer, managers: Managers, leads: Callable[[], bool], wall: Callable[[], float]) -> None:
        """``wall`` is the time in seconds since the epoch."""
        self._api, self._managers, self._leads, self._wall = api, managers, leads, wall
        self._filter = EventFilter()
        # What the API server makes of some manifests never equals them: (digest of both), so that it is not sent again.
        self._as_good_as: OrderedDict[tuple[str, str], str] = OrderedDict()

    def write(self, children: Children) -> None:
        """Apply and delete children. Raises ChildRefused, too."""
        for manifest in children.write:
            try:
                self._apply(manifest)
            except ApiError as error:
                if error.status in (400, 403, 422):
                    raise ChildRefused(manifest, error) from error
                raise
        for found in children.remove:
            self._check()
            meta = found["metadata"]
            self._api.delete(kind_of(found), meta["namespace"], meta["name"], meta["uid"])

    def differs_for_good(self, manifest: Object, found: Object) -> bool:
        """Whether applying would change something, as far as is known from the last time."""
        known = self._as_good_as.get((manifest["kind"], _place(manifest)))
        return known is None or known != _digest(manifest, project(found, manifest))

    def step(self, namespace: str, manager: Address, step: Step) -> str:
        """Take one step of a plan. Returns what the manager has against it just now; nothing: it is taken."""
        self._check()
        if isinstance(step, DeletePod):
            self._api.delete(POD, namespace, step.node, step.uid)
            return ""
        if isinstance(step, CancelDrain):
            objection = self._managers.cancel_drain(manager, step.node)
            self._note(namespace, step.node, step.uid, None)
            return objection
        assert isinstance(step, StartDrain)
        # The note comes first: a drain that nobody remembers would never be taken back.
        if not self._note(namespace, step.node, step.uid, step.drain.written()):
            return "its pod is another one by now"
        return self._managers.drain(manager, step.node, step.drain.mode)

    def grow(self, claim: Object, size: str) -> None:
        """Ask for more space on a volume."""
        self._check()
        meta = claim["metadata"]
        change = {"metadata": {"uid": meta["uid"]}, "spec": {"resources": {"requests": {"storage": size}}}}
        self._api.merge(CLAIM, meta["namespace"], meta["name"], change)

    def status(self, cluster: Object, status: Object) -> None:
        """Write the status of a cluster."""
        self._check()
        meta = cluster["metadata"]
        shown = {"name": meta["name"], "namespace": meta["namespace"], "uid": meta["uid"]}
        try:
            self._api.apply(
                {"apiVersion": CLUSTER.api_version, "kind": CLUSTER.name, "metadata": shown, "status": status}, "status"
            )
        except ApiError as error:
            if error.status not in (404, 409):  # it is gone, or another one has its name
                raise

    def say(self, cluster: Object, notices: Iterable[Notice]) -> None:
        """Write Events, those that are worth it. Nothing depends on them: a failure is logged."""
        meta = cluster["metadata"]
        for notice in notices:
            times = self._filter.admit(meta["uid"], notice, self._wall())
            if not times:
                continue
            _log.log(logging.WARNING if notice.warning else logging.INFO, "%s/%s: %s: %s",
                     meta["namespace"], meta["name"], notice.reason, notice.message)  # fmt: skip
            try:
                self._check()
                self._event(meta, notice, times)
            except ApiError as error:
                self._filter.forget(meta["uid"], notice)
                _log.warning("an Event was not written: %s", error)

    def _event(self, meta: Object, notice: Notice, times: int) -> None:
        now = show_time(self._wall())
        about = {name: meta[name] for name in ("name", "namespace", "uid", "resourceVersion") if name in meta}
        self._api.create({
            "apiVersion": _EVENT.api_version,
            "kind": _EVENT.name,
            "metadata": {
                "name": f"{meta['name']}.{fingerprint(notice)}.{int(self._wall() * 1000):x}",
                "namespace": meta["namespace"],
            },
            "involvedObject": {"apiVersion": API_VERSION, "kind": KIND, **about},
            "type": "Warning" if notice.warning else "Normal",
            "reason": notice.reason,
            "message": notice.message[:1024],
            "count": times,
            "firstTimestamp": now,
            "lastTimestamp": now,
            "source": {"component": COMPONENT},
            "reportingComponent": COMPONENT,
        })  # fmt: skip

    def _apply(self, manifest: Object) -> None:
        self._check()
        refusal: ApiError | None = None
        meta = manifest["metadata"]
        try:
            found = self._api.apply(manifest)
        except ApiError as error:
            if (
                error.status != 422
                or (there := self._api.get(kind_of(manifest), meta["namespace"], meta["name"])) is None
            ):
                raise
            refusal, found = error, there
        if (refusal or differs(manifest, found)) and self._api.adopt(found) is not None:
            refusal, found = None, self._api.apply(manifest)
        if refusal:
            raise refusal
        key = (manifest["kind"], _place(manifest))
        if differs(manifest, found):
            self._as_good_as[key] = _digest(manifest, project(found, manifest))
            while len(self._as_good_as) > MOST_REMEMBERED:
                self._as_good_as.popitem(last=False)
        else:
            self._as_good_as.pop(key, None)

    def _note(self, namespace: str, pod: str, uid: str, text: str | None) -> bool:
        """Note a drain at this very pod; return whether it is still there."""
        change = {"metadata": {"uid": uid, "annotations": {DRAIN_ANNOTATION: text}}}
        try:
            self._api.merge(POD, namespace, pod, change)
        except ApiError as error:
            if error.status not in (404, 409) or isinstance(error, Unreachable):
                raise
            return False
        return True

    def _check(self) -> None:
        if not self._leads():
            raise NotLeading("another operator leads")


def _place(manifest: Object) -> str:
    return f"{manifest['metadata']['namespace']}/{manifest['metadata']['name']}"


def _digest(*parts: object) -> str:
    return sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
