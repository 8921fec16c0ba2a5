"""Where KV lies in vLLM's memory: for each layer, planes of blocks, each block of a plane one dense run of bytes.

What is inside a block is the engine's affair (on a CPU, keys are packed for the instruction set): a block is opaque
bytes, and everything that could decide their order is in :attr:`Pages.layout`, and so in every key. A layout that is
not understood is refused: guessing would give wrong tokens.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from polarkv_client.buffers import Views
from polarkv_client.connectors.vllm.plan import SCRATCH
from polarkv_client.errors import ConfigurationError

_FIELD = "kv_caches"


@dataclass(frozen=True)
class Plane:
    """One layer's keys, values or both: block b is ``size_bytes`` long and begins at ``offset + b * stride_bytes``."""

    tensor: Any
    offset_bytes: int  # from the beginning of the tensor's memory
    stride_bytes: int
    size_bytes: int


class Pages:
    """The KV caches of one worker.

    Args:
        kv_caches: as vLLM registers them, by layer.
        num_blocks: blocks that the engine's scheduler knows.
        page_bytes: bytes that one block of one layer has, by layer, as the engine says; every tensor must fit it.

    Raises:
        ConfigurationError: a tensor's layout is not understood; says which and why.
    """

    def __init__(self, kv_caches: Mapping[str, Any], num_blocks: int, page_bytes: Mapping[str, int]) -> None:
        if not kv_caches:
            raise ConfigurationError(_FIELD, 0, "the engine has registered no KV cache")
        self.num_blocks = num_blocks
        self.names = sorted(kv_caches, key=_natural)
        self.planes: list[Plane] = []
        for name in self.names:
            self.planes += _planes(name, kv_caches[name], num_blocks, page_bytes.get(name, 0))
        self.block_bytes = sum(plane.size_bytes for plane in self.planes)
        first = kv_caches[self.names[0]]
        self.device: Any = first.device
        shapes = {name: _shape(kv_caches[name], num_blocks) for name in self.names}
        # Which layer has which type and shape, too: engines may keep some in another type, each other ones.
        each = "\n".join(f"{name} {shape}" for name, shape in shapes.items())
        self.layout: dict[str, object] = {
            "layers": hashlib.sha256(each.encode()).hexdigest()[:16],
            "shapes": sorted(set(shapes.values())),
            "planes": len(self.planes),
            "block_bytes": self.block_bytes,
        }


class CpuViews:
    """Views of blocks in a CPU's memory: neighbouring blocks are one run, so that a chunk is few runs."""

    def __init__(self, pages: Pages) -> None:
        self._planes = [(_bytes_of(plane), plane.stride_bytes, plane.size_bytes) for plane in pages.planes]

    def chunk(self, blocks: Sequence[int], scratch: memoryview) -> Views:
        """One chunk's bytes, plane by plane, block by block; what is :data:`SCRATCH` lies in ``scratch``."""
        runs = runs_of(blocks)
        views: Views = []
        used = 0
        for memory, stride, size in self._planes:
            for start, count in runs:
                if start == SCRATCH:
                    views.append(scratch[used : used + count * size])
                    used += count * size
                elif stride == size:
                    views.append(memory[start * size : (start + count) * size])
                else:
                    views += (memory[at * stride : at * stride + size] for at in range(start, start + count))
        return views


def runs_of(blocks: Sequence[int]) -> list[tuple[int, int]]:
    """Blocks as (first, count) of neighbours; SCRATCH is its own neighbour."""
    runs: list[tuple[int, int]] = []
    for block in blocks:
        if runs:
            start, count = runs[-1]
            if block == (SCRATCH if start == SCRATCH else start + count):
                runs[-1] = (start, count + 1)
                continue
        runs.append((block, 1))
    return runs


def _planes(name: str, tensor: Any, num_blocks: int, page_bytes: int) -> list[Plane]:
    if not hasattr(tensor, "data_ptr"):
        kind = f"is a {type(tensor).__name__}, not one tensor: this kind of layer is unknown"
        raise ConfigurationError(_FIELD, name, kind)
    item = tensor.element_size()
    shape, strides = tuple(tensor.shape), tuple(tensor.stride())
    if num_blocks <= 2:
        raise _unknown(name, tensor, "with two blocks or fewer, keys, values and blocks cannot be told apart")
    if shape[0] == num_blocks:
        planes = [Plane(tensor, 0, strides[0] * item, _dense(name, tensor, 1))]
    elif len(shape) > 2 and shape[0] == 2 and shape[1] == num_blocks:  # keys, then values
        size = _dense(name, tensor, 2)
        planes = [Plane(tensor, half * strides[0] * item, strides[1] * item, size) for half in (0, 1)]
    else:
        raise _unknown(name, tensor, f"no dimension is that of the {num_blocks} blocks")
    if page_bytes and sum(plane.size_bytes for plane in planes) != page_bytes:
        raise _unknown(name, tensor, f"a block has not the {page_bytes} bytes that the engine says")
    return planes


def _dense(name: str, tensor: Any, outer: int) -> int:
    """Bytes of one block, whose dimensions are those from ``outer`` on: in any order, but without gaps."""
    inner = sorted(zip(tensor.stride()[outer:], tensor.shape[outer:], strict=True))
    expected = 1
    for stride, size in inner:
        if size > 1 and stride != expected:
            raise _unknown(name, tensor, "a block has gaps")
        expected *= size
    return int(expected * tensor.element_size())


def _unknown(name: str, tensor: Any, why: str) -> ConfigurationError:
    found = f"{name}: shape {tuple(tensor.shape)}, strides {tuple(tensor.stride())}, {tensor.dtype}"
    fix = f"{why}; this layout is not supported: run without this connector, or set enabled=false"
    return ConfigurationError(_FIELD, found, fix)


def _shape(tensor: Any, num_blocks: int) -> str:
    """Shape and strides without the number of blocks, which differs from host to host."""
    item = tensor.element_size()
    shape = ["B" if size == num_blocks else str(size) for size in tensor.shape]
    order = sorted(range(len(shape)), key=lambda dim: (-tensor.stride()[dim], dim))
    return f"{'x'.join(shape)} order {''.join(map(str, order))} {tensor.dtype} {item}"


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _bytes_of(plane: Plane) -> memoryview:
    """A plane's memory on the CPU, from its first block to the end of the last; it keeps the tensor alive."""
    address = plane.tensor.data_ptr() + plane.offset_bytes
    storage = plane.tensor.untyped_storage()
    length = storage.data_ptr() + storage.nbytes() - address
    block = (ctypes.c_ubyte * length).from_address(address)
    block.owner = plane.tensor
    return memoryview(block).cast("B")
