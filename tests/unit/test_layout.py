"""The header of slots and files."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polarkv_client import layout
from polarkv_client.errors import Damaged
from polarkv_client.layout import Header, expect_header, pack_header, stride_bytes, unpack_header

KEY = bytes(range(32))
HEADERS = st.builds(
    Header,
    st.binary(min_size=32, max_size=32),
    st.integers(0, layout.MAX_PAYLOAD_BYTES),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**32 - 1),
)


def test_golden_vectors() -> None:
    # Files on disk outlive versions.
    assert pack_header(Header(KEY, 5, 0x1122334455667788, 7)).hex() == (
        "504b564301000000000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"
        "050000000000000088776655443322110700000055582aab"
    )
    assert layout.checksum([b"hello"]) == 10760762337991515389
    assert layout.tenant_number("default") == 1789466081


@given(HEADERS)
def test_a_header_comes_back(header: Header) -> None:
    assert unpack_header(pack_header(header)) == header
    assert unpack_header(memoryview(pack_header(header) + b"payload")) == header


@given(HEADERS, st.integers(0, 8 * layout.HEADER_BYTES - 1))
def test_any_flipped_bit_is_noticed(header: Header, bit: int) -> None:
    raw = bytearray(pack_header(header))
    raw[bit // 8] ^= 1 << bit % 8
    assert unpack_header(raw) is None


@given(st.binary(max_size=80))
def test_garbage_is_no_header(raw: bytes) -> None:
    assert unpack_header(raw) is None


def test_an_erased_header_is_none() -> None:
    assert unpack_header(layout.ERASED) is None


def test_what_is_expected_is_told_apart() -> None:
    raw = pack_header(Header(KEY, 5, 1, 0))
    assert expect_header(raw, KEY, 5).checksum == 1
    with pytest.raises(Damaged, match="no valid header"):
        expect_header(layout.ERASED, KEY, 5)
    with pytest.raises(Damaged, match="in its place"):
        expect_header(raw, bytes(32), 5)
    with pytest.raises(Damaged, match="5 bytes long, expected 6"):
        expect_header(raw, KEY, 6)


@given(st.integers(0, layout.MAX_PAYLOAD_BYTES))
def test_the_stride_holds_header_and_payload_and_no_page_more(length_bytes: int) -> None:
    stride = stride_bytes(length_bytes)
    assert stride % layout.ALIGNMENT_BYTES == 0
    assert 0 <= stride - layout.HEADER_BYTES - length_bytes < layout.ALIGNMENT_BYTES


@given(st.lists(st.binary(max_size=40), max_size=6))
def test_the_checksum_does_not_depend_on_the_cuts(parts: list[bytes]) -> None:
    assert layout.checksum(parts) == layout.checksum([b"".join(parts)])
