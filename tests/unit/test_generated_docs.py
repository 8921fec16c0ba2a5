"""``make docs`` writes what generators render, and ``--check`` notices a stale page."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from polarkv_client.states import EntryState
from polarkv_dataplane.manager.core.table import TABLE

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def plant(root: Path, text: str) -> None:
    folder = root / "docs" / "generators"
    folder.mkdir(parents=True, exist_ok=True)
    source = f"OUTPUT = 'docs/deep/page.md'\ndef render():\n    return {text!r}\n"
    (folder / "page.py").write_text(source, encoding="utf-8")


def test_a_page_is_written_once(tmp_path: Path, generate: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    plant(tmp_path, "one\n")
    assert generate.main([], tmp_path) == 0
    assert (tmp_path / "docs/deep/page.md").read_text(encoding="utf-8") == "one\n"
    assert "wrote docs/deep/page.md" in capsys.readouterr().out
    assert generate.main([], tmp_path) == 0
    assert capsys.readouterr().out == ""


def test_a_missing_or_stale_page_fails_the_check(
    tmp_path: Path, generate: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    plant(tmp_path, "one\n")
    assert generate.main(["--check"], tmp_path) == 1
    assert not (tmp_path / "docs/deep").exists()
    generate.main([], tmp_path)
    assert generate.main(["--check"], tmp_path) == 0
    plant(tmp_path, "two\n")
    assert generate.main(["--check"], tmp_path) == 1
    assert "stale: docs/deep/page.md; run 'make docs'" in capsys.readouterr().err
    assert (tmp_path / "docs/deep/page.md").read_text(encoding="utf-8") == "one\n"


def test_the_states_page_shows_every_transition() -> None:
    page = (ROOT / "docs" / "states.md").read_text(encoding="utf-8")
    universal = page.count("In every state")
    assert page.count(" --> ") == len(TABLE) - universal * len(EntryState)
    assert "MemoryAndDisk --> Disk: evict" in page
