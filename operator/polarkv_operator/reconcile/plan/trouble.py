"""Why a pod does not run, in a sentence: what the kubelet and the scheduler say, and which claim has no volume."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

# Waiting for these helps nobody.
_HOPELESS = frozenset({
    "CrashLoopBackOff", "ImagePullBackOff", "ErrImagePull", "InvalidImageName", "ErrImageNeverPull",
    "CreateContainerConfigError", "CreateContainerError", "RunContainerError",
})  # fmt: skip


class Trouble(NamedTuple):
    """What is wrong; ``since_s`` (seconds since the epoch) is when the pod last was well, or was made."""

    text: str
    hopeless: bool
    since_s: float


def find_trouble(pod: Mapping[str, Any], claims: Sequence[Mapping[str, Any]]) -> Trouble | None:
    """What is wrong with a pod that should be ready; None: it is."""
    status = pod.get("status") or {}
    conditions = {condition["type"]: condition for condition in status.get("conditions") or []}
    ready = conditions.get("Ready", {})
    if ready.get("status") == "True":
        return None
    name = pod["metadata"]["name"]
    since_s = seconds(ready.get("lastTransitionTime") or pod["metadata"].get("creationTimestamp"))
    for container in [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]:
        waiting = (container.get("state") or {}).get("waiting") or {}
        if waiting.get("reason") in _HOPELESS:
            more = f": {waiting['message']}" if waiting.get("message") else ""
            return Trouble(f"{name}, container {container['name']}: {waiting['reason']}{more}", True, since_s)
    pending = [claim["metadata"]["name"] for claim in claims if _phase(claim) != "Bound"]
    if pending:
        text = f"{name} waits for volumes: {', '.join(pending)} is not bound; see 'kubectl describe pvc {pending[0]}'"
        return Trouble(text, False, since_s)
    scheduled = conditions.get("PodScheduled", {})
    if scheduled.get("status") == "False":
        return Trouble(f"{name} finds no machine: {scheduled.get('message', 'it is not scheduled')}", False, since_s)
    return Trouble(f"{name} is not ready ({status.get('phase', 'no state yet')})", False, since_s)


def _phase(claim: Mapping[str, Any]) -> str:
    return str((claim.get("status") or {}).get("phase", "Pending"))


def seconds(text: str | None) -> float:
    """Seconds since the epoch of a time of the API server's; 0 where there is none."""
    return datetime.fromisoformat(text).timestamp() if text else 0.0
