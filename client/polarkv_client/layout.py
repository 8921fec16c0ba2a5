"""How a chunk lies in a slot of memory and in a file: a 64-byte header, then the payload, padded to 4 KiB.

Memory and disk share one format, so that a tier change is one O_DIRECT transfer without a copy. The header is written
last and read first: a slot or file whose header does not match its key, length and checksum holds nothing.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable
from typing import NamedTuple

import xxhash

from polarkv_client.errors import Damaged
from polarkv_client.keys import KEY_BYTES, short

ALIGNMENT_BYTES = 4096
HEADER_BYTES = 64
MAX_PAYLOAD_BYTES = 1 << 30
MOST_VOLUMES = 256  # one byte of a key says on which its file is

_MAGIC = b"PKVC"
_VERSION = 1
_HEADER = struct.Struct("<4sHH32sQQII")  # magic, version, reserved, key, length, checksum, tenant, crc of all before
assert _HEADER.size == HEADER_BYTES
_CRC = struct.Struct("<I")
ERASED = bytes(HEADER_BYTES)


class Header(NamedTuple):
    """What a slot or file says of itself. ``length_bytes`` counts the payload alone."""

    key: bytes
    length_bytes: int
    checksum: int
    tenant: int


def stride_bytes(length_bytes: int) -> int:
    """Bytes that a payload takes in a slot or file: header and payload, rounded up to the alignment."""
    return -(-(HEADER_BYTES + length_bytes) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def volume_of(key: bytes, volumes: int) -> int:
    """Which of a disk server's volumes, in the order of their set, the file of a key is on."""
    return key[-1] % volumes


def pack_header(header: Header) -> bytes:
    """The 64 bytes of a header."""
    raw = _HEADER.pack(_MAGIC, _VERSION, 0, header.key, header.length_bytes, header.checksum, header.tenant, 0)
    return raw[:-4] + _CRC.pack(zlib.crc32(raw[:-4]))


def unpack_header(raw: bytes | bytearray | memoryview) -> Header | None:
    """The header in ``raw`` (its first 64 bytes), or None when there is no valid one."""
    if len(raw) < HEADER_BYTES:
        return None
    raw = bytes(raw[:HEADER_BYTES])
    magic, version, _, key, length_bytes, checksum, tenant, crc = _HEADER.unpack(raw)
    if magic != _MAGIC or version != _VERSION or crc != zlib.crc32(raw[:-4]) or length_bytes > MAX_PAYLOAD_BYTES:
        return None
    return Header(key, length_bytes, checksum, tenant)


def expect_header(raw: bytes | bytearray | memoryview, key: bytes, length_bytes: int) -> Header:
    """The header in ``raw``, which must be that of ``key`` with ``length_bytes``.

    Raises:
        Damaged: there is none, or it is another's.
    """
    header = unpack_header(raw)
    if header is None:
        raise Damaged(f"{short(key)}: no valid header")
    if header.key != key:
        raise Damaged(f"{short(key)}: found the chunk {short(header.key)} in its place")
    if header.length_bytes != length_bytes:
        raise Damaged(f"{short(key)}: {header.length_bytes} bytes long, expected {length_bytes}")
    return header


def checksum(parts: Iterable[bytes | bytearray | memoryview]) -> int:
    """XXH3-64 of the payload's parts in order (64 bits, unsigned)."""
    digest = xxhash.xxh3_64()
    for part in parts:
        digest.update(part)
    return digest.intdigest()


def tenant_number(tenant: str) -> int:
    """The 32 bits by which headers name a tenant."""
    return xxhash.xxh32_intdigest(tenant.encode())


assert len(ERASED) == HEADER_BYTES and KEY_BYTES == 32
