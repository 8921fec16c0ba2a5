"""A webhook server in a thread of its own, with a Kubernetes API that a test holds in its hand."""

from __future__ import annotations

import asyncio
import base64
import copy
import itertools
import json
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import httpx
import jsonpatch

from polarkv_operator.clients.kube import Conflict, Kind, Object, kind_of
from polarkv_operator.webhooks.kube_api import KubeApi
from polarkv_operator.webhooks.server import serve
from polarkv_operator.webhooks.settings import WebhookSettings

CONFIGURATION: Object = {
    "apiVersion": "admissionregistration.k8s.io/v1",
    "kind": "MutatingWebhookConfiguration",
    "metadata": {"name": "polarkv-webhook"},
    "webhooks": [{"name": "inject.polarkv.io", "clientConfig": {"service": {"name": "polarkv-webhook"}}}],
}


def cluster(name: str = "kv", namespace: str = "models", **spec: Any) -> Object:
    """A PolarKVCluster."""
    return {
        "apiVersion": "polarkv.io/v1alpha1",
        "kind": "PolarKVCluster",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"cacheNodes": {"memory": {"size": "8Gi"}, "storage": {"volumeSize": "100Gi"}}, **spec},
    }


class HeldApi:
    """A Kubernetes API of plain objects: resourceVersions, Conflicts and JSON patches are real; the rest is absent."""

    def __init__(self, *objects: Object) -> None:
        self.objects: dict[str, Object] = {}
        self.calls: list[str] = []
        self.failure: Exception | None = None
        self.before: Callable[[str], None] = lambda call: None
        self._versions = itertools.count(1)
        self._lock = threading.Lock()
        for each in objects:
            self.create(each)

    def get(self, kind: Kind, namespace: str | None, name: str) -> Object | None:
        path = kind.path(namespace, name)
        self._note(f"get {path}")
        return copy.deepcopy(self.objects.get(path))

    def create(self, manifest: Object) -> Object:
        return self._write("create", manifest, lambda present: present is None)

    def replace(self, manifest: Object) -> Object:
        version = manifest["metadata"].get("resourceVersion")
        return self._write(
            "replace",
            manifest,
            lambda present: present is not None and present["metadata"]["resourceVersion"] == version,
        )

    def call(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: object = None,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        assert method == "PATCH" and headers == {"Content-Type": "application/json-patch+json"}
        self._note(f"patch {path}")
        with self._lock:
            assert isinstance(body, list)
            self.objects[path] = jsonpatch.apply_patch(self.objects[path], body)

    def of_kind(self, kind: str) -> list[Object]:
        """All objects of a kind."""
        return [each for each in self.objects.values() if each["kind"] == kind]

    def _write(self, verb: str, manifest: Object, allowed: Callable[[Object | None], bool]) -> Object:
        meta = manifest["metadata"]
        path = kind_of(manifest).path(meta.get("namespace"), meta["name"])
        self._note(f"{verb} {path}")
        with self._lock:
            if not allowed(self.objects.get(path)):
                raise Conflict(409, f"{path} is not what it was")
            number = next(self._versions)
            written = copy.deepcopy(manifest)
            written["metadata"] |= {"resourceVersion": str(number), "uid": meta.get("uid", f"uid-{number}")}
            self.objects[path] = written
            return copy.deepcopy(written)

    def _note(self, call: str) -> None:
        self.calls.append(call)
        self.before(call)
        if self.failure is not None:
            raise self.failure


def review(document: Object, **request: Any) -> Object:
    """An AdmissionReview as the API server sends it when a pod is created."""
    return {
        "apiVersion": "admission.k8s.io/v1",
        "kind": "AdmissionReview",
        "request": {
            "uid": "705ab4f5",
            "kind": {"group": "", "version": "v1", "kind": "Pod"},
            "operation": "CREATE",
            "namespace": "models",
            "object": document,
            **request,
        },
    }


def patch_of(response: Object) -> Any:
    """The patch of an answer, which must allow the pod."""
    assert (response["uid"], response["allowed"]) == ("705ab4f5", True)
    if "patch" not in response:
        return []
    assert response["patchType"] == "JSONPatch"
    return json.loads(base64.b64decode(response["patch"]))


@dataclass(frozen=True)
class Running:
    """A server that runs."""

    port: int
    health_port: int

    def trusting(self, bundle: bytes) -> httpx.Client:
        """A client that trusts these authorities alone, as the API server does."""
        context = ssl.create_default_context(cadata=bundle.decode())
        return httpx.Client(base_url=f"https://localhost:{self.port}", verify=context, timeout=10, trust_env=False)

    def health(self, path: str) -> httpx.Response:
        """What it says of itself."""
        return httpx.get(f"http://127.0.0.1:{self.health_port}{path}", timeout=10, trust_env=False)


def settings_for_tests(**more: Any) -> WebhookSettings:
    """Listens on free ports of the loopback, and is called localhost."""
    # A lookup may take as long as it needs on a busy machine; tests of a slow one say otherwise.
    given: dict[str, Any] = {"image": "polarkv:1", "host": "127.0.0.1", "port": 0, "health_port": 0}
    return WebhookSettings(**(given | {"service": "localhost", "check_seconds": 1, "lookup_ms": 10_000} | more))


@contextmanager
def running(
    settings: WebhookSettings, api: KubeApi | None = None, now: Callable[[], datetime] = lambda: datetime.now(UTC)
) -> Iterator[Running]:
    """Run a server in a thread until the block ends. What it raises is raised here."""
    started: list[tuple[int, int]] = []
    begun = threading.Event()
    stops: list[Callable[[], object]] = []
    errors: list[BaseException] = []

    async def main() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        stops.append(lambda: loop.call_soon_threadsafe(stop.set))

        def ready(ports: tuple[int, int]) -> None:
            started.append(ports)
            begun.set()

        await serve(settings, stop, ready, now, api)

    def run() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:
            errors.append(error)
        finally:
            begun.set()

    thread = threading.Thread(target=run, name="webhook")
    thread.start()
    try:
        assert begun.wait(20)
        if errors:
            raise errors[0]
        yield Running(*started[0])
    finally:
        for stop in stops:
            if thread.is_alive():
                stop()
        thread.join(20)
        assert not thread.is_alive()
    if errors:
        raise errors[0]
