"""KV bytes per token follow from published shapes."""

from __future__ import annotations

import pytest

from polarkv_client.errors import ConfigurationError
from polarkv_dataplane.planner.shapes import SHAPES, shape


@pytest.mark.parametrize(
    ("model", "dtype", "ranks", "kv_bytes"),
    [
        ("llama-3.1-8b", "bf16", 1, 32 * 2 * 8 * 128 * 2),
        ("qwen3-235b-a22b", "bf16", 1, 192_512),
        ("Qwen/Qwen3-235B-A22B", "bf16", 4, 192_512),
        ("qwen3-235b-a22b", "bf16", 8, 2 * 192_512),  # four heads on eight ranks: each is kept twice
        ("qwen3-235b-a22b", "fp8", 4, 96_256),
        ("deepseek-v3", "bf16", 1, 61 * 576 * 2),
        ("deepseek-v3", "bf16", 16, 61 * 576 * 2),  # the latent vector is the same on every rank
    ],
)
def test_kv_bytes_of_a_token(model: str, dtype: str, ranks: int, kv_bytes: int) -> None:
    assert shape(model).kv_bytes_per_token(dtype, ranks) == kv_bytes


@pytest.mark.parametrize(
    ("model", "dtype", "ranks", "named"),
    [("qwen3-8b", "bf3", 1, "--dtype"), ("qwen3-8b", "bf16", 5, "divisor of"), ("qwen3-8b", "bf16", 0, "divisor of")],
)
def test_what_cannot_be_is_refused(model: str, dtype: str, ranks: int, named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        shape(model).kv_bytes_per_token(dtype, ranks)


def test_an_unknown_model_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(ConfigurationError, match="qwen3-8b"):
        shape("gpt-17")


def test_every_shape_is_plausible() -> None:
    for found in SHAPES.values():
        assert found.active_params <= found.total_params
        assert found.query_heads % found.kv_heads == 0
        assert 10_000 < found.kv_bytes_per_token() < 10**6
        # Active parameters alone need two operations each; attention adds to it with the context.
        assert 2e9 * found.active_params < found.flops_per_token(1000) < found.flops_per_token(100_000)
