"""The caller's buffers: whatever the engine has, as flat byte views, never copied.

A chunk's buffer is one object or a list of them (a scatter list, in payload order). An object is anything with the
buffer protocol (bytes, bytearray, memoryview, mmap, numpy arrays) or a tensor on the CPU that says where its memory
is (torch, also in types that numpy lacks, as bfloat16). Bytes are taken in memory order.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any

from polarkv_client.errors import ConfigurationError

Views = list[memoryview]
_MAX_VECTOR = 512  # the kernel takes 1024 a call


def flatten(value: object, field: str, *, writable: bool) -> Views:
    """One chunk's buffer as flat views of unsigned bytes.

    Raises:
        ConfigurationError: it is empty, not contiguous, not on the CPU, or read-only where it will be written.
    """
    if isinstance(value, (list, tuple)):
        views = [_view(part, f"{field}[{place}]", writable) for place, part in enumerate(value)]
        if not views:
            raise ConfigurationError(field, value, "pass at least one buffer for each chunk")
        return views
    return [_view(value, field, writable)]


def flatten_all(values: Sequence[object], field: str, *, writable: bool) -> list[Views]:
    """As :func:`flatten` for every chunk."""
    return [flatten(value, f"{field}[{place}]", writable=writable) for place, value in enumerate(values)]


def length_of(views: Views) -> int:
    """Bytes of a chunk's views together."""
    return views[0].nbytes if len(views) == 1 else sum(view.nbytes for view in views)


def pieces(views: Views, piece_bytes: int) -> Iterator[Views]:
    """The same bytes in runs of at most ``piece_bytes``, each a vector for one system call."""
    run: Views = []
    room = piece_bytes
    for view in views:
        size = view.nbytes
        if not run and size <= piece_bytes and len(views) == 1:
            yield [view]
            return
        start = 0
        while start < size:
            end = min(start + room, size)
            run.append(view[start:end])
            room -= end - start
            start = end
            if not room or len(run) == _MAX_VECTOR:
                yield run
                run, room = [], piece_bytes
    if run:
        yield run


class _Py_buffer(ctypes.Structure):
    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_void_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


def address_of(view: memoryview) -> int:
    """Where a contiguous view's bytes lie, read-only ones too. It holds while the view is not released."""
    if not view.readonly and view.nbytes:
        return ctypes.addressof(ctypes.c_char.from_buffer(view))  # ten times faster
    buffer = _Py_buffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(view), ctypes.byref(buffer), 0)
    address = buffer.buf or 0
    ctypes.pythonapi.PyBuffer_Release(ctypes.byref(buffer))
    return address


def _view(value: Any, field: str, writable: bool) -> memoryview:
    if type(value) is memoryview and value.ndim == 1 and value.format == "B" and value.contiguous:
        view = value
    elif callable(getattr(value, "data_ptr", None)):
        view = _tensor(value, field)
    else:
        view = _buffer(value, field)
    if not view.nbytes:
        raise ConfigurationError(field, "0 bytes", "pass a buffer that is not empty")
    if writable and view.readonly:
        raise ConfigurationError(field, type(value).__name__, "a load writes into it: pass a writable buffer")
    return view


def _buffer(value: Any, field: str) -> memoryview:
    try:
        view = memoryview(value)
    except (TypeError, ValueError, BufferError) as error:
        # numpy has no buffer format for types such as ml_dtypes' bfloat16, but shows their bytes.
        if hasattr(value, "__array_interface__"):
            return _array(value, field)
        raise ConfigurationError(
            field, type(value).__name__, "pass bytes, memoryview, mmap, a numpy array or a CPU tensor"
        ) from error
    if not view.nbytes:
        return memoryview(b"")
    if view.c_contiguous:
        return view.cast("B")
    if view.f_contiguous and hasattr(value, "T"):
        return memoryview(value.T).cast("B")
    raise ConfigurationError(
        field, f"shape {view.shape}, strides {view.strides}", "is not contiguous: pass its parts as a list"
    )


def _array(value: Any, field: str) -> memoryview:
    if value.flags.f_contiguous and not value.flags.c_contiguous:
        value = value.T
    if not value.flags.c_contiguous:
        raise ConfigurationError(field, f"shape {value.shape}", "is not contiguous: pass its parts as a list")
    return memoryview(value.reshape(-1).view("u1"))


def _tensor(value: Any, field: str) -> memoryview:
    device = getattr(getattr(value, "device", None), "type", "cpu")
    if device != "cpu":
        raise ConfigurationError(field, f"a tensor on {device}", "copy it to a (pinned) CPU tensor first")
    if not value.is_contiguous():
        raise ConfigurationError(field, f"shape {tuple(value.shape)}", "is not contiguous: pass its parts as a list")
    size_bytes = value.numel() * value.element_size()
    if not size_bytes:
        return memoryview(b"")
    block = (ctypes.c_ubyte * size_bytes).from_address(value.data_ptr())
    block.owner = value  # the view keeps the block alive, the block the tensor
    return memoryview(block).cast("B")
