"""What the builders share: an object's frame, pods without rights, probes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import ROUND_CEILING, Decimal
from typing import Any, TypeAlias

from polarkv_operator.api.cluster import API_VERSION, KIND, PolarKVCluster
from polarkv_operator.api.parts import PodTemplate, Resources
from polarkv_operator.api.quantity import Quantity
from polarkv_operator.resources import names
from polarkv_operator.resources.names import Component
from polarkv_operator.resources.overlay import overlay

Object: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class Release:
    """What the builders know besides the cluster: the operator's own release, and what is installed beside it.

    ``operator_namespace`` is where the operator runs: its pods always reach the admin API.
    """

    image: str
    operator_namespace: str = "polarkv-system"
    has_pod_monitors: bool = False


@dataclass(frozen=True)
class SecretDigests:
    """Short digests of the secrets that pods start with: all that they tell is that one changed."""

    cluster: str = ""
    tokens: str = ""


@dataclass(frozen=True)
class Pod:
    """The parts of a pod that differ between components."""

    containers: list[Object]
    volumes: list[Object]
    service_account: str
    grace_seconds: int
    init_containers: list[Object] = field(default_factory=list)
    affinity: Object | None = None


def build(
    cluster: PolarKVCluster,
    api_version: str,
    kind: str,
    name: str,
    component: Component | None = None,
    annotations: Mapping[str, str] | None = None,
    **content: Any,
) -> Object:
    """An object that belongs to the cluster and goes with it."""
    metadata: Object = {"name": name, "namespace": cluster.namespace, "labels": names.labels(cluster, component)}
    if annotations:
        metadata["annotations"] = dict(annotations)
    if cluster.metadata.uid:
        owner = {"apiVersion": API_VERSION, "kind": KIND, "name": cluster.name, "uid": cluster.metadata.uid}
        metadata["ownerReferences"] = [{**owner, "controller": True, "blockOwnerDeletion": True}]
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata, **content}


def image(cluster: PolarKVCluster, release: Release) -> str:
    """Image of manager and cache nodes."""
    return cluster.spec.image or release.image


def pod_template(
    cluster: PolarKVCluster,
    component: Component,
    pod: Pod,
    annotations: Mapping[str, str],
    over: PodTemplate,
    field: str,
) -> Object:
    """A pod template: no rights, no token, the user's ``podTemplate`` (at ``field``) laid over it.

    Raises:
        SpecInvalid: it does not fit over the operator's.
    """
    spec: Object = {
        "serviceAccountName": pod.service_account,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": pod.grace_seconds,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": names.USER_ID,
            "runAsGroup": names.USER_ID,
            "fsGroup": names.USER_ID,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": pod.containers,
        "volumes": pod.volumes,
    }
    if pod.init_containers:
        spec["initContainers"] = pod.init_containers
    if pod.affinity is not None:
        spec["affinity"] = pod.affinity
    if cluster.spec.image_pull_secrets:
        spec["imagePullSecrets"] = [{"name": secret.name} for secret in cluster.spec.image_pull_secrets]
    return {
        "metadata": {
            "labels": {**over.metadata.labels, **names.labels(cluster, component)},
            "annotations": {**over.metadata.annotations, **annotations},
        },
        "spec": overlay(spec, over.spec, f"{field}.spec"),
    }


def container(cluster: PolarKVCluster, release: Release, name: str, command: list[str], **content: Any) -> Object:
    """A container of our image, without rights and with a read-only root file system."""
    return {
        "name": name,
        "image": image(cluster, release),
        "imagePullPolicy": cluster.spec.image_pull_policy.value,
        "command": command,
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "privileged": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        **content,
    }


def from_field(name: str, path: str) -> Object:
    """An environment variable that holds a field of the pod."""
    return {"name": name, "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": path}}}


def probe(path: str, port: str, period_seconds: int, failures: int) -> Object:
    """A probe by HTTP, with every field as the API server would fill it in."""
    return {
        "httpGet": {"path": path, "port": port, "scheme": "HTTP"},
        "periodSeconds": period_seconds,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
        "successThreshold": 1,
    }


def resources(given: Resources, defaults: Mapping[str, int | str], extra: Mapping[str, int] | None = None) -> Object:
    """Requests and limits of a container.

    Memory is promised in full: what is not given is ``defaults``, and limit equals request. ``extra`` is added to both.
    """
    extra = extra or {}
    requests = {name: str(amount) for name, amount in given.requests.items()}
    limits = {name: str(amount) for name, amount in given.limits.items()}
    for name, amount in defaults.items():
        requests.setdefault(name, limits.get(name, str(amount)))
    limits.setdefault("memory", requests["memory"])
    for name, amount in extra.items():
        for group in (requests, limits):
            group[name] = str(int(Quantity.parse(group.get(name, 0)).value.to_integral_value(ROUND_CEILING)) + amount)
    return {"requests": requests, "limits": limits}


def digest(*parts: object) -> str:
    """A short digest of plain data, the same in every process."""
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def share(size_bytes: int, percent: int) -> int:
    """A percentage of a size, in whole bytes."""
    return int(Decimal(size_bytes) * percent / 100)


def other_class(field: str, wanted: str | None, shown: str, claim: Mapping[str, Any], way_out: str) -> str:
    """That a claim (its spec) is of another storage class than a field asks for, in a sentence; empty: it is not."""
    found = claim.get("storageClassName")
    return "" if wanted in (None, found) else f"{field} is {wanted}, but {shown} is of {found}: {way_out}"


def larger_volume(field: str, wanted: Quantity, shown: str, claim: Mapping[str, Any], way_out: str) -> str:
    """As :func:`other_class`, that it is larger."""
    found = Quantity.parse(claim["resources"]["requests"]["storage"])
    if found.value <= wanted.value:
        return ""
    return f"{field} is {wanted}, but {shown} has {found}, and volumes only grow: {way_out}"
