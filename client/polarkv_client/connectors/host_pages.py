"""Pages of SGLang's host pool as scatter lists: its memory is registered once, a page is never copied."""

from __future__ import annotations

from bisect import bisect_right
from typing import Any, NamedTuple

from polarkv_client.buffers import Views, address_of, flatten
from polarkv_client.errors import ConfigurationError


class _Region(NamedTuple):
    """One run of the pool's memory. The view keeps it alive."""

    begin: int
    end: int
    view: memoryview


class HostPages:
    """The memory of one ``HostKVCache``.

    Args:
        pool: the engine's host pool; of it are used ``kv_buffer`` (a tensor or several), ``page_size`` (tokens),
            ``size_per_token`` (bytes) and ``get_page_buffer_meta`` (addresses and lengths of the parts of pages).
        one_page: the places of one page's tokens, to look at.

    Raises:
        ConfigurationError: the pool cannot say where its pages are, or not all of their bytes.
    """

    def __init__(self, pool: Any, one_page: Any) -> None:
        self._pool = pool
        buffers = pool.kv_buffer
        if buffers is None:
            raise ConfigurationError("interface_v1", 1, f"{type(pool).__name__} has no host memory: it cannot be used")
        views = flatten(list(buffers) if isinstance(buffers, list | tuple) else [buffers], "kv_buffer", writable=True)
        begins = [address_of(view) for view in views]
        self._regions = sorted(
            _Region(begin, begin + view.nbytes, view) for begin, view in zip(begins, views, strict=True)
        )
        self._begins = [region.begin for region in self._regions]
        self._check(one_page)

    def views(self, host_indices: Any) -> list[Views]:
        """The parts of each page, in the order of its bytes.

        Args:
            host_indices: places in the pool of every page's tokens, one page after the other.

        Raises:
            ValueError: the engine named memory that is not the pool's.
        """
        addresses, lengths = self._pool.get_page_buffer_meta(host_indices)
        pages = len(host_indices) // self._pool.page_size
        parts, rest = divmod(len(addresses), pages)
        if rest:
            raise ValueError(f"{len(addresses)} parts for {pages} pages")
        cut = [self._cut(address, length) for address, length in zip(addresses, lengths, strict=True)]
        return [cut[start : start + parts] for start in range(0, len(cut), parts)]

    def _cut(self, address: int, length: int) -> memoryview:
        region = self._regions[bisect_right(self._begins, address) - 1]
        if not region.begin <= address <= address + length <= region.end:
            raise ValueError(f"{length} bytes at {address:#x} are not in the host pool")
        return region.view[address - region.begin : address - region.begin + length]

    def _check(self, one_page: Any) -> None:
        pool = self._pool
        expected = pool.size_per_token * pool.page_size
        try:
            named = sum(view.nbytes for view in self.views(one_page)[0])
        except (NotImplementedError, ValueError) as error:
            fix = f"{type(pool).__name__} does not say where its pages are ({error}): use page_first or layer_first"
            raise ConfigurationError("hicache_mem_layout", pool.layout, fix) from None
        if named != expected:
            fix = f"{type(pool).__name__} names {named} of a page's {expected} bytes: use interface_v1 0"
            raise ConfigurationError("interface_v1", 1, fix)
