"""Pages of a host pool as scatter lists into its own memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from polarkv_client.connectors.host_pages import HostPages
from polarkv_client.errors import ConfigurationError

PAGES, PAGE, LAYERS, WIDTH = 4, 8, 3, 16
PART = PAGE * WIDTH  # bytes of a layer's keys (or values) of a page


class Pool:
    """A host pool of SGLang's kind, of bytes, layer by layer: keys of all layers, then values."""

    layout = "layer_first"
    page_size = PAGE
    size_per_token = 2 * LAYERS * WIDTH

    def __init__(self) -> None:
        raw = np.random.default_rng(1).integers(0, 256, 2 * LAYERS * PAGES * PART, dtype=np.uint8)
        self.kv_buffer: Any = raw.reshape(2, LAYERS, PAGES * PAGE, WIDTH)
        self.beyond = 0

    def get_page_buffer_meta(self, indices: list[int]) -> tuple[list[int], list[int]]:
        base = self.kv_buffer.ctypes.data + self.beyond
        whole = LAYERS * PAGES * PART
        addresses = [
            base + part * whole + layer * PAGES * PART + first * WIDTH
            for first in indices[::PAGE]
            for layer in range(LAYERS)
            for part in (0, 1)
        ]
        return addresses, [PART] * len(addresses)


def places(*pages: int) -> list[int]:
    return [page * PAGE + token for page in pages for token in range(PAGE)]


def bytes_of(pool: Pool, page: int) -> bytes:
    rows: npt.NDArray[np.uint8] = pool.kv_buffer[:, :, page * PAGE : (page + 1) * PAGE]
    return b"".join(rows[part, layer].tobytes() for layer in range(LAYERS) for part in (0, 1))


def test_a_page_is_its_parts_in_the_order_of_the_engine() -> None:
    pool = Pool()
    pages = HostPages(pool, places(0)).views(places(2, 0))

    assert [b"".join(views) for views in pages] == [bytes_of(pool, 2), bytes_of(pool, 0)]
    assert [len(views) for views in pages] == [2 * LAYERS] * 2


def test_what_is_written_to_a_page_is_in_the_pool_and_nowhere_else() -> None:
    pool = Pool()
    before = [bytes_of(pool, page) for page in range(PAGES)]
    (views,) = HostPages(pool, places(0)).views(places(1))
    for view in views:
        view[:] = bytes(len(view))

    after = [bytes_of(pool, page) for page in range(PAGES)]
    assert after == [before[0], bytes(len(before[1])), before[2], before[3]]


def test_several_buffers_make_one_pool() -> None:
    whole = Pool()
    halves = Pool()
    keys, values = whole.kv_buffer[0].copy(), whole.kv_buffer[1].copy()
    halves.kv_buffer = [values, keys]  # in no order of addresses

    def meta(indices: list[int]) -> tuple[list[int], list[int]]:
        starts = [array.ctypes.data for array in (keys, values)]
        firsts = [(first, layer) for first in indices[::PAGE] for layer in range(LAYERS)]
        found = [start + layer * PAGES * PART + first * WIDTH for first, layer in firsts for start in starts]
        return found, [PART] * len(found)

    halves.get_page_buffer_meta = meta  # type: ignore[method-assign]
    assert [b"".join(views) for views in HostPages(halves, places(0)).views(places(3))] == [bytes_of(whole, 3)]


@pytest.mark.parametrize("beyond", [-1, 2 * LAYERS * PAGES * PART - PART + 1, 1 << 40])
def test_memory_that_is_not_the_pools_is_refused(beyond: int) -> None:
    pool = Pool()
    pages = HostPages(pool, places(0))
    pool.beyond = beyond
    with pytest.raises(ValueError, match="not in the host pool"):
        pages.views(places(0))


def test_a_pool_that_names_too_few_bytes_or_none_is_refused_at_start() -> None:
    pool = Pool()
    pool.size_per_token += 1  # as if it had scales elsewhere
    with pytest.raises(ConfigurationError, match=r"interface_v1.*names 768 of a page's 776 bytes"):
        HostPages(pool, places(0))

    unable = Pool()
    unable.get_page_buffer_meta = _unsupported  # type: ignore[method-assign]
    with pytest.raises(ConfigurationError, match=r"hicache_mem_layout.*layer_first.*Unsupported layout"):
        HostPages(unable, places(0))

    empty = Pool()
    empty.kv_buffer = None
    with pytest.raises(ConfigurationError, match="has no host memory"):
        HostPages(empty, places(0))


def _unsupported(indices: list[int]) -> tuple[list[int], list[int]]:
    raise ValueError("Unsupported layout: layer_first")
