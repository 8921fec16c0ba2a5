"""Who may do what: tenants' tokens, the admin's and the cache nodes'."""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path

import msgspec

from polarkv_client.errors import ConfigurationError, Unauthorized
from polarkv_client.layout import tenant_number

MIN_TOKEN_CHARACTERS = 8


class TenantToken(msgspec.Struct, forbid_unknown_fields=True):
    """One tenant in the tokens file; ``quota_bytes`` 0 means no limit."""

    token: str
    quota_bytes: int = 0


class _TokensFile(msgspec.Struct, forbid_unknown_fields=True):
    tenants: dict[str, TenantToken]
    admin_token: str


class Credentials:
    """Checks tokens in constant time; holds digests only."""

    def __init__(self, tenants: dict[str, TenantToken], admin_token: str, node_token: str) -> None:
        self.quotas = {name: tenant.quota_bytes for name, tenant in tenants.items()}
        self._tenants = [(_digest(tenant.token), name) for name, tenant in tenants.items()]
        self._admin = _digest(admin_token)
        self._node = _digest(node_token)

    def tenant(self, token: str) -> str:
        """Name of the tenant with this token.

        Raises:
            Unauthorized: there is none.
        """
        digest, found = _digest(token), None
        for known, name in self._tenants:  # all of them: the time tells nothing
            if hmac.compare_digest(digest, known):
                found = name
        if found is None:
            raise Unauthorized("the token is not known: pass one that is in the manager's tokens file")
        return found

    def is_admin(self, token: str) -> bool:
        return hmac.compare_digest(_digest(token), self._admin)

    def check_node(self, token: str) -> None:
        """Raises Unauthorized when this is not the cluster's node token."""
        if not hmac.compare_digest(_digest(token), self._node):
            raise Unauthorized("the node token is wrong: manager and cache nodes need the same secret file")


def load_credentials(path: Path, node_token: str) -> Credentials:
    """Read the tokens file.

    Raises:
        ConfigurationError: it cannot be read, is not of the form, or two tenants cannot be told apart.
    """

    def wrong(field: str, value: object, fix: str) -> ConfigurationError:
        return ConfigurationError(f"tokens_file.{field}" if field else "tokens_file", value, fix)

    form = '{"tenants": {"NAME": {"token": "...", "quota_bytes": 0}}, "admin_token": "..."}'
    try:
        content = msgspec.json.decode(path.read_bytes(), type=_TokensFile)
    except OSError as error:
        raise wrong("", str(path), f"{error.strerror}: name a readable file of the form {form}") from error
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise wrong("", str(path), f"{error}: use the form {form}") from None
    tokens: dict[str, str] = {}
    numbers: dict[int, str] = {}
    for name, tenant in content.tenants.items():
        if len(tenant.token) < MIN_TOKEN_CHARACTERS:
            raise wrong(f"tenants.{name}.token", "…", f"use at least {MIN_TOKEN_CHARACTERS} characters")
        if tenant.quota_bytes < 0:
            raise wrong(f"tenants.{name}.quota_bytes", tenant.quota_bytes, "use 0 (no limit) or a number of bytes")
        if (other := tokens.setdefault(tenant.token, name)) != name:
            raise wrong(f"tenants.{name}.token", "…", f"is also that of {other!r}: give each tenant its own")
        if (other := numbers.setdefault(tenant_number(name), name)) != name:
            raise wrong(f"tenants.{name}", name, f"its number is that of {other!r}: choose another name")
    if len(content.admin_token) < MIN_TOKEN_CHARACTERS:
        raise wrong("admin_token", "…", f"use at least {MIN_TOKEN_CHARACTERS} characters")
    if content.admin_token in tokens:
        raise wrong("admin_token", "…", "is also a tenant's: give the admin a token of its own")
    return Credentials(content.tenants, content.admin_token, node_token)


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="surrogatepass")).digest()
