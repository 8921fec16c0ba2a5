"""kubectl against one cluster, for tests: objects in, objects out."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cluster.support import programs

TIMEOUT_S = 180.0  # longer than anything that it is told to wait for here
Object = dict[str, Any]


class KubectlError(RuntimeError):
    """kubectl refused or failed; the message is what it said."""


@dataclass(frozen=True)
class Kubectl:
    """kubectl with a kubeconfig, and a namespace unless it is the default one."""

    kubeconfig: Path
    namespace: str = "default"

    def run(self, *arguments: str, stdin: str | None = None, timeout_s: float = TIMEOUT_S) -> str:
        """Return what it printed. KubectlError when it failed."""
        command = ["kubectl", f"--kubeconfig={self.kubeconfig}", f"--namespace={self.namespace}", *arguments]
        done = subprocess.run(
            command,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            env=programs.environment([], programs.build("kubectl")),
        )
        if done.returncode != 0:
            raise KubectlError(f"kubectl {' '.join(arguments)}: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout

    def get(self, kind: str, name: str) -> Object:
        """Return one object. KubectlError when it does not exist."""
        found: Object = json.loads(self.run("get", kind, name, "-o", "json"))
        return found

    def find(self, kind: str, name: str) -> Object | None:
        """Return one object, or None when it does not exist."""
        text = self.run("get", kind, name, "-o", "json", "--ignore-not-found")
        found: Object | None = json.loads(text) if text else None
        return found

    def list(self, kind: str, selector: str = "") -> list[Object]:
        """Return the namespace's objects of a kind that match a label selector."""
        found: list[Object] = json.loads(self.run("get", kind, "-o", "json", f"--selector={selector}"))["items"]
        return found

    def apply(self, *objects: Object) -> None:
        """Apply objects server-side, as one list."""
        listed = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
        self.run("apply", "--server-side", "-f", "-", stdin=listed)

    def delete(self, kind: str, name: str, *arguments: str) -> None:
        """Delete an object and wait until it is gone; nothing happens when it does not exist."""
        self.run("delete", kind, name, "--ignore-not-found", *arguments)
