"""An AdmissionReview in, an AdmissionReview out. The answer always allows the pod."""

from __future__ import annotations

import base64
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from polarkv_operator.webhooks import pods
from polarkv_operator.webhooks.clusters import Target
from polarkv_operator.webhooks.injection import Decision, Skipped, inject, requested_cluster, skip

API_VERSION = "admission.k8s.io/v1"
# Longer ones are cut by the API server.
WARNING_CHARACTERS = 250
Find = Callable[[str, str], Awaitable[Target]]


@dataclass(frozen=True)
class Request:
    """What of an AdmissionReview counts."""

    uid: str
    namespace: str
    pod: Mapping[str, Any]
    is_creation_of_a_pod: bool
    is_dry_run: bool


def read(document: object) -> Request:
    """Read an AdmissionReview.

    Raises:
        ValueError: it is none; names the field.
    """
    request = document.get("request") if isinstance(document, dict) else None
    if not isinstance(document, dict) or document.get("apiVersion") != API_VERSION or not isinstance(request, dict):
        raise ValueError(f"apiVersion, request: send an AdmissionReview of {API_VERSION}")
    uid = request.get("uid")
    if not isinstance(uid, str) or not uid:
        raise ValueError(f"request.uid={uid!r}: it must be text")
    kind = request.get("kind")
    is_pod = isinstance(kind, dict) and kind.get("group") == "" and kind.get("kind") == "Pod"
    is_creation = request.get("operation") == "CREATE" and not request.get("subResource")
    pod, namespace = request.get("object"), request.get("namespace")
    return Request(
        uid,
        namespace if isinstance(namespace, str) else "",
        pod if isinstance(pod, dict) else {},
        is_pod and is_creation,
        request.get("dryRun") is True,
    )


async def decide(request: Request, find: Find) -> Decision | None:
    """What becomes of the pod; None: it is none of ours."""
    if not request.is_creation_of_a_pod:
        return None
    metadata = pods.read_metadata(request.pod)
    name = requested_cluster(metadata) if metadata is not None else ""
    if not name:
        return None
    try:
        target = await find(request.namespace, name)
    except Skipped as skipped:
        return skip(request.pod, skipped.reason, str(skipped))
    return inject(request.pod, target.connection, target.settings)


def answer(uid: str, decision: Decision | None = None) -> dict[str, Any]:
    """The AdmissionReview that says so."""
    response: dict[str, Any] = {"uid": uid, "allowed": True}
    if decision is not None:
        response["auditAnnotations"] = {"injection": decision.status}
        if decision.patch:
            response["patchType"] = "JSONPatch"
            response["patch"] = base64.b64encode(json.dumps(list(decision.patch)).encode()).decode()
        if decision.warnings:
            response["warnings"] = [warning[:WARNING_CHARACTERS] for warning in decision.warnings]
    return {"apiVersion": API_VERSION, "kind": "AdmissionReview", "response": response}
