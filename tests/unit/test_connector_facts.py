"""What a connector reads of an engine: everything that changes what is computed is in the namespace, or is refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from polarkv_client.connectors.identity import Adapters
from polarkv_client.connectors.settings import ConnectorConfig
from polarkv_client.connectors.sglang_facts import SETTINGS, namespace_of
from polarkv_client.connectors.vllm import facts
from polarkv_client.errors import ConfigurationError

CONFIG = ConnectorConfig(endpoint="tcp://h:1")
STORAGE = SimpleNamespace(
    attn_cp_rank=0, attn_cp_size=1, is_mla_model=False, tp_rank=0, tp_size=1, pp_rank=0, pp_size=1
)
POOL = SimpleNamespace(
    layout="page_first", start_layer=0, end_layer=3, size_per_token=64, storage_format_tag=None, page_size=64,
    dtype="torch.uint8",
)  # fmt: skip
DEFAULTS: dict[str, Any] = {**dict.fromkeys(SETTINGS), "model_path": "org/model"}


def vllm_config(cache_gb: float | None, prefix_caching: bool) -> Any:
    images = None if cache_gb is None else SimpleNamespace(mm_processor_cache_gb=cache_gb)
    return SimpleNamespace(
        model_config=SimpleNamespace(multimodal_config=images),
        cache_config=SimpleNamespace(enable_prefix_caching=prefix_caching),
    )


@pytest.mark.parametrize(
    ("cache_gb", "prefix_caching", "hashed"),
    [(None, False, True), (4, False, True), (0, True, True), (0, False, False)],
)
def test_images_that_vllm_only_counts_are_not_cached(
    cache_gb: float | None, prefix_caching: bool, hashed: bool
) -> None:
    assert facts.images_are_hashed(vllm_config(cache_gb, prefix_caching)) == hashed
    plain: dict[str, Any] = {"lora_request": None, "cache_salt": None, "prompt_embeds": None, "num_tokens": 100}
    text = SimpleNamespace(**plain, mm_features=[])
    assert facts.request_extras(Adapters(), hashed, text, 64) == ("", {})
    if not hashed:
        image = SimpleNamespace(**plain, mm_features=[SimpleNamespace(identifier="renderer0-mm-1-image-0")])
        assert facts.request_extras(Adapters(), hashed, image, 64) is None


def test_a_model_whose_answers_need_every_token_computed_is_refused() -> None:
    last = SimpleNamespace(is_prefix_caching_supported=True)
    facts.check_model(SimpleNamespace(model_config=last))
    mean = SimpleNamespace(
        is_prefix_caching_supported=False, pooler_config=SimpleNamespace(seq_pooling_type="MEAN"), attn_type="decoder"
    )
    with pytest.raises(ConfigurationError, match=r"'MEAN'.*enabled=false"):
        facts.check_model(SimpleNamespace(model_config=mean))


@pytest.mark.parametrize(("ahead", "pipeline"), [(False, 1), (True, 1), (False, 2)])
def test_loads_inside_a_step_are_refused_where_the_next_begins_before_its_end(ahead: bool, pipeline: int) -> None:
    engine = SimpleNamespace(
        scheduler_config=SimpleNamespace(async_scheduling=ahead),
        parallel_config=SimpleNamespace(pipeline_parallel_size=pipeline),
    )
    facts.check_way_of_loading(CONFIG, engine)
    inside = CONFIG.model_copy(update={"load": "sync"})
    if not ahead and pipeline == 1:
        facts.check_way_of_loading(inside, engine)
    else:
        with pytest.raises(ConfigurationError, match=r"load='sync'.*use async"):
            facts.check_way_of_loading(inside, engine)


def test_a_configuration_from_elsewhere_is_part_of_the_weights(tmp_path: Path) -> None:
    found = {facts.weights_of(SimpleNamespace(model="m", revision=None, hf_config_path=None, seed=0), "auto")}
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(f'{{"rope_theta": "{name}"}}')
        path = str(tmp_path / name)
        found.add(facts.weights_of(SimpleNamespace(model="m", revision=None, hf_config_path=path, seed=0), "auto"))
    found |= {
        facts.weights_of(SimpleNamespace(model="m", revision=None, hf_config_path=None, seed=seed), "dummy")
        for seed in (0, 1)
    }
    assert len(found) == 5


def sglang_root(**settings: object) -> bytes:
    told = {**DEFAULTS, **settings}
    return namespace_of(CONFIG, told.__getitem__, "1", STORAGE, POOL, zero_copy=True).root()


def test_every_setting_of_sglang_that_changes_pages_is_in_the_namespace(tmp_path: Path) -> None:
    """Types of eight bits are all kept as bytes; random weights lie over the same files as a model's own."""
    file = tmp_path / "scales.json"
    file.write_text('{"layer.0": 1}')
    roots = [sglang_root()]
    roots += [sglang_root(**{name: str(file)}) for name in SETTINGS]
    roots += [sglang_root(kv_cache_dtype=name) for name in ("fp8_e4m3", "fp8_e5m2")]
    roots += [sglang_root(load_format="dummy"), sglang_root(model_path="org/other")]
    scales = sglang_root(quantization_param_path=str(file))
    file.write_text('{"layer.0": 2}')
    roots += [sglang_root(quantization_param_path=str(file))]
    assert len(set(roots)) == len(roots)
    assert scales in roots
