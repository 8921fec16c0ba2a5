"""Certificates, service account keys and kubeconfigs of a test cluster, by ``openssl`` (one call a certificate)."""

from __future__ import annotations

import base64
import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

DAYS = 30
_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
SERVER_NAMES = (
    "DNS:localhost", "DNS:kubernetes", "DNS:kubernetes.default", "DNS:kubernetes.default.svc",
    "DNS:kubernetes.default.svc.cluster.local", "IP:127.0.0.1",
)  # fmt: skip


@dataclass(frozen=True)
class Pki:
    """A certificate authority in a folder of its own, and what it has signed."""

    folder: Path

    @classmethod
    def create(cls, folder: Path) -> Pki:
        """Make the authority and the key that signs service account tokens."""
        folder.mkdir(parents=True, mode=0o700)
        made = cls(folder)
        made._openssl(
            "req", "-x509", *_NEW_KEY, "-keyout", "ca.key", "-out", "ca.crt", "-days", str(DAYS),
            "-subj", "/CN=polarkv-test-ca", "-addext", "keyUsage=critical,keyCertSign,digitalSignature",
        )  # fmt: skip
        made._openssl("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", "sa.key")
        made._openssl("ec", "-in", "sa.key", "-pubout", "-out", "sa.pub")
        return made

    def _openssl(self, *arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=self.folder, check=True, capture_output=True, timeout=30)

    def path(self, name: str) -> str:
        return str(self.folder / name)

    def sign(self, name: str, subject: str, names: tuple[str, ...] = ()) -> None:
        """Write ``name.crt`` and ``name.key``: a client's, and with ``names`` (``DNS:…``, ``IP:…``) a server's too."""
        usage = "clientAuth,serverAuth" if names else "clientAuth"
        extra = ["-addext", f"subjectAltName={','.join(names)}"] if names else []
        self._openssl(
            "req", "-x509", "-CA", "ca.crt", "-CAkey", "ca.key", *_NEW_KEY, "-keyout", f"{name}.key",
            "-out", f"{name}.crt", "-days", str(DAYS), "-subj", subject, *extra,
            "-addext", f"extendedKeyUsage={usage}", "-addext", "basicConstraints=critical,CA:FALSE",
        )  # fmt: skip

    def kubeconfig(self, name: str, subject: str, server: str, names: tuple[str, ...] = ()) -> Path:
        """Sign a certificate for ``subject`` and write the kubeconfig that holds it; return its path.

        The file stands alone: it can be copied into a pod or to another machine.
        """
        self.sign(name, subject, names)

        def held(file: str) -> str:
            return base64.b64encode((self.folder / file).read_bytes()).decode()

        user = {"client-certificate-data": held(f"{name}.crt"), "client-key-data": held(f"{name}.key")}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": {"server": server, "certificate-authority-data": held("ca.crt")}}],
            "users": [{"name": name, "user": user}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": name}}],
            "current-context": "test",
        }
        path = self.folder / f"{name}.kubeconfig"
        path.write_text(json.dumps(config), encoding="utf-8")
        path.chmod(0o600)
        return path
