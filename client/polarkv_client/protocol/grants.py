"""Grants: what the manager signs and a slab server checks before it moves a byte.

One grant covers all extents of one batch on one cache node. It is bound to the node's incarnation and to the manager's
epoch, ends at a deadline on the manager's clock, and carries a MAC under the cluster's grant secret. Clients read it
(they learn their extents from it) but cannot make one.
"""

from __future__ import annotations

import hmac
from enum import IntEnum

import msgspec

from polarkv_client.errors import ProtocolError, Refused, Unauthorized

MAC_BYTES = 16


class Access(IntEnum):
    """What a grant allows."""

    READ = 0
    WRITE = 1


class Extent(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One slot's place: ``offset_bytes`` of its header in the node's memory, ``length_bytes`` of its payload.

    ``checksum`` is 0 in a write grant: the writer computes it. ``index`` is the key's place in the batch asked for.
    """

    index: int
    key: bytes
    offset_bytes: int
    length_bytes: int
    checksum: int = 0


class Grant(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The signed body. ``holder`` is the ticket's or lease's id, ``deadline_ms`` is on the manager's clock."""

    access: int
    node: int
    incarnation: int
    epoch: int
    holder: int
    deadline_ms: int
    tenant: int
    extents: list[Extent]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Grant)


def sign(grant: Grant, secret: bytes) -> bytes:
    """MAC and encoded grant."""
    body = _encoder.encode(grant)
    return hmac.digest(secret, body, "sha256")[:MAC_BYTES] + body


def read(signed: bytes) -> Grant:
    """The grant inside, unchecked: for the client, who has no secret.

    Raises:
        ProtocolError: it is no grant.
    """
    try:
        return _decoder.decode(signed[MAC_BYTES:])
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ProtocolError(f"not a valid grant: {error}") from error


def verify(signed: bytes, secret: bytes, *, access: Access, incarnation: int, epoch: int, manager_now_ms: int) -> Grant:
    """The grant inside, checked for a slab server.

    Args:
        manager_now_ms: the manager's clock as the slab server knows it, never early.

    Raises:
        Unauthorized: the MAC is wrong. Refused: another access, incarnation or epoch, or it has ended.
    """
    expected = hmac.digest(secret, signed[MAC_BYTES:], "sha256")[:MAC_BYTES]
    if not hmac.compare_digest(expected, signed[:MAC_BYTES]):
        raise Unauthorized("the grant's signature is wrong: client, manager and slab must share one cluster")
    grant = read(signed)
    if grant.access != access:
        raise Refused(f"the grant allows access {grant.access}, not {int(access)}")
    if grant.incarnation != incarnation:
        raise Refused(f"the grant is for incarnation {grant.incarnation}, this is {incarnation}")
    if grant.epoch != epoch:
        raise Refused(f"the grant is from the manager's epoch {grant.epoch}, now it is {epoch}")
    if grant.deadline_ms <= manager_now_ms:
        raise Refused("the grant has ended")
    return grant
