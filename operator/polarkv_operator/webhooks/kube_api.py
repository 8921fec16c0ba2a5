"""What of the Kubernetes API the webhook uses, so that tests can stand in for it. Methods block and raise ApiError."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from polarkv_operator.clients.kube import Kind, Object


class Reads(Protocol):
    """Reads one object at a time."""

    def get(self, kind: Kind, namespace: str | None, name: str) -> Object | None:
        """One object, or None."""
        ...


class KubeApi(Reads, Protocol):
    """Reads and writes one object at a time; ``clients.kube.Writer`` is one."""

    def create(self, manifest: Object) -> Object:
        """Raises Conflict when it exists."""
        ...

    def replace(self, manifest: Object) -> Object:
        """Raises Conflict when it is not what it was."""
        ...

    def call(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: object = None,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        """One request."""
        ...
