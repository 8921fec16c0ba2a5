"""Adapters for tests. Runs in an engine's environment."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

HIDDEN, LAYERS = 256, 4  # of the model "llama"


def write_adapter(folder: Path, seed: int) -> None:
    """Write a LoRA adapter for the model "llama" into ``folder``."""
    torch.manual_seed(seed)
    widths = {"q_proj": HIDDEN, "k_proj": 128, "v_proj": 128}
    weights = {}
    for layer in range(LAYERS):
        for module, width in widths.items():
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            weights[f"{name}.lora_A.weight"] = torch.randn(8, HIDDEN) * 0.3
            weights[f"{name}.lora_B.weight"] = torch.randn(width, 8) * 0.3
    folder.mkdir(exist_ok=True)
    save_file(weights, folder / "adapter_model.safetensors")
    about = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 8, "lora_alpha": 16, "bias": "none",
        "target_modules": list(widths),
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(about))
