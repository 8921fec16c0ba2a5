"""Whatever the engine has becomes flat byte views of the same memory."""

from __future__ import annotations

import ctypes
import gc
import mmap
import weakref

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polarkv_client.buffers import flatten, flatten_all, length_of, pieces
from polarkv_client.errors import ConfigurationError


class Tensor:
    """What torch's CPU tensors show of themselves; bfloat16 has no format in the buffer protocol."""

    def __init__(self, raw: bytes, *, device: str = "cpu", contiguous: bool = True) -> None:
        self._raw = ctypes.create_string_buffer(raw, len(raw))
        self._size = len(raw)
        self._contiguous = contiguous
        self.device = type("device", (), {"type": device})
        self.shape = (len(raw) // 2,)

    def data_ptr(self) -> int:
        return ctypes.addressof(self._raw)

    def is_contiguous(self) -> bool:
        return self._contiguous

    def numel(self) -> int:
        return self._size // 2

    def element_size(self) -> int:
        return 2


def test_plain_buffers() -> None:
    mapped = mmap.mmap(-1, 8)
    for value in (bytearray(8), memoryview(bytearray(8)), mapped, np.zeros(2, "f4"), np.zeros((2, 2), "u2")):
        (view,) = flatten(value, "buffers", writable=True)
        assert (view.nbytes, view.format, view.ndim) == (8, "B", 1)
        view[:] = b"12345678"
        assert bytes(memoryview(value).cast("B")) == b"12345678"  # type: ignore[arg-type]
        del view
    mapped.close()


def test_read_only_buffers_can_be_stored_but_not_loaded_into() -> None:
    assert flatten(b"abc", "buffers", writable=False)[0] == b"abc"
    frozen = np.zeros(4)
    frozen.flags.writeable = False
    for value in (b"abc", frozen):
        with pytest.raises(ConfigurationError, match=r"buffers\[0\].*writable"):
            flatten_all([value], "buffers", writable=True)


def test_memory_order_is_kept() -> None:
    array = np.asfortranarray(np.arange(6, dtype="u1").reshape(2, 3))
    (view,) = flatten(array, "buffers", writable=True)
    assert bytes(view) == bytes([0, 3, 1, 4, 2, 5])


def test_a_type_without_a_buffer_format() -> None:
    array = np.zeros(4, "datetime64[s]")
    (view,) = flatten(array, "buffers", writable=True)
    view[0] = 7
    assert array.view("u1")[0] == 7


def test_a_tensor_is_its_memory_and_stays_alive() -> None:
    tensor = Tensor(b"abcdefgh")
    (view,) = flatten(tensor, "buffers", writable=True)
    view[0] = ord("X")
    assert tensor._raw.raw == b"Xbcdefgh"
    alive = weakref.ref(tensor)
    del tensor
    gc.collect()
    assert alive() is not None
    assert bytes(view[:2]) == b"Xb"
    del view
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Tensor(b"ab", device="cuda"), "cuda"),
        (Tensor(b"ab", contiguous=False), "not contiguous"),
        (Tensor(b""), "0 bytes"),
        (np.zeros((4, 4))[:, 1], "not contiguous"),
        (bytearray(), "0 bytes"),
        (np.zeros((0, 4)), "0 bytes"),
        ([], "at least one"),
        ("text", "str"),
        (None, "NoneType"),
        (7, "int"),
    ],
)
def test_what_cannot_be_used_is_named(value: object, text: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"buffers\[1\].*{text}"):
        flatten_all([bytearray(1), value], "buffers", writable=True)


def test_a_part_of_a_scatter_list_is_named() -> None:
    with pytest.raises(ConfigurationError, match=r"buffers\[0\]\[1\]"):
        flatten_all([[bytearray(1), b"x"]], "buffers", writable=True)


def test_a_scatter_list_is_one_payload() -> None:
    views = flatten([bytearray(3), np.zeros(2, "u2")], "buffers", writable=True)
    assert length_of(views) == 7


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(1, 50))
def test_pieces_are_the_same_bytes_in_order(sizes: list[int], piece_bytes: int) -> None:
    payload = bytes(i % 251 for i in range(sum(sizes)))
    views, start = [], 0
    for size in sizes:
        views.append(memoryview(payload)[start : start + size])
        start += size
    cut = list(pieces(views, piece_bytes))
    assert b"".join(bytes(view) for piece in cut for view in piece) == payload
    lengths = [length_of(piece) for piece in cut]
    assert all(length == piece_bytes for length in lengths[:-1])
    assert 0 < lengths[-1] <= piece_bytes


def test_a_vector_never_exceeds_what_one_call_takes() -> None:
    views = [memoryview(b"x")] * 2000
    cut = list(pieces(views, 1 << 20))
    assert max(len(piece) for piece in cut) <= 1023  # and the header before them
    assert sum(len(piece) for piece in cut) == 2000
