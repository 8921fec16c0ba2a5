"""The manager's admin API as the command line uses it: calls have a time-out, failures are errors with a fix."""

from __future__ import annotations

import time
import urllib.parse
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, NamedTuple

import httpx

from polarkv_client import errors
from polarkv_client.config import ClientConfig
from polarkv_client.states import DrainMode

TIMEOUT_S = 35.0  # an eviction of everything takes up to 25
CONNECT_TIMEOUT_S = 3.0
PAGE = 1000
KEYS_PER_CALL = 4096
EVICT_POLL_S = 0.05


class Done(NamedTuple):
    """For how many entries it was done, and for how many not now: absent, held by a lease, busy, or only in memory."""

    done: int
    not_now: int


class AdminClient:
    """Blocking calls to ``/v1/…``.

    Every method raises Unavailable or DeadlineExceeded when nobody answers, Unauthorized when the token is wrong,
    Refused when the manager understood and said no.
    """

    def __init__(self, config: ClientConfig) -> None:
        """Raises: ConfigurationError: the connection names no admin address."""
        if not config.admin:
            fix = "this command asks the admin API: set POLARKV_ADMIN (http://HOST:PORT) and POLARKV_ADMIN_TOKEN"
            raise errors.ConfigurationError("admin", "", fix)
        headers = {"Authorization": f"Bearer {config.admin_token.get_secret_value()}"}
        self._address = config.admin
        timeout = httpx.Timeout(TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
        # No proxy: the manager is inside.
        self._http = httpx.Client(base_url=config.admin, headers=headers, timeout=timeout, trust_env=False)

    def nodes(self) -> list[dict[str, Any]]:
        """The cache nodes, by name."""
        return sorted(_items(self._call("GET", "/v1/nodes"), "nodes"), key=lambda node: str(node.get("name")))

    def stats(self) -> dict[str, Any]:
        """Sizes and counts of the whole cache."""
        answer = self._call("GET", "/v1/stats")
        assert isinstance(answer, dict)
        return answer

    def entries(self, limit: int, prefix: str = "") -> Iterator[dict[str, Any]]:
        """Entries in the order of their keys, at most ``limit``, whose keys begin with ``prefix`` (hex)."""
        after: str | None = ""
        while limit > 0 and after is not None:
            wanted = {"limit": str(min(limit, PAGE)), "after": after, "prefix": prefix}
            page = self._call("GET", "/v1/entries", params=wanted)
            found = _items(page, "entries")
            yield from found
            limit -= len(found)
            after = page["next"]

    def drain(self, node: str, mode: DrainMode) -> dict[str, Any]:
        """Begin to drain a node; return it."""
        return dict(self._call("POST", f"/v1/nodes/{_quoted(node)}/drain", json={"mode": mode.value}))

    def cancel_drain(self, node: str) -> dict[str, Any]:
        """Take a draining or drained node back; return it."""
        return dict(self._call("POST", f"/v1/nodes/{_quoted(node)}/cancel-drain"))

    def evict(self, keys: Sequence[bytes] | None, *, purge: bool) -> Done:
        """Drop memory copies of keys (None: of all) that disk has too; with ``purge`` drop the entries."""
        return self._on_keys("/v1/evict", keys, {"purge": purge}, "evicted")

    def evict_within(self, keys: Sequence[bytes], seconds: float, *, purge: bool) -> bool:
        """As :meth:`evict`, again until it is done for all keys (leases and offloads end), or time is up."""
        ends = time.monotonic() + seconds
        while self.evict(keys, purge=purge).done < len(keys):
            if time.monotonic() >= ends:
                return False
            time.sleep(EVICT_POLL_S)
        return True

    def pin(self, keys: Sequence[bytes] | None, ttl_ms: int) -> Done:
        """Keep keys (None: all) cached for a while; 0 ends that."""
        return self._on_keys("/v1/pin", keys, {"ttl_ms": ttl_ms}, "pinned")

    def _on_keys(self, path: str, keys: Sequence[bytes] | None, more: dict[str, Any], done: str) -> Done:
        requests = [{"all": True}] if keys is None else [
            {"keys": [key.hex() for key in keys[start : start + KEYS_PER_CALL]]}
            for start in range(0, len(keys), KEYS_PER_CALL)
        ]  # fmt: skip
        answers = [self._call("POST", path, json={**request, **more}) for request in requests]
        return Done(sum(_count(one, done) for one in answers), sum(_count(one, "not_now") for one in answers))

    def _call(self, method: str, path: str, **more: Any) -> Any:
        try:
            answer = self._http.request(method, path, **more)
        except httpx.TimeoutException as error:
            text = f"the admin API at {self._address} did not answer in {TIMEOUT_S:g} s"
            raise errors.DeadlineExceeded(text) from error
        except httpx.HTTPError as error:
            raise errors.Unavailable(f"the admin API at {self._address} cannot be reached: {error}") from error
        except httpx.InvalidURL as error:
            raise errors.ConfigurationError("admin", self._address, f"{error}: use http://HOST:PORT") from error
        if answer.is_success:
            return answer.json()
        problem = _problem(answer)
        if answer.status_code == httpx.codes.UNAUTHORIZED:
            text = "the admin token is wrong: use that of the connection file, or POLARKV_ADMIN_TOKEN"
            raise errors.Unauthorized(text)
        if answer.status_code == httpx.codes.UNPROCESSABLE_ENTITY and problem:
            raise errors.ConfigurationError(problem["field"], problem["value"], problem["fix"])
        text = f"{problem['value']}: {problem['fix']}" if problem else f"status {answer.status_code}"
        raise errors.Refused(f"{method} {path}: {text}")

    def close(self) -> None:
        """Close its connections."""
        self._http.close()

    def __enter__(self) -> AdminClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _count(answer: Any, name: str) -> int:
    found = answer.get(name) if isinstance(answer, dict) else None
    if not isinstance(found, int):
        raise errors.ProtocolError(f"the admin API answered without {name}: is the manager of another version?")
    return found


def _items(answer: Any, name: str) -> list[dict[str, Any]]:
    found = answer.get(name) if isinstance(answer, dict) else None
    if not isinstance(found, list):
        raise errors.ProtocolError(f"the admin API answered without a list of {name}")
    return found


def _problem(answer: httpx.Response) -> dict[str, str]:
    """What the API said is wrong: field, value and fix; nothing when it was not the API that answered."""
    try:
        body = answer.json()
        return {name: str(body[name]) for name in ("field", "value", "fix")}
    except (ValueError, KeyError, TypeError):
        return {}


def _quoted(name: str) -> str:
    return urllib.parse.quote(name, safe="")
