"""Grants: nobody without the secret can make or change one, and each ends."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polarkv_client.errors import ProtocolError, Refused, Unauthorized
from polarkv_client.protocol import grants
from polarkv_client.protocol.grants import MAC_BYTES, Access, Extent, Grant, sign, verify

SECRET = b"secret"
GRANT = Grant(
    Access.READ, 1, 2, 3, 4, 5000, 6, [Extent(0, b"k" * 32, 4096, 10, 99), Extent(3, b"l" * 32, 8192, 20, 98)]
)


def check(signed: bytes, **changes: object) -> Grant:
    expected = {"access": Access.READ, "incarnation": 2, "epoch": 3, "manager_now_ms": 4999} | changes
    return verify(signed, SECRET, **expected)  # type: ignore[arg-type]


def test_golden_vector() -> None:
    short_grant = Grant(0, 1, 2, 3, 4, 5, 6, [Extent(0, b"k" * 32, 4096, 10, 99)])
    assert sign(short_grant, SECRET).hex() == (
        "6674d5cdfa380abcde312f6bb87bf8f69800010203040506919500c420" + "6b" * 32 + "cd10000a63"
    )


def test_a_grant_comes_back() -> None:
    assert check(sign(GRANT, SECRET)) == GRANT
    assert grants.read(sign(GRANT, SECRET)) == GRANT


@given(st.data())
def test_any_changed_byte_is_noticed(data: st.DataObject) -> None:
    signed = bytearray(sign(GRANT, SECRET))
    place = data.draw(st.integers(0, len(signed) - 1))
    signed[place] ^= data.draw(st.integers(1, 255))
    with pytest.raises(Unauthorized):
        check(bytes(signed))


@given(st.binary(max_size=64))
def test_garbage_is_refused(raw: bytes) -> None:
    with pytest.raises(Unauthorized):
        check(raw)
    with pytest.raises(ProtocolError):
        grants.read(b"m" * MAC_BYTES + b"\xc1" + raw)


def test_another_secret_is_refused() -> None:
    with pytest.raises(Unauthorized):
        check(sign(GRANT, b"another"))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"access": Access.WRITE}, "access"),
        ({"incarnation": 3}, "incarnation"),
        ({"incarnation": 1}, "incarnation"),
        ({"epoch": 4}, "epoch"),
        ({"manager_now_ms": 5000}, "ended"),
    ],
)
def test_what_it_does_not_allow_is_refused(changes: dict[str, object], text: str) -> None:
    with pytest.raises(Refused, match=text):
        check(sign(GRANT, SECRET), **changes)


def test_a_newer_managers_fields_are_ignored() -> None:
    body = msgspec.msgpack.encode([*msgspec.structs.astuple(GRANT), "new"])
    assert grants.read(b"m" * MAC_BYTES + body) == GRANT
