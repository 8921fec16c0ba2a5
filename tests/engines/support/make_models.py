"""Builds the tests' models, in an engine's environment: ``make_models.py FOLDER``. Random weights, a toy tokenizer.

A transformer with random weights has attention and a KV cache like any other, so it can show whether loaded KV is the
KV that was stored. ``initializer_range`` is large enough that greedy tokens depend on all of the prompt.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCABULARY = 4096
SPECIAL = ("<pad>", "<s>", "</s>", "<unk>")
COMMON = {
    "vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "max_position_embeddings": 16384, "initializer_range": 0.05, "tie_word_embeddings": False,
}  # fmt: skip
TINY = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8}
MLA = {
    "num_key_value_heads": 8, "kv_lora_rank": 512, "q_lora_rank": None, "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 64, "v_head_dim": 64, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 128, "n_shared_experts": 1, "first_k_dense_replace": 1, "topk_method": "greedy",
    "n_group": 1, "topk_group": 1,
}  # fmt: skip
# SGLang computes MLA on the CPU with scaled positions alone, and experts not at all.
SCALED = {
    "rope_type": "yarn", "type": "yarn", "factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32,
    "beta_slow": 1, "original_max_position_embeddings": 4096,
}  # fmt: skip
ALL_DENSE = {"first_k_dense_replace": 99}
HUNDRED_MILLION = {
    "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 12, "num_attention_heads": 16,
    "num_key_value_heads": 4, "head_dim": 64,
}  # fmt: skip


def configurations() -> dict[str, tuple[Any, Any]]:
    """By name: a model's class and configuration."""
    return {
        "llama": (LlamaForCausalLM, LlamaConfig(**COMMON, **TINY, num_key_value_heads=4, head_dim=32)),
        "qwen3": (Qwen3ForCausalLM, Qwen3Config(**COMMON, **TINY, num_key_value_heads=4, head_dim=64)),
        "mla": (DeepseekV2ForCausalLM, DeepseekV2Config(**COMMON, **TINY, **MLA)),
        "mla-dense": (
            DeepseekV2ForCausalLM,
            DeepseekV2Config(**{**COMMON, **TINY, **MLA, **ALL_DENSE}, rope_scaling=SCALED),
        ),
        "llama-100m": (LlamaForCausalLM, LlamaConfig(**COMMON, **HUNDRED_MILLION)),
    }


def tokenizer() -> Any:
    """One token a word: ``w0`` … ``w4091``, so that a prompt's length can be counted in words."""
    vocabulary = {word: number for number, word in enumerate(SPECIAL)}
    vocabulary |= {f"w{number}": number + len(SPECIAL) for number in range(VOCABULARY - len(SPECIAL))}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), SPECIAL, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=words, **names)


def main(folder: Path) -> None:
    """Write every model below ``folder``."""
    words = tokenizer()
    for name, (kind, configuration) in configurations().items():
        torch.manual_seed(0)
        model = kind(configuration).to(torch.bfloat16)
        model.save_pretrained(folder / name)
        words.save_pretrained(folder / name)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
