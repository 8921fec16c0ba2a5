"""What changes from one SGLang engine to the next: what it loads is what it would compute, or it computes it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.support.adapters import write_adapter
from tests.engines.support.sglang_runs import CACHED, PROMPT_TOKENS, TOKENS, Start, from_storage, prompt

pytestmark = pytest.mark.timeout(300)
PROMPT = prompt(PROMPT_TOKENS, 4001)


def test_an_adapter_that_was_replaced_under_its_path(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "adapter"
    found = []
    for seed in (1, 2):
        write_adapter(path, seed)
        lora = {"lora_paths": [f"a={path}"], "lora_backend": "torch_native", "max_loras_per_batch": 2}
        with start(**lora) as engine:
            for cached in (0, CACHED):
                (answer,) = engine.call("generate", prompts=[PROMPT], tokens=TOKENS, adapter="a")
                assert from_storage(answer) == cached
                engine.call("flush")
                found.append(answer["tokens"])
    assert found[0] == found[1] != found[2] == found[3]
