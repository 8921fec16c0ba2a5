"""Events about pods that were skipped: few at a time, the same one not again and again, never waited for."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from polarkv_operator.clients.kube import ApiError, Kind
from polarkv_operator.webhooks import pods
from polarkv_operator.webhooks.injection import Decision
from polarkv_operator.webhooks.kube_api import KubeApi
from polarkv_operator.webhooks.review import Request

COMPONENT = "polarkv-webhook"
EVENT, POD = Kind("v1", "Event"), Kind("v1", "Pod")
AGAIN_S = 600.0
MOST_REMEMBERED = 4096
MOST_UNDER_WAY = 64
# A pod gets its uid after it was admitted, and `kubectl describe` shows Events by uid.
LOOKS_S = (0.5, 1.0, 2.0, 4.0)
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Subject:
    """What an Event is about: the pod if it has a name by now, else who makes it."""

    api_version: str
    kind: str
    name: str
    namespace: str
    uid: str = ""


def subject(request: Request) -> Subject | None:
    """What to tie an Event about a pod to, or None when nothing has a name yet."""
    metadata = pods.read_metadata(request.pod)
    if metadata is None:
        return None
    if metadata.name:
        return Subject("v1", "Pod", metadata.name, request.namespace)
    owner = metadata.controller
    if owner is None:
        return None
    return Subject(owner.api_version, owner.kind, owner.name, request.namespace, owner.uid)


def event(about: Subject, decision: Decision, now: datetime) -> dict[str, Any]:
    """The Event as the API server takes it."""
    shown = now.strftime("%Y-%m-%dT%H:%M:%SZ")
    regarding = {"apiVersion": about.api_version, "kind": about.kind, "name": about.name, "namespace": about.namespace}
    if about.uid:
        regarding["uid"] = about.uid
    return {
        "apiVersion": EVENT.api_version,
        "kind": EVENT.name,
        "metadata": {
            "name": f"{about.name}.{_fingerprint(decision)}.{int(now.timestamp() * 1000):x}",
            "namespace": about.namespace,
        },
        "involvedObject": regarding,
        "type": "Warning" if decision.reason else "Normal",
        "reason": "InjectionSkipped" if decision.reason else "Injected",
        "message": "; ".join([decision.status, *decision.warnings] if not decision.reason else [decision.status])[
            :1024
        ],
        "count": 1,
        "firstTimestamp": shown,
        "lastTimestamp": shown,
        "source": {"component": COMPONENT},
        "reportingComponent": COMPONENT,
    }


def _fingerprint(decision: Decision) -> str:
    return hashlib.sha256(decision.status.encode()).hexdigest()[:10]


class Events:
    """Writes Events from one event loop."""

    def __init__(
        self,
        api: KubeApi,
        now: Callable[[], float],
        count: Callable[[str], None],
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """``now`` is a monotonic clock in seconds; ``count`` gets ``written``, ``failed`` or ``dropped`` for each."""
        self._api = api
        self._now = now
        self._count = count
        self._pause = pause
        self._said: OrderedDict[tuple[Subject, str], float] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()

    def say(self, request: Request, decision: Decision) -> None:
        """Write an Event about a pod that was skipped or warned of. Returns at once."""
        if request.is_dry_run or not (decision.reason or decision.warnings):
            return
        about = subject(request)
        if about is None or not self._is_news(about, decision):
            return
        if len(self._tasks) >= MOST_UNDER_WAY:
            self._count("dropped")
            return
        task = asyncio.get_running_loop().create_task(self._write(about, decision))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Give up what is not written yet."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _is_news(self, about: Subject, decision: Decision) -> bool:
        key, now = (about, decision.status), self._now()
        if now - self._said.get(key, float("-inf")) < AGAIN_S:
            return False
        self._said[key] = now
        self._said.move_to_end(key)
        while len(self._said) > MOST_REMEMBERED:
            self._said.popitem(last=False)
        return True

    async def _write(self, about: Subject, decision: Decision) -> None:
        try:
            about = await self._with_uid(about)
            await asyncio.to_thread(self._api.create, event(about, decision, datetime.now(UTC)))
        except ApiError as error:
            self._count("failed")
            _log.warning("an Event about %s %s/%s was not written: %s", about.kind, about.namespace, about.name, error)
        else:
            self._count("written")

    async def _with_uid(self, about: Subject) -> Subject:
        if about.uid:
            return about
        for pause_s in LOOKS_S:
            await self._pause(pause_s)
            try:
                found = await asyncio.to_thread(self._api.get, POD, about.namespace, about.name)
            except ApiError:
                break
            if found is not None:
                return Subject(about.api_version, about.kind, about.name, about.namespace, found["metadata"]["uid"])
        return about
