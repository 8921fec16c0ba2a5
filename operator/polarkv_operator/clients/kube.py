"""The Kubernetes API as the operator uses it: plain objects, every call with a time-out, and few retries.

The official client brings authentication, certificates and connections. Its generated models are left aside: parsing
them costs more memory and time than the operator's own work.
"""

from __future__ import annotations

import json
import logging
import os
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import quote, urlencode

import urllib3
from kubernetes import client as official
from kubernetes import config as configuration
from kubernetes.watch.watch import iter_resp_lines

from polarkv_client.errors import PolarKVError
from polarkv_operator.rbac import plural

Object: TypeAlias = dict[str, Any]
FIELD_MANAGER = "polarkv-operator"
CONNECT_S, READ_S = 3.0, 15.0
ATTEMPTS = 3
LONGEST_PAUSE_S = 5.0
PAGE = 500
_TRY_AGAIN = frozenset({429, 500, 502, 503, 504})
_METADATA = "application/json;as={kind};g=meta.k8s.io;v=v1,application/json"
_CONTROLLERS = frozenset({"kube-controller-manager", "kube-scheduler", "kubelet"})
_LEFT_ALONE = frozenset({"f:metadata", "f:status"})
_NO_SUCH_FIELD = "failed to create typed patch object"
_log = logging.getLogger(__name__)


