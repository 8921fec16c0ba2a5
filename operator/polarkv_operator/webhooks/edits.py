"""A JSON patch (RFC 6902) that only adds and replaces, built beside the document that it leads to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Path = tuple[str | int, ...]


class Edits:
    """Collects operations. The document given is never changed; ``document`` is what the patch makes of it.

    Only what lies on a changed path is copied, so that the depth of what a stranger sends does not matter.
    """

    def __init__(self, document: Mapping[str, Any]) -> None:
        self.document: dict[str, Any] = dict(document)
        self.patch: list[dict[str, Any]] = []

    def set(self, path: Path, value: Any) -> None:
        """Put ``value`` at ``path``; objects on the way are made where they are missing or null."""
        for depth in range(1, len(path)):
            if not isinstance(path[depth], int) and self._get(path[:depth]) is None:
                self._put(path[:depth], {})
        self._put(path, value)

    def append(self, path: Path, value: Any) -> None:
        """Put ``value`` at the end of the list at ``path``, which is made where it is missing or null."""
        present = self._get(path)
        if present is None:
            self.set(path, [value])
            return
        self.patch.append({"op": "add", "path": pointer((*path, "-")), "value": value})
        self._store(path, [*present, value])

    def _put(self, path: Path, value: Any) -> None:
        # In an object, `add` also replaces; in a list it would insert.
        operation = "replace" if isinstance(path[-1], int) else "add"
        self.patch.append({"op": operation, "path": pointer(path), "value": value})
        self._store(path, value)

    def _get(self, path: Path) -> Any:
        node: Any = self.document
        for step in path:
            node = node[step] if isinstance(step, int) else node.get(step)
        return node

    def _store(self, path: Path, value: Any) -> None:
        node: Any = self.document
        for step in path[:-1]:
            node[step] = node[step].copy()
            node = node[step]
        node[path[-1]] = value


def pointer(path: Path) -> str:
    """A path as RFC 6901 writes it."""
    return "".join("/" + str(step).replace("~", "~0").replace("/", "~1") for step in path)
