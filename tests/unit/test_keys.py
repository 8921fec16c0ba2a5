"""Namespaces and chunk keys: golden vectors, and nothing that two different inputs share."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polarkv_client.errors import ConfigurationError
from polarkv_client.keys import (
    Namespace,
    chunk_keys,
    encode_tokens,
    golden_digest,
    iter_chunk_keys,
    join_keys,
    short,
    split_keys,
)

NAMESPACE = Namespace(model_id="m", chunk_tokens=2)
TEXT = {"weights_fingerprint", "kv_dtype", "layout", "lora_id", "tenant_salt", "model_id"}


def test_golden_vectors() -> None:
    # Keys are file names on disk and travel between versions: these may never change.
    assert golden_digest().hex() == "f19e15f784893c733f26915bd4aaa3035cb65fa0bcc5f745c5734f431ea96fb5"
    assert NAMESPACE.root().hex() == "194e23c45cd3d7cb98db576b4c3def47ac42a715df516d7934b4e01702ca5abc"
    assert [key.hex() for key in chunk_keys(NAMESPACE, [1, 2, 3, 4, 5])] == [
        "03eb2d5072d6caa6f7a6aa5096194fb4766e2d108c1f6ca604691faf9f318fcf",
        "a0d8591555e18968f27f6d0a32de2186ecb1feb10ab706af8d63f5296c46b8fb",
    ]


def test_the_chain_by_hand() -> None:
    first = hashlib.sha256(NAMESPACE.root() + b"\0\0\0\0" + b"\1\0\0\0\2\0\0\0").digest()
    second = hashlib.sha256(first + b"\5\0\0\0image" + b"\3\0\0\0\4\0\0\0").digest()
    assert chunk_keys(NAMESPACE, [1, 2, 3, 4], {1: b"image"}) == [first, second]


def test_keys_do_not_depend_on_the_process() -> None:
    program = "from polarkv_client.keys import golden_digest; print(golden_digest().hex())"
    out = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        check=True,
        text=True,
        timeout=30,
        env={"PYTHONHASHSEED": "7"},
    )
    assert out.stdout.strip() == golden_digest().hex()


@pytest.mark.parametrize("field", [field.name for field in fields(Namespace)])
def test_every_field_changes_the_root(field: str) -> None:
    base = Namespace(model_id="m", chunk_tokens=2, tp_size=8, pp_size=8)
    change: dict[str, Any] = {field: "x" if field in TEXT else getattr(base, field) + 1}
    changed = replace(base, **change)
    assert changed.root() != base.root()


@given(st.tuples(*[st.text(max_size=4)] * 2), st.tuples(*[st.text(max_size=4)] * 2))
def test_no_two_namespaces_share_an_encoding(left: tuple[str, str], right: tuple[str, str]) -> None:
    encoded = [
        Namespace(model_id="m", chunk_tokens=1, lora_id=lora, tenant_salt=salt).encode() for lora, salt in (left, right)
    ]
    assert (encoded[0] == encoded[1]) == (left == right)


@given(st.lists(st.integers(0, 2**32 - 1), max_size=24), st.lists(st.integers(0, 2**32 - 1), max_size=24))
def test_keys_are_equal_exactly_as_far_as_the_tokens_are(left: list[int], right: list[int]) -> None:
    same = 0
    while same < min(len(left), len(right)) and left[same] == right[same]:
        same += 1
    keys = [chunk_keys(NAMESPACE, tokens) for tokens in (left, right)]
    assert [len(chain) for chain in keys] == [len(left) // 2, len(right) // 2]
    for place, (a, b) in enumerate(zip(*keys, strict=False)):
        assert (a == b) == (place < same // 2)


def test_an_extra_enters_at_its_chunk_and_stays() -> None:
    plain = chunk_keys(NAMESPACE, range(8))
    marked = chunk_keys(NAMESPACE, range(8), {2: b"x"})
    assert [a == b for a, b in zip(plain, marked, strict=True)] == [True, True, False, False]


def test_the_lazy_form_is_the_same() -> None:
    assert list(iter_chunk_keys(NAMESPACE, range(9))) == chunk_keys(NAMESPACE, range(9))


@pytest.mark.parametrize("tokens", [[-1], [2**32], [1.5], ["a"], [None]])
def test_tokens_that_are_none_are_named(tokens: list[object]) -> None:
    with pytest.raises(ConfigurationError, match="tokens"):
        encode_tokens(tokens)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value"),
    [("model_id", ""), ("chunk_tokens", 0), ("tp_rank", 1), ("pp_rank", -1), ("page_size", -1), ("page_size", 2**64)],
)
def test_a_bad_field_is_named(field: str, value: object) -> None:
    change: dict[str, Any] = {field: value}
    with pytest.raises(ConfigurationError, match=f"namespace.{field}"):
        replace(NAMESPACE, **change)


def test_joined_keys_split_again() -> None:
    keys = chunk_keys(NAMESPACE, range(6))
    assert list(split_keys(join_keys(keys))) == keys
    assert short(keys[0]) == keys[0].hex()[:12]
    with pytest.raises(ConfigurationError, match="33 bytes"):
        split_keys(b"x" * 33)
