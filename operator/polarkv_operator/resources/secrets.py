"""Secrets of a cluster: what is made once, kept from then on, and made anew when ``secretsGeneration`` is raised.

Where randomness comes from is a parameter; what is there already is read from the objects that the API server has.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from polarkv_operator.api.cluster import PolarKVCluster
from polarkv_operator.resources import names
from polarkv_operator.resources.common import Object, SecretDigests, build, digest
from polarkv_operator.resources.settings import SECRET_KEY, TOKENS_KEY

TOKEN_KEY = "token"
# Returns a fresh random token each time, such as ``secrets.token_urlsafe(32)``.
TokenSource: TypeAlias = Callable[[], str]
# What the manager asks of a token at least, and more than enough for what we make.
_LEAST_CHARACTERS = 16


@dataclass(frozen=True)
class Contents:
    """All secrets of a cluster. ``repr`` shows none of them."""

    cluster_secret: str = field(repr=False)
    admin_token: str = field(repr=False)
    client_tokens: Mapping[str, str] = field(repr=False)

    def digests(self) -> SecretDigests:
        """What pods are annotated with, so that new secrets make new pods."""
        return SecretDigests(
            cluster=digest("cluster", self.cluster_secret),
            tokens=digest("tokens", self.admin_token, dict(self.client_tokens)),
        )


def complete(cluster: PolarKVCluster, existing: Mapping[str, Object], new: TokenSource) -> Contents:
    """What is there and of the present generation, and ``new()`` for each that is not.

    ``existing`` has the cluster's Secrets by name. A tenant that is no more loses its token.
    """

    def kept(name: str, key: str) -> str:
        found = _read(existing.get(name), key, cluster.spec.security.secrets_generation)
        return found or new()

    return Contents(
        cluster_secret=kept(names.cluster_secret(cluster), SECRET_KEY),
        admin_token=kept(names.admin_secret(cluster), TOKEN_KEY),
        client_tokens={
            tenant.name: kept(names.client_secret(cluster), tenant.name) for tenant in cluster.spec.security.tenants
        },
    )


def objects(cluster: PolarKVCluster, contents: Contents) -> list[Object]:
    """The Secrets, each for one kind of reader: servers, the manager alone, admins, clients."""
    quotas = {tenant.name: tenant.quota for tenant in cluster.spec.security.tenants}
    tokens = {
        "tenants": {
            name: {"token": token, "quota_bytes": quota.bytes if (quota := quotas[name]) else 0}
            for name, token in contents.client_tokens.items()
        },
        "admin_token": contents.admin_token,
    }
    return [
        _secret(cluster, names.cluster_secret(cluster), {SECRET_KEY: contents.cluster_secret}),
        _secret(cluster, names.manager_tokens(cluster), {TOKENS_KEY: json.dumps(tokens, indent=2, sort_keys=True)}),
        _secret(cluster, names.admin_secret(cluster), {TOKEN_KEY: contents.admin_token}),
        _secret(cluster, names.client_secret(cluster), dict(contents.client_tokens)),
    ]


def _secret(cluster: PolarKVCluster, name: str, data: Mapping[str, str]) -> Object:
    # Encoded here: with stringData the API server's object would never equal the one that was applied.
    encoded = {key: base64.b64encode(value.encode()).decode() for key, value in data.items()}
    generation = {names.SECRETS_GENERATION_ANNOTATION: str(cluster.spec.security.secrets_generation)}
    return build(cluster, "v1", "Secret", name, annotations=generation, type="Opaque", data=encoded)


def _read(found: Object | None, key: str, generation: int) -> str | None:
    """A value of a Secret that is there, whole, and of this generation."""
    if found is None:
        return None
    annotations = (found.get("metadata") or {}).get("annotations") or {}
    if annotations.get(names.SECRETS_GENERATION_ANNOTATION) != str(generation):
        return None
    try:
        value = base64.b64decode((found.get("data") or {}).get(key, ""), validate=True).decode()
    except (binascii.Error, ValueError, TypeError, AttributeError):
        return None
    return value if len(value) >= _LEAST_CHARACTERS else None
