"""Tensor parallel ranks of a real SGLang: each has its own pages; of MLA, all have the same ones."""

from __future__ import annotations

import pytest

from tests.engines.support.sglang_runs import CACHED, PAGE_TOKENS, Start, from_storage, generate, keys_in
from tests.local.support.world import World

pytestmark = pytest.mark.timeout(300)
# A processor a rank; and where torch brings NCCL, two ranks would try to use it.
TWO_RANKS = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1", "OMP_NUM_THREADS": "1", "SGLANG_NCCL_SO_PATH": "/nowhere"}


def test_two_ranks_have_their_own_pages(start: Start, world: World, right: list[list[int]]) -> None:
    before = keys_in(world)
    with start(tp_size=2, variables=TWO_RANKS) as engine:
        cold = generate(engine, 13)
        engine.call("flush")
        pages = keys_in(world) - before
        warm = generate(engine, 13)

    assert len(pages) == 2 * CACHED // PAGE_TOKENS
    assert (cold["cached"], from_storage(warm)) == (0, CACHED)
    assert [cold["tokens"], warm["tokens"]] == [right[13]] * 2


def test_two_ranks_of_mla_store_a_page_once_and_both_load_it(start: Start, world: World) -> None:
    before = keys_in(world)
    with start(model="mla-dense", tp_size=2, variables=TWO_RANKS) as engine:
        cold = [generate(engine, number) for number in (0, 1)]
        engine.call("flush")
        pages = keys_in(world) - before
        warm = [generate(engine, number) for number in (0, 1)]

    assert len(pages) == 2 * CACHED // PAGE_TOKENS, "two prompts, and not two ranks"
    assert [answer["cached"] for answer in cold] == [0, 0]
    assert [from_storage(answer) for answer in warm] == [CACHED, CACHED]
    assert [answer["tokens"] for answer in warm] == [answer["tokens"] for answer in cold]
    assert cold[0]["tokens"] != cold[1]["tokens"]
