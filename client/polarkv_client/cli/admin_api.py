"""The manager's admin API as the command line uses it: calls have a time-out, failures are errors with a fix."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

import httpx

from polarkv_client import errors
from polarkv_client.config import ClientConfig
from polarkv_client.states import DrainMode

TIMEOUT_S = 10.0
PAGE = 1000
KEYS_PER_CALL = 4096


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
        # No proxy: the manager is inside.
        self._http = httpx.Client(base_url=config.admin, headers=headers, timeout=TIMEOUT_S, trust_env=False)

    def nodes(self) -> list[dict[str, Any]]:
        """The cache nodes."""
        return _items(self._call("GET", "/v1/nodes"), "nodes")

    def stats(self) -> dict[str, Any]:
        """Sizes and counts of the whole cache."""
        answer = self._call("GET", "/v1/stats")
        assert isinstance(answer, dict)
        return answer

    def entries(self, limit: int, prefix: str = "") -> Iterator[dict[str, Any]]:
        """Entries in the order of their keys, at most ``limit``, whose keys' hex begins with ``prefix``."""
        after = ""
        while limit > 0:
            wanted = {"limit": min(limit, PAGE), "after": after, "prefix": prefix}
            page = _items(self._call("GET", "/v1/entries", params={k: v for k, v in wanted.items() if v}), "entries")
            yield from page
            limit -= len(page)
            if len(page) < wanted["limit"]:  # type: ignore[operator]
                return
            after = page[-1]["key"]

    def drain(self, node: str, mode: DrainMode) -> dict[str, Any]:
        """Begin to drain a node."""
        return dict(self._call("POST", f"/v1/nodes/{node}/drain", json={"mode": mode.value}))

    def cancel_drain(self, node: str) -> dict[str, Any]:
        """Take a drained or draining node back."""
        return dict(self._call("POST", f"/v1/nodes/{node}/cancel-drain"))

    def evict(self, keys: Sequence[bytes] | None, *, purge: bool) -> int:
        """Drop memory copies of keys (None: of all); with ``purge`` disk copies too. Returns how many it concerned."""
        return self._on_keys("/v1/evict", keys, {"purge": purge}, "evicted")

    def pin(self, keys: Sequence[bytes] | None, ttl_ms: int) -> int:
        """Keep keys (None: all) from eviction for a while; 0 ends that. Returns how many were found."""
        return self._on_keys("/v1/pin", keys, {"ttl_ms": ttl_ms}, "pinned")

    def _on_keys(self, path: str, keys: Sequence[bytes] | None, more: dict[str, Any], counted: str) -> int:
        if keys is None:
            return int(self._call("POST", path, json={"all": True, **more})[counted])
        total = 0
        for start in range(0, len(keys), KEYS_PER_CALL):
            part = [key.hex() for key in keys[start : start + KEYS_PER_CALL]]
            total += int(self._call("POST", path, json={"keys": part, **more})[counted])
        return total

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
        text = _detail(answer)
        if answer.status_code in {httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN}:
            raise errors.Unauthorized(f"{text}: set admin_token in the connection file, or POLARKV_ADMIN_TOKEN")
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


def _items(answer: Any, name: str) -> list[dict[str, Any]]:
    found = answer[name] if isinstance(answer, dict) else answer
    if not isinstance(found, list):
        raise errors.ProtocolError(f"the admin API answered without a list of {name}")
    return found


def _detail(answer: httpx.Response) -> str:
    try:
        detail = answer.json()["detail"]
    except (ValueError, KeyError, TypeError):
        return f"status {answer.status_code}"
    return detail if isinstance(detail, str) else str(detail)