class ApiError(PolarKVError):
    """The API server said no; ``status`` is HTTP's."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"the Kubernetes API answered {status}: {message}")
        self.status = status
        self.message = message


class Conflict(ApiError):
    """The object is not what it was when it was read, or exists already."""


class Unreachable(ApiError):
    """No answer: status 0, or one that says to come back later."""


class Kind(NamedTuple):
    """A kind of object, as manifests name it."""

    api_version: str
    name: str

    @property
    def plural(self) -> str:
        """As paths name it."""
        return plural(self.name)

    def path(self, namespace: str | None, name: str = "", *below: str) -> str:
        """Path of the collection, of one object, or of what is below it."""
        group = "api" if "/" not in self.api_version else "apis"
        place = ["", group, self.api_version, *(("namespaces", namespace) if namespace else ()), self.plural]
        return "/".join([*place, *(quote(part, safe="") for part in (name, *below) if part)])


def kind_of(manifest: Mapping[str, Any]) -> Kind:
    """The kind of a whole object."""
    return Kind(manifest["apiVersion"], manifest["kind"])


def connect(kubeconfig: str | None = None) -> official.ApiClient:
    """A client with the identity of the pod, or of a kubeconfig (None: KUBECONFIG's, or the usual place).

    Raises:
        PolarKVError: there is neither.
    """
    settings = official.Configuration()
    try:
        if kubeconfig is None:
            try:
                configuration.load_incluster_config(settings)  # type: ignore[no-untyped-call]
            except configuration.ConfigException:
                # Read now: the package reads the variable when it is imported.
                named = os.environ.get("KUBECONFIG")
                configuration.load_kube_config(named, client_configuration=settings)  # type: ignore[no-untyped-call]
        else:
            configuration.load_kube_config(kubeconfig, client_configuration=settings)  # type: ignore[no-untyped-call]
    except (configuration.ConfigException, OSError) as error:
        raise PolarKVError(f"no way to reach a Kubernetes API: {error}; run in a pod or set KUBECONFIG") from error
    settings.retries = False  # ours are bounded, and know which answers may be asked for again
    settings.connection_pool_maxsize = 32
    return official.ApiClient(settings)


class Reader:
    """What reads. Threads may share one. Every method raises ApiError, or Unreachable when nobody answers."""

    def __init__(self, client: official.ApiClient, pause: Callable[[float], object]) -> None:
        """``pause`` waits for some seconds between attempts, less when the process ends."""
        self._client = client
        self._pause = pause

    def get(self, kind: Kind, namespace: str | None, name: str) -> Object | None:
        """One object, or None."""
        try:
            return dict(self.call("GET", kind.path(namespace, name)))
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    def find(self, kind: Kind, namespace: str | None, selector: str = "") -> list[Object]:
        """Objects with certain labels, in one namespace or (None) in all."""
        found: list[Object] = []
        query = {"labelSelector": selector, "limit": str(PAGE)}
        while True:
            answer = self.call("GET", kind.path(namespace), query)
            shown = {"apiVersion": kind.api_version, "kind": kind.name}  # lists leave it out
            found += [{**shown, **item} for item in answer["items"] or []]
            following = answer["metadata"].get("continue")
            if not following:
                return found
            query["continue"] = following

    def versions(self, kind: Kind, namespace: str | None, selector: str) -> tuple[str, list[Object]]:
        """(resource version to watch from, metadata of all objects with certain labels)."""
        headers = {"Accept": _METADATA.format(kind="PartialObjectMetadataList")}
        # Resource version 0: what the API server has in memory will do, the watch follows from there.
        query = {"labelSelector": selector, "resourceVersion": "0"}
        answer = self.call("GET", kind.path(namespace), query, headers=headers)
        return answer["metadata"]["resourceVersion"], answer["items"] or []

    def watch(self, kind: Kind, namespace: str | None, selector: str, version: str, seconds: int) -> Iterator[Object]:
        """Events of objects with certain labels, with their metadata only, for some seconds."""
        headers = {"Accept": _METADATA.format(kind="PartialObjectMetadata")}
        query = {
            "watch": "1", "labelSelector": selector, "resourceVersion": version, "timeoutSeconds": str(seconds),
            "allowWatchBookmarks": "true",
        }  # fmt: skip
        answer = self._send("GET", kind.path(namespace), query, None, headers, (CONNECT_S, seconds + READ_S))
        try:
            _check(answer)
            for line in iter_resp_lines(answer.response):  # type: ignore[no-untyped-call]
                if line:
                    yield json.loads(line)
        except (urllib3.exceptions.HTTPError, OSError, ValueError) as error:
            raise Unreachable(0, f"a watch broke off: {error}") from error
        finally:
            _let_go(answer)

    def call(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: object = None,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        """One request, tried again as often as that can help and is harmless. Returns the answer's object."""
        for attempt in range(1, ATTEMPTS + 1):
            answer = None
            try:
                answer = self._send(method, path, query or {}, body, headers or {}, (CONNECT_S, READ_S))
                data = answer.read()
                _check(answer)
                return json.loads(data) if data else None
            except (urllib3.exceptions.HTTPError, OSError, ValueError) as error:
                failure: ApiError = Unreachable(0, f"{type(error).__name__}: {error}")
                _let_go(answer)  # it was not read to its end
                again = method != "POST" or isinstance(error, urllib3.exceptions.NewConnectionError)
            except ApiError as error:
                failure = error
                again = error.status in _TRY_AGAIN and (method != "POST" or error.status == 429)
            if not again or attempt == ATTEMPTS:
                raise failure
            _log.debug("%s %s: attempt %d: %s", method, path, attempt, failure)
            self._pause(_pause_s(answer, attempt))
        raise AssertionError("the loop returns or raises")

    def _send(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        body: object,
        headers: Mapping[str, str],
        timeout: tuple[float, float],
    ) -> Any:
        sent = {"Accept": "application/json", "Content-Type": "application/json", **headers}
        resource = f"{path}?{urlencode(query)}" if query else path
        method, url, sent, _, _ = self._client.param_serialize(
            method, resource, header_params=sent, auth_settings=["BearerToken"]
        )
        return self._client.call_api(method, url, sent, body, _request_timeout=timeout)


class Writer(Reader):
    """What also writes: only the executor and the leader's election have one."""

    def apply(self, manifest: Object, *below: str) -> Object:
        """Server-side apply of what the operator owns of an object (or, below it, of its status)."""
        meta = manifest["metadata"]
        path = kind_of(manifest).path(meta.get("namespace"), meta["name"], *below)
        query = {"fieldManager": FIELD_MANAGER, "force": "true"}
        headers = {"Content-Type": "application/apply-patch+yaml"}
        return dict(self.call("PATCH", path, query, manifest, headers))

    def merge(self, kind: Kind, namespace: str, name: str, change: Object) -> Object:
        """JSON merge patch; with a resourceVersion or uid in it, only if it is still that."""
        headers = {"Content-Type": "application/merge-patch+json"}
        query = {"fieldManager": FIELD_MANAGER}
        return dict(self.call("PATCH", kind.path(namespace, name), query, change, headers))

    def adopt(self, found: Object) -> Object | None:
        """Make fields that people wrote over ours our own, so that the next apply removes what it does not name.

        Where lists are merged by key, an apply alone leaves what others added, or fails because of it. What controllers
        and labels' and annotations' authors wrote stays theirs. Returns the object; None: there is nothing to adopt.
        """
        entries = taken_over(found["metadata"].get("managedFields") or [])
        if entries is None:
            return None
        meta = found["metadata"]
        change = [
            {"op": "test", "path": "/metadata/resourceVersion", "value": meta["resourceVersion"]},
            {"op": "replace", "path": "/metadata/managedFields", "value": entries},
        ]
        headers = {"Content-Type": "application/json-patch+json"}
        path = kind_of(found).path(meta.get("namespace"), meta["name"])
        return dict(self.call("PATCH", path, {"fieldManager": FIELD_MANAGER}, change, headers))

    def create(self, manifest: Object) -> Object:
        """Raises Conflict when it exists."""
        path = kind_of(manifest).path(manifest["metadata"].get("namespace"))
        return dict(self.call("POST", path, {"fieldManager": FIELD_MANAGER}, manifest))

    def replace(self, manifest: Object) -> Object:
        """Raises Conflict when it is not what it was."""
        meta = manifest["metadata"]
        path = kind_of(manifest).path(meta.get("namespace"), meta["name"])
        return dict(self.call("PUT", path, {"fieldManager": FIELD_MANAGER}, manifest))

    def delete(self, kind: Kind, namespace: str, name: str, uid: str) -> None:
        """Delete this very object; nothing happens when it is gone or another one has its name."""
        options = {"preconditions": {"uid": uid}, "propagationPolicy": "Background"}
        try:
            self.call("DELETE", kind.path(namespace, name), body=options)
        except ApiError as error:
            if error.status not in (404, 409):
                raise


def taken_over(entries: list[Object]) -> list[Object] | None:
    """Field owners with what others wrote moved to our own entry; None: nobody did, or we have none."""
    mine = next((e for e in entries if e["manager"] == FIELD_MANAGER and e["operation"] == "Apply"), None)
    others = [
        e
        for e in entries
        if e["operation"] == "Update" and not e.get("subresource") and e["manager"] not in _CONTROLLERS
        and e["fieldsV1"].keys() - _LEFT_ALONE
    ]  # fmt: skip
    if mine is None or not others:
        return None
    fields = mine["fieldsV1"]
    kept = []
    for entry in entries:
        if entry not in others:
            kept.append(entry)
            continue
        fields = _union(fields, {name: below for name, below in entry["fieldsV1"].items() if name not in _LEFT_ALONE})
        left = {name: below for name, below in entry["fieldsV1"].items() if name in _LEFT_ALONE}
        if left:
            kept.append({**entry, "fieldsV1": left})
    return [{**entry, "fieldsV1": fields} if entry is mine else entry for entry in kept]


def _union(one: Object, other: Object) -> Object:
    result = dict(one)
    for name, below in other.items():
        result[name] = _union(result[name], below) if name in result else below
    return result


def _check(answer: Any) -> None:
    if 200 <= answer.status < 300:
        return
    try:
        message = str(json.loads(answer.read())["message"])
    except (ValueError, KeyError, TypeError):
        message = str(answer.reason)
    if answer.status == 409:
        raise Conflict(409, message)
    if answer.status == 500 and message.startswith(_NO_SUCH_FIELD):
        raise ApiError(422, message)  # server-side apply says so of a field that does not exist
    if answer.status in _TRY_AGAIN:
        raise Unreachable(answer.status, message)
    raise ApiError(answer.status, message)


def _let_go(answer: Any) -> None:
    """Close the connection of an answer, if there is one."""
    if answer is not None:
        answer.response.close()
        answer.response.release_conn()


def _pause_s(answer: Any, attempt: int) -> float:
    """What the server asks for, within reason; else 0.2 s, doubled each time, with chance: not all at once."""
    asked = answer.headers.get("Retry-After") if answer is not None else None
    if asked and str(asked).isdigit():
        return min(LONGEST_PAUSE_S, float(asked))
    return float(0.1 * 2**attempt * random.uniform(0.5, 1.5))
