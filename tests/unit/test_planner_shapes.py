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


# As their config.json have them: num_hidden_layers, num_attention_heads, num_key_value_heads × head_dim, or for MLA
# kv_lora_rank + qk_rope_head_dim. Written from the sources that shapes.py names, not from its table.
PUBLISHED = {
    "qwen3-0.6b": (28, 16, 8 * 128), "qwen3-1.7b": (28, 16, 8 * 128), "qwen3-4b": (36, 32, 8 * 128),
    "qwen3-8b": (36, 32, 8 * 128), "qwen3-14b": (40, 40, 8 * 128), "qwen3-32b": (64, 64, 8 * 128),
    "qwen3-30b-a3b": (48, 32, 4 * 128), "qwen3-235b-a22b": (94, 64, 4 * 128), "qwen2.5-7b": (28, 28, 4 * 128),
    "qwen2.5-72b": (80, 64, 8 * 128), "llama-3.1-8b": (32, 32, 8 * 128), "llama-3.1-70b": (80, 64, 8 * 128),
    "llama-3.1-405b": (126, 128, 8 * 128), "mistral-7b-v0.3": (32, 32, 8 * 128), "mixtral-8x7b": (32, 32, 8 * 128),
    "mixtral-8x22b": (56, 48, 8 * 128), "mistral-large-2": (88, 96, 8 * 128), "glm-4.5": (92, 96, 8 * 128),
    "glm-4.5-air": (46, 96, 8 * 128), "deepseek-v2-lite": (27, 16, -576), "deepseek-v2": (60, 128, -576),
    "deepseek-v3": (61, 128, -576), "deepseek-r1": (61, 128, -576), "kimi-k2": (61, 64, -576),
}  # fmt: skip


def test_the_table_is_as_published() -> None:
    assert PUBLISHED.keys() == SHAPES.keys()
    for name, (layers, heads, values) in PUBLISHED.items():
        assert shape(name).query_heads == heads, name
        wanted = layers * (-values if values < 0 else 2 * values) * 2  # below zero: one latent vector, not two
        assert shape(name).kv_bytes_per_token() == wanted, name


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
