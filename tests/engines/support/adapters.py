"""Other weights for the model "llama": adapters of random numbers, models of its own numbers in another order."""

from __future__ import annotations

import json
import random
import shutil
from array import array
from pathlib import Path

_HIDDEN, _LAYERS, _RANK = 256, 4, 8
_WIDTHS = {"q_proj": 256, "k_proj": 128, "v_proj": 128}


def write_adapter(folder: Path, seed: int) -> None:
    """Write an adapter into ``folder``; another seed gives another one, of the same names and shapes."""
    numbers = random.Random(seed)
    about: dict[str, object] = {}
    raw = b""
    for layer in range(_LAYERS):
        for module, width in _WIDTHS.items():
            for part, shape in (("A", (_RANK, _HIDDEN)), ("B", (width, _RANK))):
                values = array("f", (numbers.gauss(0, 0.3) for _ in range(shape[0] * shape[1])))
                name = f"base_model.model.model.layers.{layer}.self_attn.{module}.lora_{part}.weight"
                end = len(raw) + len(values) * values.itemsize
                about[name] = {"dtype": "F32", "shape": shape, "data_offsets": (len(raw), end)}
                raw += values.tobytes()
    header = json.dumps(about).encode()
    folder.mkdir(exist_ok=True)
    whole = folder / "whole"
    whole.write_bytes(len(header).to_bytes(8, "little") + header + raw)
    whole.replace(folder / "adapter_model.safetensors")  # not in place: engines map the file, and would change with it
    configuration = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": _RANK, "lora_alpha": 16, "bias": "none",
        "target_modules": list(_WIDTHS),
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(configuration))


def other_weights(model: Path, folder: Path) -> Path:
    """Write a model into ``folder`` that has the same files, names and shapes; returns it."""
    shutil.copytree(model, folder)
    (file,) = folder.glob("*.safetensors")
    raw = file.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    numbers = array("H", raw[start:])
    numbers.reverse()
    file.write_bytes(raw[:start] + numbers.tobytes())
    return folder
