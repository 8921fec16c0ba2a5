"""The admin API of the clusters' managers: which cache nodes there are, and their drains."""

from __future__ import annotations

import urllib.parse
from dataclasses import dataclass
from typing import Any

import httpx
from pydantic import BaseModel, ValidationError

from polarkv_client.errors import PolarKVError
from polarkv_client.states import DrainMode, NodeState

CONNECT_S, TOTAL_S = 1.0, 5.0


class ManagerSilent(PolarKVError):
    """The manager does not answer, or not as one does."""


class ManagerNode(BaseModel):
    """A cache node as its manager sees it. A manager of an earlier version does not count what is served."""

    name: str
    incarnation: int
    state: NodeState
    heard_ms_ago: int = 0
    inventory_complete: bool = True
    read_bytes: int | None = None
    rdma: str | None = None


class ManagerNodes(BaseModel):
    """Every cache node that a manager knows; ``epoch`` is the manager's life."""

    epoch: int = 0
    uptime_s: float = 0.0
    nodes: list[ManagerNode]


@dataclass(frozen=True)
class Address:
    """Where a manager's admin API is (``http://HOST:PORT``), and the token for it."""

    url: str
    token: str


class Managers:
    """Blocking calls to many managers; threads may share one. Every method raises ManagerSilent."""

    def __init__(self) -> None:
        timeout = httpx.Timeout(TOTAL_S, connect=CONNECT_S)
        limits = httpx.Limits(max_connections=64, max_keepalive_connections=64, keepalive_expiry=60)
        # No proxy: managers are inside. No certificates: they speak plain HTTP, and a store of them costs memory.
        self._http = httpx.Client(timeout=timeout, limits=limits, trust_env=False, verify=False)

    def nodes(self, manager: Address) -> ManagerNodes:
        """Its cache nodes."""
        answer = self._call(manager, "GET", "/v1/nodes")
        try:
            return ManagerNodes.model_validate_json(answer.content)
        except ValidationError as error:
            raise ManagerSilent(
                f"{manager.url} does not answer as a manager does: {error.errors()[0]['msg']}"
            ) from None

    def drain(self, manager: Address, node: str, mode: DrainMode) -> str:
        """Begin to drain a node. Returns why that cannot be just now; nothing: it has begun."""
        return self._ask(manager, f"/v1/nodes/{_quoted(node)}/drain", {"mode": mode.value})

    def cancel_drain(self, manager: Address, node: str) -> str:
        """Take a node back. Returns why that cannot be just now; nothing: it is done."""
        return self._ask(manager, f"/v1/nodes/{_quoted(node)}/cancel-drain", None)

    def close(self) -> None:
        """Close all connections."""
        self._http.close()

    def _ask(self, manager: Address, path: str, body: object) -> str:
        answer = self._call(manager, "POST", path, body)
        if answer.is_success:
            return ""
        try:
            return str(answer.json()["fix"])
        except (ValueError, KeyError, TypeError):
            return f"status {answer.status_code}"

    def _call(self, manager: Address, method: str, path: str, body: Any = None) -> httpx.Response:
        headers = {"Authorization": f"Bearer {manager.token}"}
        try:
            answer = self._http.request(method, manager.url + path, headers=headers, json=body)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ManagerSilent(f"{manager.url}: {type(error).__name__}: {error}") from error
        if answer.is_success or answer.status_code in (404, 409):  # it knows no such node, or not now
            return answer
        hint = ": it has another admin token, restart it" if answer.status_code == httpx.codes.UNAUTHORIZED else ""
        raise ManagerSilent(f"{manager.url} answers {answer.status_code}{hint}")


def _quoted(name: str) -> str:
    return urllib.parse.quote(name, safe="")
