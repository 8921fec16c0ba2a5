"""Where a test cluster is: its folders and addresses follow from its number, so that several run on one machine."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

# Not under /tmp: that may be memory, and container images and volumes belong on a disk.
RUNS = Path("/var/tmp")
CLUSTERS = 16
NODES = 8
DOMAIN = "cluster.local"


@dataclass(frozen=True)
class Layout:
    """What follows from a cluster's number, and where its programs are; a node's first process gets it as a file."""

    number: int
    etcd: Path
    containers: Path
    kubernetes: Path

    @property
    def folder(self) -> Path:
        return folder_of(self.number)

    @property
    def pki(self) -> Path:
        return self.folder / "pki"

    @property
    def kubeconfig(self) -> Path:
        return self.pki / "admin.kubeconfig"

    @property
    def audit_log(self) -> Path:
        return self.folder / "audit.log"

    @property
    def images(self) -> Path:
        """OCI archives that every node imports when it starts."""
        return self.folder / "images"

    def node(self, node: int) -> Path:
        return self.folder / node_name(node)

    @property
    def network(self) -> str:
        """Of everything: what this machine routes into the cluster."""
        return f"10.{220 + self.number}.0.0/16"

    def _address(self, third: int, fourth: int) -> str:
        return f"10.{220 + self.number}.{third}.{fourth}"

    @property
    def gateway(self) -> str:
        """This machine, as the cluster sees it: where a webhook under test can listen."""
        return self._address(0, 1)

    def node_address(self, node: int) -> str:
        return self._address(0, 10 + node)

    @property
    def url(self) -> str:
        return f"https://{self.node_address(0)}:6443"

    @property
    def services(self) -> str:
        return f"{self._address(1, 0)}/24"

    @property
    def api_service(self) -> str:
        return self._address(1, 1)

    @property
    def dns_service(self) -> str:
        return self._address(1, 10)

    @property
    def pods(self) -> str:
        """Of all nodes."""
        return f"{self._address(16, 0)}/20"

    def node_pods(self, node: int) -> str:
        return f"{self._address(16 + node, 0)}/24"

    @property
    def host_link(self) -> str:
        return f"pkv{self.number}"

    def save(self) -> Path:
        """Write it where :func:`load` finds it."""
        path = self.folder / "layout.json"
        path.write_text(json.dumps(asdict(self), default=str), encoding="utf-8")
        return path


def load(path: Path) -> Layout:
    """Read what :meth:`Layout.save` wrote."""
    held = json.loads(path.read_text(encoding="utf-8"))
    return Layout(held["number"], *(Path(held[name]) for name in ("etcd", "containers", "kubernetes")))


def folder_of(number: int) -> Path:
    return RUNS / f"polarkv-cluster-{number}"


def node_name(node: int) -> str:
    return f"node{node}"
