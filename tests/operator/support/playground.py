"""One namespace in which an operator, controllers and a manager play together, and what tests ask of it."""

from __future__ import annotations

import base64
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from polarkv_operator.clients.kube import Kind, Object, Writer
from polarkv_operator.reconcile.observe import CLUSTER, POD, SECRET, STATEFUL_SET, child_kinds
from polarkv_operator.reconcile.operator import Operator
from polarkv_operator.reconcile.watcher import Watcher
from polarkv_operator.resources.monitoring import POD_MONITOR_API
from polarkv_operator.resources.names import CLUSTER_LABEL, SECRETS_GENERATION_ANNOTATION
from polarkv_operator.settings import OperatorSettings
from tests.operator.support import clusters
from tests.operator.support.controllers import Controllers
from tests.support.managers import ADMIN_TOKEN, Running
from tests.support.waiting import wait_until

IMAGE = "polarkv:1"
EVENT = Kind("v1", "Event")
NOBODY = "http://127.0.0.1:9"


@dataclass
class Playground:
    """A namespace. What is started here ends with it."""

    kubeconfig: Path
    namespace: str
    api: Writer
    manager: Running | None
    stack: ExitStack
    operators: list[Operator] = field(default_factory=list)

    def operate(self, **settings: Any) -> Operator:
        """Start an operator that looks after this namespace."""
        values = {
            "image": IMAGE, "namespace": self.namespace, "watch_namespace": self.namespace,
            "identity": f"operator-{len(self.operators)}", "health_port": 0,
        }  # fmt: skip
        address = self.manager.http if self.manager else NOBODY
        made = Operator(OperatorSettings(**{**values, **settings}), lambda _: address, str(self.kubeconfig))
        self.operators.append(made)
        made.start()
        self.stack.callback(made.stop)
        # What kopf does in the process of its own.
        stop = threading.Event()
        self.stack.callback(stop.set)
        Watcher(self.api, CLUSTER, self.namespace, made.changed, stop).start()
        return made

    def control(self) -> Controllers:
        """Start controllers."""
        made = Controllers(self.api, self.namespace, self.manager)
        made.start()
        self.stack.callback(made.stop)
        return made

    def cluster(self, name: str = "demo", **spec: Any) -> Object:
        """Make a cluster; ``spec`` is laid over the smallest one's. Its admin token is the manager's."""
        body = clusters.body()
        body["metadata"] = {"name": name, "namespace": self.namespace}
        body["spec"] = merged(body["spec"], spec)
        if self.manager is not None:
            self._share_token(name)
        return self.api.create(body)

    def change(self, name: str = "demo", **spec: Any) -> None:
        """Change fields of a cluster's spec."""
        self.edit(CLUSTER, name, {"spec": spec})

    def edit(self, kind: Kind, name: str, change: Object) -> None:
        """Change an object as a person does."""
        headers = {"Content-Type": "application/merge-patch+json"}
        self.api.call("PATCH", kind.path(self.namespace, name), {"fieldManager": "kubectl-edit"}, change, headers)

    def get(self, name: str = "demo") -> Object:
        found = self.api.get(CLUSTER, self.namespace, name)
        assert found is not None
        return found

    def condition(self, kind: str, name: str = "demo") -> Object:
        """One condition; empty while there is none."""
        found = self.get(name).get("status", {}).get("conditions", [])
        return next((dict(each) for each in found if each["type"] == kind), {})

    def wait_condition(
        self, kind: str, status: str, reason: str = "", name: str = "demo", text: str = "", timeout_s: float = 60
    ) -> Object:
        """Wait for a condition of the present spec whose message contains ``text``."""

        def probe() -> Object | None:
            found = self.condition(kind, name)
            right = found.get("status") == status and reason in ("", found.get("reason"))
            right = right and text in found.get("message", "")
            current = found.get("observedGeneration") == self.get(name)["metadata"]["generation"]
            return found if right and current else None

        try:
            return wait_until(probe, f"{kind}={status} {reason} {text}", timeout_s, 0.05)
        except TimeoutError as error:
            raise TimeoutError(f"{error}; status: {self.get(name).get('status')}") from None

    def wait_settled(self, name: str = "demo", timeout_s: float = 60) -> None:
        """Wait until everything is as the spec says."""
        self.wait_condition("Progressing", "False", "Settled", name, timeout_s=timeout_s)
        self.wait_condition("Ready", "True", "", name)

    def stateful_set(self, name: str = "demo") -> Object | None:
        return self.api.get(STATEFUL_SET, self.namespace, f"{name}-cache")

    def replicas(self, name: str = "demo") -> int:
        found = self.stateful_set(name)
        return int(found["spec"]["replicas"]) if found else -1

    def pods(self) -> dict[str, Object]:
        return {pod["metadata"]["name"]: pod for pod in self.api.find(POD, self.namespace)}

    def children(self, name: str = "demo") -> dict[tuple[str, str], Object]:
        """Everything that the operator made for a cluster."""
        kinds = [kind for kind in child_kinds() if kind.api_version != POD_MONITOR_API]
        found = [each for kind in kinds for each in self.api.find(kind, self.namespace, f"{CLUSTER_LABEL}={name}")]
        return {(each["kind"], each["metadata"]["name"]): each for each in found}

    def versions(self, name: str = "demo") -> dict[tuple[str, str], str]:
        """Resource versions of a cluster and all its children."""
        found = {key: each["metadata"]["resourceVersion"] for key, each in self.children(name).items()}
        return {**found, ("PolarKVCluster", name): self.get(name)["metadata"]["resourceVersion"]}

    def events(self) -> list[tuple[str, str]]:
        """(reason, message) of every Event, oldest first."""
        found = sorted(self.api.find(EVENT, self.namespace), key=lambda each: int(each["metadata"]["resourceVersion"]))
        return [(each["reason"], each["message"]) for each in found]

    def wait_event(self, reason: str, text: str = "", timeout_s: float = 60) -> str:
        """Wait for an Event; return its message. The turn that says it writes the status only afterwards."""

        def probe() -> str | None:
            return next((message for why, message in self.events() if why == reason and text in message), None)

        return wait_until(probe, f"Event {reason}", timeout_s, 0.1)

    def _share_token(self, name: str) -> None:
        token = base64.b64encode(ADMIN_TOKEN.encode()).decode()
        self.api.create({
            "apiVersion": "v1", "kind": SECRET.name, "type": "Opaque", "data": {"token": token},
            "metadata": {
                "name": f"{name}-admin", "namespace": self.namespace, "labels": {CLUSTER_LABEL: name},
                "annotations": {SECRETS_GENERATION_ANNOTATION: "1"},
            },
        })  # fmt: skip


def merged(base: Any, over: Any) -> Any:
    """Objects laid over each other."""
    if not isinstance(base, dict) or not isinstance(over, dict):
        return over
    return {**base, **{name: merged(base.get(name), value) for name, value in over.items()}}


def eventually(probe: Callable[[], object], what: str, timeout_s: float = 40) -> None:
    """Wait until ``probe`` is true."""
    wait_until(lambda: probe() or None, what, timeout_s, 0.05)
