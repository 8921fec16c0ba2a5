"""An SGLang plug-in for tests: lets the hierarchical cache's host pool be used where there is no GPU.

Replaced are the copy kernels between device and host pool, which exist for GPUs only, and the pinning of host memory.
Everything else (tree, controller, threads, pools, scheduler) is the engine's own. SGLang finds it by its entry point,
in every process, and calls :func:`register`.

Shapes: a device buffer is one layer, ``(tokens, …)``. Host buffers by layout: layer first, one layer as on the device;
page first, ``(tokens, layers, …)``; page first direct, ``(pages, layers, tokens of a page, …)``. A table of pointers is
a tensor of addresses, one a layer. Indices count tokens.
"""

from __future__ import annotations

import ctypes
import importlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

_POOLS = ("sglang.srt.mem_cache.pool_host.mha", "sglang.srt.mem_cache.pool_host.mla")
Tensor = Any


def _rows(address: Tensor, count: int, row_bytes: int) -> Tensor:
    """``count`` rows of bytes at an address."""
    block = (ctypes.c_uint8 * (count * row_bytes)).from_address(int(address))
    return torch.frombuffer(block, dtype=torch.uint8).view(count, row_bytes)


def _copy_layers(
    sources: Tensor, targets: Tensor, source_rows: Tensor, target_rows: Tensor, row_bytes: int, layers: int
) -> None:
    """Layer by layer, between two tables of pointers."""
    reach, target_reach = int(source_rows.max()) + 1, int(target_rows.max()) + 1
    for layer in range(layers):
        rows = _rows(sources[layer], reach, row_bytes)[source_rows.long()]
        _rows(targets[layer], target_reach, row_bytes)[target_rows.long()] = rows


def _gather_layers(sources: Tensor, target: Tensor, source_rows: Tensor, target_rows: Tensor, row_bytes: int) -> None:
    """Layer by layer, from a table of pointers into a page-first buffer."""
    reach = int(source_rows.max()) + 1
    for layer in range(target.shape[1]):
        rows = _rows(sources[layer], reach, row_bytes)[source_rows.long()]
        target[target_rows.long(), layer] = rows.view(target.dtype).view(len(rows), *target.shape[2:])


def transfer_kv_direct(
    src_layers: Sequence[Tensor], dst_layers: Sequence[Tensor], src_indices: Tensor, dst_indices: Tensor, page_size: int
) -> None:
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices.long()] = source[src_indices.long()]


