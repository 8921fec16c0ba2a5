"""Children of a cluster: which have to be written, and which are to go."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from polarkv_operator.api.cluster import GROUP
from polarkv_operator.api.quantity import Quantity
from polarkv_operator.resources.render import KEPT_KINDS

Object: TypeAlias = dict[str, Any]
Key: TypeAlias = tuple[str, str]  # kind, name
DIGEST_ANNOTATION = f"{GROUP}/applied"
# What the API server refuses to change. Of claims nothing is changed here: the disk tier's grow in a way of their own.
_IMMUTABLE: dict[str, tuple[str, ...]] = {
    "StatefulSet": ("selector", "serviceName", "podManagementPolicy", "volumeClaimTemplates"),
    "Deployment": ("selector",),
}


@dataclass(frozen=True)
class Children:
    """What is to be written (in order), what is to be deleted, and whose name somebody else has."""

    write: tuple[Object, ...]
    remove: tuple[Object, ...]
    taken: tuple[Key, ...] = ()


def key_of(manifest: Mapping[str, Any]) -> Key:
    """Kind and name; all children of a cluster are in its namespace."""
    return manifest["kind"], manifest["metadata"]["name"]


def plan_children(desired: Iterable[Object], observed: Mapping[Key, Object], uid: str, label: str) -> Children:
    """Compare what should be with what is.

    ``observed`` holds everything of the clusters' kinds that has its ``label`` or a name in ``desired``.
    """
    write, taken, wanted = [], [], set()
    for manifest in desired:
        key = key_of(manifest)
        wanted.add(key)
        found = observed.get(key)
        if found is not None and not is_ours(found, uid, label):
            taken.append(key)
            continue
        stamped = stamp(in_place(manifest, found))
        if found is None or differs(stamped, found):
            write.append(stamped)
    remove = [
        found
        for key, found in observed.items()
        if key not in wanted and key[0] not in KEPT_KINDS and owner_uid(found) == uid
    ]
    return Children(tuple(write), tuple(remove), tuple(taken))


def is_ours(found: Mapping[str, Any], uid: str, label: str) -> bool:
    """Whether the operator made it, for this cluster or one of that name before it."""
    return owner_uid(found) == uid or label in (found["metadata"].get("labels") or {})


def owner_uid(found: Mapping[str, Any]) -> str:
    """Whose it is: the uid of its controller."""
    owners = found["metadata"].get("ownerReferences") or []
    return next((str(owner["uid"]) for owner in owners if owner.get("controller")), "")


def stamp(manifest: Object) -> Object:
    """With a digest of itself in an annotation: what is no longer wanted is seen to differ, too."""
    stamped = copy.deepcopy(manifest)
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    stamped["metadata"].setdefault("annotations", {})[DIGEST_ANNOTATION] = digest
    return stamped


def in_place(manifest: Object, found: Object | None) -> Object:
    """The manifest with what cannot be changed left as it is; who wants another thing is told by conditions."""
    if found is None:
        return manifest
    kind = manifest["kind"]
    if kind == "PersistentVolumeClaim":
        return {**manifest, "spec": found["spec"]}
    there = {name: found["spec"][name] for name in _IMMUTABLE.get(kind, ()) if name in found.get("spec", {})}
    return {**manifest, "spec": {**manifest["spec"], **there}} if there else manifest


def differs(manifest: Object, found: Object) -> bool:
    """Whether the API server's object is not what the manifest says, in what the manifest says."""
    return not covers(found, {name: value for name, value in manifest.items() if name not in ("apiVersion", "kind")})


def covers(found: Any, wanted: Any) -> bool:
    """Whether ``found`` has all of ``wanted``; defaults and what others added may come on top."""
    if isinstance(wanted, Mapping):
        if not isinstance(found, Mapping):
            return not wanted and found is None
        return all(covers(found.get(name), value) for name, value in wanted.items())
    if isinstance(wanted, list):
        if not isinstance(found, list):
            return not wanted and found is None
        return len(found) == len(wanted) and all(map(covers, found, wanted))
    return found == wanted or _same_amount(found, wanted)


def project(found: Any, wanted: Any) -> Any:
    """Of ``found``, what ``wanted`` speaks of: what must change before it is worth to apply ``wanted`` again."""
    if isinstance(wanted, Mapping) and isinstance(found, Mapping):
        return {name: project(found.get(name), value) for name, value in wanted.items()}
    if isinstance(wanted, list) and isinstance(found, list) and len(found) == len(wanted):
        return [project(one, other) for one, other in zip(found, wanted, strict=True)]
    return found


def _same_amount(found: Any, wanted: Any) -> bool:
    if not isinstance(found, str | int) or not isinstance(wanted, str | int) or isinstance(found, bool):
        return False
    try:
        return Quantity.parse(found).value == Quantity.parse(wanted).value
    except ValueError:
        return False
