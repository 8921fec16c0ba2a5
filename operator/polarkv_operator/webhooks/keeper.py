"""Keeps the server's certificate: found or made, shared by the replicas, published to the API server, loaded."""

from __future__ import annotations

import base64
import contextlib
import logging
import os
import ssl
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Protocol

from polarkv_client.errors import PolarKVError
from polarkv_operator.clients.kube import ApiError, Conflict, Kind
from polarkv_operator.webhooks.certificates import (
    AUTHORITY_KEY,
    CERTIFICATE_KEY,
    PRIVATE_KEY,
    Pair,
    fingerprint,
    from_secret_data,
    renew,
    to_secret_data,
)
from polarkv_operator.webhooks.kube_api import KubeApi
from polarkv_operator.webhooks.settings import WebhookSettings

SECRET = Kind("v1", "Secret")
CONFIGURATION = Kind("admissionregistration.k8s.io/v1", "MutatingWebhookConfiguration")
ATTEMPTS = 5
_log = logging.getLogger(__name__)


class Source(Protocol):
    """Where the certificate comes from."""

    def current(self, now: datetime) -> Pair:
        """The certificate to show from now on; blocks.

        Raises:
            PolarKVError: there is none now.
        """
        ...


class SharedSecret:
    """Made here, and kept in a Secret. Replicas agree by its resourceVersion: who comes second takes the first one's.

    The Secret is written before the API server is told to trust what is in it, and read again each time: a replica that
    dies in between leaves nothing that the next look does not mend.
    """

    def __init__(self, api: KubeApi, settings: WebhookSettings) -> None:
        self._api = api
        self._settings = settings

    def current(self, now: datetime) -> Pair:
        """As :class:`Source` says. The API server trusts it when this returns."""
        for _ in range(ATTEMPTS):
            with contextlib.suppress(Conflict):
                data = self._agree(now)
                if self._settings.configuration:
                    self._publish(data[AUTHORITY_KEY])
                return Pair(base64.b64decode(data[CERTIFICATE_KEY]), base64.b64decode(data[PRIVATE_KEY]))
        raise ApiError(409, f"Secret {self._settings.secret} keeps changing: {ATTEMPTS} attempts to write it failed")

    def _agree(self, now: datetime) -> dict[str, str]:
        settings = self._settings
        present = self._api.get(SECRET, settings.namespace, settings.secret)
        data: dict[str, str] = (present or {}).get("data") or {}
        held = from_secret_data(data)
        if data and held is None:
            _log.warning("Secret %s/%s is damaged: making its content anew", settings.namespace, settings.secret)
        wanted = renew(held, settings.host_names(), now)
        if wanted is held:
            return data
        data = to_secret_data(wanted)
        manifest = {
            "apiVersion": SECRET.api_version,
            "kind": SECRET.name,
            "metadata": {"name": settings.secret, "namespace": settings.namespace},
            "type": "kubernetes.io/tls",
            "data": data,
        }
        if present is None:
            self._api.create(manifest)
        else:
            self._api.replace({**present, "data": data})
        _log.info("wrote certificate %s and %d authorities", fingerprint(wanted.serving), len(wanted.authorities))
        return data

    def _publish(self, bundle: str) -> None:
        """Have the API server trust the authorities."""
        name = self._settings.configuration
        present = self._api.get(CONFIGURATION, None, name)
        if present is None:
            raise ApiError(404, f"there is no MutatingWebhookConfiguration {name}: install the chart's")
        change = []
        for index, webhook in enumerate(present.get("webhooks") or ()):
            if webhook["clientConfig"].get("caBundle") != bundle:
                place = f"/webhooks/{index}"
                # Another writer may have moved them since.
                change.append({"op": "test", "path": f"{place}/name", "value": webhook["name"]})
                change.append({"op": "add", "path": f"{place}/clientConfig/caBundle", "value": bundle})
        if change:
            headers = {"Content-Type": "application/json-patch+json"}
            self._api.call("PATCH", CONFIGURATION.path(None, name), body=change, headers=headers)
            _log.info("published the authorities to MutatingWebhookConfiguration %s", name)


class Folder:
    """Made by somebody else, such as cert-manager, who also tells the API server; read anew at every look."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def current(self, now: datetime) -> Pair:
        """As :class:`Source` says."""
        try:
            pair = Pair(
                (self._folder / CERTIFICATE_KEY).read_bytes(),
                (self._folder / PRIVATE_KEY).read_bytes(),
            )
            _ = pair.parsed
        except (OSError, ValueError) as error:
            raise PolarKVError(f"{self._folder}: no certificate can be read there: {error}") from error
        return pair


class Keeper:
    """Shows a source's certificate; new connections get a new one without a restart."""

    def __init__(self, source: Source, now: Callable[[], datetime]) -> None:
        self._source = source
        self._now = now
        self._shown: Pair | None = None
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2

    def fetch(self) -> Pair:
        """The certificate that should be shown now; blocks.

        Raises:
            PolarKVError: there is none now.
        """
        return self._source.current(self._now())

    def show(self, pair: Pair) -> None:
        """Show a certificate from now on. To be called where handshakes are made: none may fall in between.

        Raises:
            PolarKVError: it is not one; what was shown before stays.
        """
        if pair != self._shown:
            _load(self.context, pair)
            self._shown = pair
            _log.info("showing certificate %s, valid until %s", fingerprint(pair), pair.parsed.not_valid_after_utc)

    @property
    def not_after(self) -> datetime | None:
        """When what is shown ends; None: nothing is shown yet."""
        return None if self._shown is None else self._shown.parsed.not_valid_after_utc

    @property
    def is_valid(self) -> bool:
        """Whether a certificate is shown that has not ended."""
        return self.not_after is not None and self._now() < self.not_after


def _load(context: ssl.SSLContext, pair: Pair) -> None:
    """Put a certificate into a context that is in use. OpenSSL reads files only: here one that is on no disk."""
    with open(os.memfd_create("certificate"), "wb") as file:
        file.write(pair.certificate + b"\n" + pair.key)
        file.flush()
        try:
            context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
        except ssl.SSLError as error:
            raise PolarKVError(f"the certificate and its key do not go together: {error}") from error