def transfer_kv_per_layer_direct_pf_lf(
    src_ptrs: Sequence[Tensor], dst_ptrs: Sequence[Tensor], src_indices: Tensor, dst_indices: Tensor,
    layer_id: int, page_size: int,
) -> None:  # fmt: skip
    place = src_indices.long()
    for source, target in zip(src_ptrs, dst_ptrs, strict=True):
        target[dst_indices.long()] = source[place // page_size, layer_id, place % page_size]


def transfer_kv_all_layer_direct_lf_pf(
    src_ptrs: Sequence[Tensor], dst_ptrs: Sequence[Tensor], src_indices: Tensor, dst_indices: Tensor, page_size: int
) -> None:
    place = dst_indices.long()
    layers = len(src_ptrs) // len(dst_ptrs)
    for number, source in enumerate(src_ptrs):
        target = dst_ptrs[number // layers]
        target[place // page_size, number % layers, place % page_size] = source[src_indices.long()]


def transfer_kv_per_layer(
    src_k: Tensor, dst_k: Tensor, src_v: Tensor, dst_v: Tensor, src_indices: Tensor, dst_indices: Tensor, item_size: int
) -> None:
    dst_k[dst_indices.long()] = src_k[src_indices.long()]
    dst_v[dst_indices.long()] = src_v[src_indices.long()]


def transfer_kv_per_layer_pf_lf(
    src_k: Tensor, dst_k: Tensor, src_v: Tensor, dst_v: Tensor, src_indices: Tensor, dst_indices: Tensor,
    layer_id: int, item_size: int, src_layout_dim: int,
) -> None:  # fmt: skip
    dst_k[dst_indices.long()] = src_k[src_indices.long(), layer_id]
    dst_v[dst_indices.long()] = src_v[src_indices.long(), layer_id]


def transfer_kv_all_layer(
    src_k_layers: Tensor, dst_k_layers: Tensor, src_v_layers: Tensor, dst_v_layers: Tensor,
    src_indices: Tensor, dst_indices: Tensor, item_size: int, num_layers: int,
) -> None:  # fmt: skip
    _copy_layers(src_k_layers, dst_k_layers, src_indices, dst_indices, item_size, num_layers)
    _copy_layers(src_v_layers, dst_v_layers, src_indices, dst_indices, item_size, num_layers)


def transfer_kv_all_layer_lf_pf(
    src_k_layers: Tensor, dst_k: Tensor, src_v_layers: Tensor, dst_v: Tensor, src_indices: Tensor, dst_indices: Tensor,
    item_size: int, dst_layout_dim: int, num_layers: int,
) -> None:  # fmt: skip
    _gather_layers(src_k_layers, dst_k, src_indices, dst_indices, item_size)
    _gather_layers(src_v_layers, dst_v, src_indices, dst_indices, item_size)


def transfer_kv_per_layer_mla(
    src: Tensor, dst: Tensor, src_indices: Tensor, dst_indices: Tensor, item_size: int
) -> None:
    dst[dst_indices.long()] = src[src_indices.long()]


def transfer_kv_per_layer_mla_pf_lf(
    src: Tensor, dst: Tensor, src_indices: Tensor, dst_indices: Tensor,
    layer_id: int, item_size: int, src_layout_dim: int,
) -> None:  # fmt: skip
    dst[dst_indices.long()] = src[src_indices.long(), layer_id]


def transfer_kv_all_layer_mla(
    src_layers: Tensor, dst_layers: Tensor, src_indices: Tensor, dst_indices: Tensor, item_size: int, num_layers: int
) -> None:
    _copy_layers(src_layers, dst_layers, src_indices, dst_indices, item_size, num_layers)


def transfer_kv_all_layer_mla_lf_pf(
    src_layers: Tensor, dst: Tensor, src_indices: Tensor, dst_indices: Tensor,
    item_size: int, dst_layout_dim: int, num_layers: int,
) -> None:  # fmt: skip
    _gather_layers(src_layers, dst, src_indices, dst_indices, item_size)


def register() -> None:
    """Put the copies above in the place of the kernels, and go without pinned memory."""
    copies = {name: value for name, value in globals().items() if name.startswith("transfer_kv")}
    for name in _POOLS:
        vars(importlib.import_module(name)).update(copies)
    common = importlib.import_module("sglang.srt.mem_cache.pool_host.common")
    vars(common)["_cuda_host_register"] = lambda *_, **__: None
    base = importlib.import_module("sglang.srt.mem_cache.pool_host.base")
    vars(base)["HICACHE_HOST_MEMORY_RESERVE_BYTES"] = 1 << 30
    base.HostKVCache.__init__ = _unpinned(base.HostKVCache.__init__)
    # Adapters are copied from pinned memory; torch has none without a GPU.
    for name in ("tensor", "empty", "zeros", "ones", "empty_like", "zeros_like"):
        setattr(torch, name, _pageable(getattr(torch, name)))
    setattr(torch.Tensor, "pin_memory", lambda self, *_: self)  # noqa: B010  (the other form is mypy's error)
    # Of both ways to compute MLA, torch's own attention can do this one.
    handlers = importlib.import_module("sglang.srt.models.deepseek_common.attention_backend_handler")
    handlers.AttentionBackendRegistry.register("torch_native", lambda *_: handlers.AttnForwardMethod.MLA)


def _pageable(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def without(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        return make(*args, **kwargs)

    return without


def _unpinned(init: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(init)

    def without(self: Any, *args: Any, **kwargs: Any) -> None:
        bound = signature.bind(self, *args, **kwargs)
        bound.arguments["pin_memory"] = False
        init(*bound.args, **bound.kwargs)

    return without
