"""An API server alone: etcd and kube-apiserver on free ports of this machine's loopback, without root.

There are no controllers and no nodes: objects are stored, validated, defaulted and watched, admission webhooks are
called (by URL), but nothing reacts to them. What tests of an operator's loop need, in about five seconds.
"""

from __future__ import annotations

import http.client
import json
import shutil
import signal
import ssl
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.support import programs
from tests.cluster.support.daemons import Daemon, DaemonError
from tests.cluster.support.pki import SERVER_NAMES, Pki
from tests.support.ports import reserved_ports
from tests.support.waiting import wait_until

START_TIMEOUT_S = 60.0
ADMIN = "/O=system:masters/CN=admin"
# Every write is one line with who, what and the answer's code; who only reads leaves no trace.
AUDIT_POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [
        # What service accounts read, too: it is compared with their rights.
        {"level": "Metadata", "userGroups": ["system:serviceaccounts"]},
        {"level": "None", "verbs": ["get", "list", "watch"]},
        {"level": "Metadata"},
    ],
}


def is_cached() -> bool:
    """Whether an API server starts here without building or downloading anything."""
    return programs.is_built("kube-apiserver", "kubectl") and programs.is_unpacked("etcd")


@dataclass(frozen=True)
class ApiServer:
    """A running etcd and kube-apiserver."""

    kubeconfig: Path
    url: str
    audit_log: Path
    pki: Pki
    etcd: Daemon
    api: Daemon

    def kubeconfig_of(self, name: str, *groups: str) -> Path:
        """Write the kubeconfig of another user, member of ``groups``, and return its path."""
        subject = "".join(f"/O={group}" for group in groups) + f"/CN={name}"
        return self.pki.kubeconfig(name.replace(":", "-"), subject, self.url)

    def restart(self) -> None:
        """Stop kube-apiserver and start it again at the same address, with what etcd kept; return when it is ready."""
        self.stop()
        self.start()

    def stop(self) -> None:
        """Stop kube-apiserver at once: connections break. etcd stays."""
        self.api.stop(signal.SIGKILL)

    def start(self) -> None:
        """Start kube-apiserver; return when it is ready."""
        self.api.start()
        wait_until(self._is_ready, f"{self.url}/readyz", START_TIMEOUT_S, 0.05)

    def _is_ready(self) -> bool:
        self.etcd.check()
        self.api.check()
        return is_ready(self.url, self.pki)


def is_ready(url: str, pki: Pki) -> bool:
    """Whether an API server answers /readyz with 200."""
    context = ssl.create_default_context(cafile=pki.path("ca.crt"))
    connection = http.client.HTTPSConnection(url.removeprefix("https://"), timeout=5, context=context)
    try:
        connection.request("GET", "/readyz")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def etcd_command(data: Path, client_port: int, peer_port: int) -> list[str]:
    """A single member for as long as a test run: nothing it writes need survive a power cut."""
    client, peer = f"http://127.0.0.1:{client_port}", f"http://127.0.0.1:{peer_port}"
    return [
        "etcd", "--data-dir", str(data), "--listen-client-urls", client, "--advertise-client-urls", client,
        "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}",
        "--unsafe-no-fsync", "--log-level", "warn",
    ]  # fmt: skip


def api_command(folder: Path, pki: Pki, etcd_port: int, port: int, *more: str) -> list[str]:
    """kube-apiserver with its certificates under ``pki`` and its audit log in ``folder``."""
    policy = folder / "audit-policy.json"
    policy.write_text(json.dumps(AUDIT_POLICY), encoding="utf-8")
    options = {
        "etcd-servers": f"http://127.0.0.1:{etcd_port}",
        "secure-port": port,
        "tls-cert-file": pki.path("apiserver.crt"),
        "tls-private-key-file": pki.path("apiserver.key"),
        "client-ca-file": pki.path("ca.crt"),
        "service-account-key-file": pki.path("sa.pub"),
        "service-account-signing-key-file": pki.path("sa.key"),
        "service-account-issuer": "https://kubernetes.default.svc.cluster.local",
        "audit-policy-file": policy,
        "audit-log-path": folder / "audit.log",
        "authorization-mode": "Node,RBAC",
        "allow-privileged": "true",
        "profiling": "false",
    }
    return ["kube-apiserver", *(f"--{name}={value}" for name, value in options.items()), *more]


@contextmanager
def running() -> Iterator[ApiServer]:
    """Run an API server until the block ends; nothing of it remains. Builds and unpacks what is not cached yet.

    Raises InstallError when its programs cannot be had here, DaemonError with the log when it does not start.
    """
    environment = programs.environment([programs.unpack("etcd")], programs.build("kube-apiserver", "kubectl"))
    folder = Path(tempfile.mkdtemp(prefix="polarkv-api-"))
    try:
        # To the end: it may be started again at the same address.
        with reserved_ports(3) as ports:
            server = _prepared(folder, environment, *ports)
            server.etcd.start()
            try:
                server.start()
                yield server
            except TimeoutError as error:
                raise server.api.error(str(error)) from error
            finally:
                server.api.stop()
                server.etcd.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _prepared(folder: Path, environment: Mapping[str, str], etcd_port: int, peer_port: int, port: int) -> ApiServer:
    """An API server that has not been started."""
    pki = Pki.create(folder / "pki")
    url = f"https://127.0.0.1:{port}"
    pki.sign("apiserver", "/CN=kube-apiserver", SERVER_NAMES)
    command = api_command(
        folder, pki, etcd_port, port,
        "--bind-address=127.0.0.1", "--service-cluster-ip-range=10.96.0.0/16",
        # Nobody here creates the service accounts that it would ask for.
        "--disable-admission-plugins=ServiceAccount",
    )  # fmt: skip
    return ApiServer(
        pki.kubeconfig("admin", ADMIN, url),
        url,
        folder / "audit.log",
        pki,
        Daemon("etcd", etcd_command(folder / "etcd", etcd_port, peer_port), folder / "etcd.log", environment),
        Daemon("kube-apiserver", command, folder / "kube-apiserver.log", environment),
    )


__all__ = ["ApiServer", "DaemonError", "api_command", "etcd_command", "is_cached", "is_ready", "running"]
