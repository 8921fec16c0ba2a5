"""Certificates without cert-manager: what should be there, from what is there and the time. No input or output.

An authority of our own signs the server's certificate, and the API server is told to trust that authority alone. Both
are made anew long before they end. A new authority is published first and signs nothing until every API server has
seen it, so that there is no moment at which a server shows a certificate that is not trusted yet.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

AUTHORITY_LIFE = timedelta(days=730)
SERVING_LIFE = timedelta(days=90)
# A new authority signs nothing before it is this old; every replica publishes it much sooner.
SETTLE = timedelta(hours=1)
# Clocks differ: a certificate is valid from before it was made.
SKEW = timedelta(hours=1)
MOST_AUTHORITIES = 4

CERTIFICATE_KEY, PRIVATE_KEY = "tls.crt", "tls.key"
AUTHORITY_KEY, AUTHORITY_PRIVATE_KEY = "ca.crt", "ca.key"


@dataclass(frozen=True)
class Pair:
    """A certificate and its private key, both as PEM."""

    certificate: bytes
    key: bytes

    @property
    def parsed(self) -> x509.Certificate:
        """The certificate."""
        return x509.load_pem_x509_certificate(self.certificate)


@dataclass(frozen=True)
class Credentials:
    """All of a webhook's certificates: its authorities, the newest last, and what the server shows."""

    authorities: tuple[Pair, ...]
    serving: Pair

    @property
    def bundle(self) -> bytes:
        """What the API server trusts, as PEM."""
        return b"".join(authority.certificate for authority in self.authorities)


def renew(current: Credentials | None, names: Sequence[str], now: datetime) -> Credentials:
    """What should be there at ``now``; the same object when nothing has to change.

    ``names`` are the host names that the API server calls, the most specific first. An authority is followed by a new
    one after half its life, a server's certificate after two thirds, or at once when it is for other names.
    """
    if current is None or not current.authorities or not _is_signed(current):
        authority = _authority(now)
        return Credentials((authority,), _serving(authority, names, now))
    authorities = _alive(current, now)
    if not authorities or _spent(authorities[-1], now) >= 1 / 2:
        authorities = (*authorities, _authority(now))[-MOST_AUTHORITIES:]
    renewed = current if authorities == current.authorities else replace(current, authorities=authorities)
    if _spent(current.serving, now) >= 2 / 3 or _names(current.serving) != list(names):
        settled = [each for each in authorities if _age(each, now) >= SETTLE]
        renewed = replace(renewed, serving=_serving((settled or authorities)[-1], names, now))
    return renewed


def _alive(current: Credentials, now: datetime) -> tuple[Pair, ...]:
    return tuple(each for each in current.authorities if _spent(each, now) < 1)


def _is_signed(current: Credentials) -> bool:
    """Whether the server's certificate belongs to its key and to one of the authorities."""
    serving = current.serving.parsed
    if load_pem_private_key(current.serving.key, None).public_key() != serving.public_key():
        return False
    for authority in current.authorities:
        try:
            serving.verify_directly_issued_by(authority.parsed)
        except Exception:  # whatever is wrong with it: it is not this one
            continue
        return True
    return False


def _age(pair: Pair, now: datetime) -> timedelta:
    return now - pair.parsed.not_valid_before_utc - SKEW


def _spent(pair: Pair, now: datetime) -> float:
    """The part of its life that is over: 0 when it was made, 1 at its end."""
    certificate = pair.parsed
    return _age(pair, now) / (certificate.not_valid_after_utc - certificate.not_valid_before_utc - SKEW)


def _names(pair: Pair) -> list[str]:
    try:
        extension = pair.parsed.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except x509.ExtensionNotFound:
        return []
    return extension.value.get_values_for_type(x509.DNSName)


def _authority(now: datetime) -> Pair:
    key = ec.generate_private_key(ec.SECP256R1())
    serial = x509.random_serial_number()
    # Two authorities live side by side: different names keep whoever verifies from trying the wrong one.
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"polarkv-webhook-ca-{serial:x}"[:64])])
    builder = _builder(name, name, key.public_key(), serial, now, AUTHORITY_LIFE)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_usage(signs=True), critical=True)
    return _pair(builder.sign(key, hashes.SHA256()), key)


def _serving(authority: Pair, names: Sequence[str], now: datetime) -> Pair:
    key = ec.generate_private_key(ec.SECP256R1())
    signer = load_pem_private_key(authority.key, None)
    assert isinstance(signer, ec.EllipticCurvePrivateKey)
    issuer = authority.parsed
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0][:64])])
    builder = _builder(name, issuer.subject, key.public_key(), x509.random_serial_number(), now, SERVING_LIFE)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(_usage(signs=False), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(each) for each in names]), critical=False)
    identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
    builder = builder.add_extension(identifier, critical=False)
    return _pair(builder.sign(signer, hashes.SHA256()), key)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, serial: int, now: datetime, life: timedelta
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder(subject_name=subject, issuer_name=issuer, public_key=key, serial_number=serial)
        .not_valid_before(now - SKEW)
        .not_valid_after(now + life)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _pair(certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> Pair:
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return Pair(certificate.public_bytes(Encoding.PEM), pem)


def fingerprint(pair: Pair) -> str:
    """A short name of a certificate, for logs."""
    return hashlib.sha256(pair.certificate).hexdigest()[:12]


def to_secret_data(credentials: Credentials) -> dict[str, str]:
    """As a Secret of type ``kubernetes.io/tls`` holds it, with the authorities beside it."""
    parts = {
        CERTIFICATE_KEY: credentials.serving.certificate,
        PRIVATE_KEY: credentials.serving.key,
        AUTHORITY_KEY: credentials.bundle,
        AUTHORITY_PRIVATE_KEY: b"".join(authority.key for authority in credentials.authorities),
    }
    return {name: base64.b64encode(part).decode() for name, part in parts.items()}


def from_secret_data(data: Mapping[str, str]) -> Credentials | None:
    """What a Secret holds, or None where it is not what :func:`to_secret_data` wrote: then it is made anew."""
    try:
        parts = {name: base64.b64decode(data[name], validate=True) for name in data}
        certificates = x509.load_pem_x509_certificates(parts[AUTHORITY_KEY])
        keys = [f"{part}{_END}".encode() for part in parts[AUTHORITY_PRIVATE_KEY].decode().split(_END)[:-1]]
        authorities = tuple(
            Pair(certificate.public_bytes(Encoding.PEM), key.lstrip() + b"\n")
            for certificate, key in zip(certificates, keys, strict=True)
        )
        serving = Pair(parts[CERTIFICATE_KEY], parts[PRIVATE_KEY])
        for pair in (*authorities, serving):
            if load_pem_private_key(pair.key, None).public_key() != pair.parsed.public_key():
                return None
    except (KeyError, ValueError, TypeError, AttributeError, binascii.Error):
        return None
    return Credentials(authorities, serving)


_END = "-----END PRIVATE KEY-----"
