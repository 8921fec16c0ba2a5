"""Which engines' chunks fit each other: everything that makes bytes incompatible changes the namespace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from polarkv_client.connectors.identity import Adapters, engine_namespace, fingerprint, model_name
from polarkv_client.connectors.settings import ConnectorConfig

BASE: dict[str, Any] = {
    "engine": "vllm", "model": "org/model", "weights_fingerprint": "w", "kv_dtype": "bfloat16",
    "layout": {"device": "cpu", "isa": "vec"}, "page_size": 32, "tp": (0, 2), "pp": (0, 2),
}  # fmt: skip


def config(**settings: Any) -> ConnectorConfig:
    return ConnectorConfig(endpoint="tcp://h:1", **settings)


@pytest.mark.parametrize(
    "change",
    [
        {"engine": "sglang"}, {"model": "org/other"}, {"weights_fingerprint": "x"}, {"kv_dtype": "float32"},
        {"layout": {"device": "cpu", "isa": "amx"}}, {"page_size": 64}, {"chunk_tokens": 64}, {"tp": (1, 2)},
        {"tp": (0, 4)}, {"pp": (1, 2)}, {"pp": (0, 3)},
    ],
    ids=str,
)  # fmt: skip
def test_what_makes_bytes_incompatible_changes_the_root(change: dict[str, Any]) -> None:
    assert engine_namespace(config(), **{**BASE, **change}).root() != engine_namespace(config(), **BASE).root()


def test_the_order_in_which_a_layout_is_told_does_not() -> None:
    turned = {"layout": {"isa": "vec", "device": "cpu"}}
    assert engine_namespace(config(), **{**BASE, **turned}) == engine_namespace(config(), **BASE)


def test_overrides() -> None:
    settings = {"namespace_model_id": "m", "namespace_weights_fingerprint": "f", "namespace_tenant_salt": "s"}
    made = engine_namespace(config(**settings, chunk_tokens=96), **BASE)
    assert (made.model_id, made.weights_fingerprint, made.tenant_salt, made.chunk_tokens) == ("m", "f", "s", 96)


def model(folder: Path, *, weights: bytes = b"", **settings: object) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"hidden_size": 8, **settings}))
    if weights:
        (folder / "model.safetensors").write_bytes(weights)
    return folder


def fresh(folder: Path) -> str:
    return fingerprint(str(folder))


def test_a_fingerprint_is_of_contents_wherever_they_lie(tmp_path: Path) -> None:
    weights = bytes(range(256)) * 20_000
    first = model(tmp_path / "a" / "m", weights=weights, transformers_version="1")
    second = model(tmp_path / "b" / "m", weights=weights, transformers_version="2")
    assert fresh(first) == fresh(second)
    assert model_name(str(first)) == model_name(str(second)) == "m"
    assert model_name("org/m") == "org/m"


def test_another_training_has_another_fingerprint(tmp_path: Path) -> None:
    """The same architecture, names and shapes: the files' beginnings are alike, the numbers are not."""
    head = bytes(2 << 20)
    first = fresh(model(tmp_path / "a", weights=head + bytes([1]) * (4 << 20)))
    assert first != fresh(model(tmp_path / "b", weights=head + bytes([2]) * (4 << 20)))
    assert first != fresh(model(tmp_path / "c", weights=head + bytes([1]) * (4 << 20), hidden_size=16))
    assert first != fresh(model(tmp_path / "d", weights=head + bytes([1]) * (5 << 20)))
    images = model(tmp_path / "e", weights=head + bytes([1]) * (4 << 20))
    (images / "preprocessor_config.json").write_text('{"image_mean": 0.5}')
    assert first != fresh(images)


def test_a_model_may_be_one_file(tmp_path: Path) -> None:
    for folder, numbers in (("a", b"1"), ("b", b"1"), ("c", b"2")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "m.gguf").write_bytes(numbers * 10_000)
    one, copy, other = (str(tmp_path / folder / "m.gguf") for folder in "abc")
    assert model_name(one) == model_name(other) == "m.gguf"
    assert fresh(Path(one)) == fresh(Path(copy)) != fresh(Path(other))


def test_an_adapter_that_may_have_either_weights_has_no_fingerprint(tmp_path: Path) -> None:
    adapters = Adapters()
    path = tmp_path / "adapter"
    assert adapters.fingerprint(1, str(path)) is None, "nothing is there to be read"
    model(path, weights=b"1" * 10_000)
    first = adapters.fingerprint(1, str(path))
    assert first == fresh(path)
    (path / "model.safetensors").write_bytes(b"2" * 10_000)
    assert adapters.fingerprint(1, str(path)) is None, "the engine may have the former"
    assert adapters.fingerprint(2, str(path)) == fresh(path) != first
    (path / "model.safetensors").write_bytes(b"1" * 10_000)
    assert adapters.fingerprint(1, str(path)) == first
    (path / "adapter_config.json").write_text('{"lora_alpha": 32}')
    assert adapters.fingerprint(1, str(path)) is None, "the same numbers, with another weight"


def test_without_weights_the_name_and_revision_must_do(tmp_path: Path) -> None:
    assert fresh(model(tmp_path / "a")) != fresh(model(tmp_path / "b"))
    assert fingerprint("org/nowhere", "1") != fingerprint("org/nowhere", "2")
