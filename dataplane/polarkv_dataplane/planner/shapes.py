"""Public models: how many bytes of KV a token has, from the shapes in their published ``config.json``.

Layers, heads, head sizes and MLA ranks were compared with stored copies of those files, in November 2026: the
model data of kvcache-ai/kvcache-blog at d455485b (retrieved 2026-05 from huggingface.co/…/config.json: Qwen3, Qwen2.5,
Llama 3.1 8B and 70B, DeepSeek-V3 and R1), the calculators and tests of other public repositories (GLM-4.5 and Air,
Llama 3.1 405B, Mistral 7B, Mixtral 8x7B and 8x22B, Mistral Large 2, Kimi K2), slime's scripts/models (Qwen3-235B-A22B,
Qwen3-30B-A3B), and the DeepSeek-V2 report's hyper-parameters (V2 and V2-Lite). Layers that only predict further tokens
(num_nextn_predict_layers) are not counted.

Parameters are in units of 10^9, from the model cards; ``active`` are those that one token passes through.
"""

from __future__ import annotations

from typing import NamedTuple

from polarkv_client.errors import ConfigurationError

DTYPE_BYTES = {"bf16": 2, "fp16": 2, "fp8": 1, "int8": 1, "fp32": 4}


class Shape(NamedTuple):
    """What of a model decides the size of its KV. ``mla_rank`` 0: keys and values of ``kv_heads`` heads."""

    name: str
    layers: int
    kv_heads: int
    head_dim: int
    mla_rank: int
    rope_dim: int
    query_heads: int
    total_params: float
    active_params: float

    def kv_bytes_per_token(self, dtype: str = "bf16", tensor_parallel: int = 1) -> int:
        """Bytes that all ranks together keep of one token.

        A rank has at least one head: with more ranks than heads, heads are kept several times. The latent vector of MLA
        is the same on every rank, and counted once.

        Raises:
            ConfigurationError: no such dtype, or the heads cannot be split so.
        """
        if dtype not in DTYPE_BYTES:
            raise ConfigurationError("--dtype", dtype, f"use one of {', '.join(DTYPE_BYTES)}")
        if tensor_parallel < 1 or self.query_heads % tensor_parallel:
            raise ConfigurationError(
                "--tensor-parallel", tensor_parallel, f"use a divisor of {self.name}'s {self.query_heads} heads"
            )
        if self.mla_rank:
            values = self.mla_rank + self.rope_dim
        else:
            if max(tensor_parallel, self.kv_heads) % min(tensor_parallel, self.kv_heads):
                raise ConfigurationError(
                    "--tensor-parallel", tensor_parallel, f"{self.name}'s {self.kv_heads} KV heads cannot be split so"
                )
            values = 2 * max(self.kv_heads, tensor_parallel) * self.head_dim
        return self.layers * values * DTYPE_BYTES[dtype]

    def flops_per_token(self, context: float) -> float:
        """Floating-point operations to compute one token that attends to ``context`` tokens before it.

        Two for each active parameter, and two products of query heads × head size with every earlier token.
        """
        head = self.head_dim
        return 2 * self.active_params * 1e9 + 4 * self.layers * self.query_heads * head * context


def _gqa(name: str, layers: int, kv_heads: int, head_dim: int, heads: int, total: float, active: float = 0) -> Shape:
    return Shape(name, layers, kv_heads, head_dim, 0, 0, heads, total, active or total)


def _mla(name: str, layers: int, heads: int, total: float, active: float) -> Shape:
    """The MLA models of the table: rank 512 and 64 dimensions with positions; 192 of a head meet in attention."""
    return Shape(name, layers, 1, 192, 512, 64, heads, total, active)


SHAPES = {
    shape.name: shape
    for shape in (
        _gqa("qwen3-0.6b", 28, 8, 128, 16, 0.6),
        _gqa("qwen3-1.7b", 28, 8, 128, 16, 1.7),
        _gqa("qwen3-4b", 36, 8, 128, 32, 4.0),
        _gqa("qwen3-8b", 36, 8, 128, 32, 8.2),
        _gqa("qwen3-14b", 40, 8, 128, 40, 14.8),
        _gqa("qwen3-32b", 64, 8, 128, 64, 32.8),
        _gqa("qwen3-30b-a3b", 48, 4, 128, 32, 30.5, 3.3),
        _gqa("qwen3-235b-a22b", 94, 4, 128, 64, 235, 22),
        _gqa("qwen2.5-7b", 28, 4, 128, 28, 7.6),
        _gqa("qwen2.5-72b", 80, 8, 128, 64, 72.7),
        _gqa("llama-3.1-8b", 32, 8, 128, 32, 8.0),
        _gqa("llama-3.1-70b", 80, 8, 128, 64, 70.6),
        _gqa("llama-3.1-405b", 126, 8, 128, 128, 405),
        _gqa("mistral-7b-v0.3", 32, 8, 128, 32, 7.2),
        _gqa("mixtral-8x7b", 32, 8, 128, 32, 46.7, 12.9),
        _gqa("mixtral-8x22b", 56, 8, 128, 48, 141, 39),
        _gqa("mistral-large-2", 88, 8, 128, 96, 123),
        _gqa("glm-4.5", 92, 8, 128, 96, 355, 32),
        _gqa("glm-4.5-air", 46, 8, 128, 96, 106, 12),
        _mla("deepseek-v2-lite", 27, 16, 15.7, 2.4),
        _mla("deepseek-v2", 60, 128, 236, 21),
        _mla("deepseek-v3", 61, 128, 671, 37),
        _mla("deepseek-r1", 61, 128, 671, 37),
        _mla("kimi-k2", 61, 64, 1000, 32),
    )
}


def shape(name: str) -> Shape:
    """The model of this name.

    Raises:
        ConfigurationError: it is not in the table.
    """
    found = SHAPES.get(name.lower().rpartition("/")[2])
    if found is None:
        raise ConfigurationError("--model", name, f"use one of {', '.join(SHAPES)}, or say --kv-bytes-per-token")
    return found
