"""The injected client in environments of several Pythons: it brings what is missing and hides nothing that is there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SUPPORTED = ("3.11", "3.12", "3.13", "3.14")
# Not the release that the bundle has.
HOST_PYDANTIC = "2.11.7"
# A parent and its spawned child tell where their modules come from.
LOOK = """
import json, multiprocessing, sys

def where():
    import polarkv_client, polarkv_client.client, polarkv_client.sync, polarkv_client.cli.main
    import click, httpx, msgspec, pydantic, pydantic_core, rich, xxhash
    from polarkv_client.config import load_config
    assert load_config(endpoint="tcp://h:1", environment={}).deadline_ms == 5000
    modules = (polarkv_client, click, httpx, msgspec, pydantic, pydantic_core, rich, xxhash)
    return {module.__name__: module.__file__ for module in modules}

if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(json.dumps({"here": where(), "child": pool.apply(where), "path": sys.path}))
"""

pytestmark = pytest.mark.timeout(300)


def run(*command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program; no setting of this process's own Python reaches it."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    environment = clean | environment
    return subprocess.run(command, env=environment, cwd=ROOT, check=False, capture_output=True, text=True, timeout=200)


def uv(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run uv as the project's scripts do."""
    return run("bash", "-c", 'source scripts/env.sh && "$(uv_bin "$(find_python)")" "$@"', "-", *arguments)


@lru_cache
def interpreters() -> dict[str, str]:
    """The Pythons of this machine, by version."""
    found = json.loads(uv("python", "list", "--only-installed", "--output-format", "json").stdout)
    plain = [one for one in found if one["implementation"] == "cpython" and one["variant"] == "default"]
    known = {f"{one['version_parts']['major']}.{one['version_parts']['minor']}": one["path"] for one in plain}
    # pyenv keeps Pythons that are not on the path.
    root = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    for path in root.glob("versions/3.*/bin/python3.*"):
        if path.name.removeprefix("python").replace(".", "").isdigit():
            known.setdefault(path.name.removeprefix("python"), str(path))
    return known


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = tmp_path_factory.mktemp("bundle") / "built"
    done = run("scripts/client_bundle.sh", built)
    if done.returncode != 0:
        pytest.skip(f"the wheels cannot be had here: {done.stderr.strip()[-300:]}")
    return built


@pytest.fixture
def injected(bundle: Path, tmp_path: Path) -> Path:
    """The bundle as the init container leaves it, read-only as an engine sees it."""
    target = tmp_path / "polarkv-client"
    target.mkdir()
    command = [sys.executable, "-m", "polarkv_client.install", str(target), "--bundle", str(bundle)]
    for _ in range(2):  # an init container may be started twice
        subprocess.run(command, check=True, capture_output=True, timeout=60)
    return target


def environment_of(version: str, folder: Path, *packages: str) -> Path:
    """Make an environment of one Python with some packages; return its interpreter."""
    if version not in interpreters():
        pytest.skip(f"no Python {version} on this machine")
    assert uv("venv", "--quiet", "--python", interpreters()[version], folder).returncode == 0
    python = folder / "bin" / "python"
    if packages:
        done = uv("pip", "install", "--quiet", "--python", python, *packages)
        if done.returncode != 0:
            pytest.skip(f"{', '.join(packages)} cannot be had here: {done.stderr.strip()[-200:]}")
    return python


def look(python: Path, injected: Path, folder: Path, *before: Path) -> Any:
    script = folder / "look.py"
    script.write_text(LOOK, encoding="utf-8")
    path = os.pathsep.join(str(each) for each in (*before, injected / "python"))
    done = run(python, script, PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["child"] == told["here"]
    return told


@pytest.mark.parametrize("version", SUPPORTED)
def test_a_bare_environment_gets_everything(version: str, injected: Path, tmp_path: Path) -> None:
    told = look(environment_of(version, tmp_path / "venv"), injected, tmp_path)
    compiled = injected / "libraries" / f"cp{version.replace('.', '')}"
    assert {name: Path(path).relative_to(injected).parts[:2] for name, path in told["here"].items()} == {
        "polarkv_client": ("python", "polarkv_client"),
        **dict.fromkeys(("click", "httpx", "pydantic", "rich"), ("libraries", "common")),
        **dict.fromkeys(("msgspec", "pydantic_core", "xxhash"), ("libraries", compiled.name)),
    }
    # Behind everything else, and nothing but this one package before it.
    assert told["path"][-2:] == [str(compiled), str(injected / "libraries" / "common")]
    assert [entry.name for entry in (injected / "python").iterdir()] == ["polarkv_client"]


@pytest.mark.parametrize("version", SUPPORTED[:3])
def test_what_the_engine_has_is_not_hidden(version: str, injected: Path, tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    python = environment_of(version, venv, f"pydantic=={HOST_PYDANTIC}", "httpx==0.27.2")
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("import sys\nsys.customized = True\n", encoding="utf-8")
    here = look(python, injected, tmp_path, own)["here"]
    for name in ("pydantic", "pydantic_core", "httpx"):
        assert Path(here[name]).is_relative_to(venv), name
    for name in ("msgspec", "xxhash", "rich"):
        assert Path(here[name]).is_relative_to(injected), name
    asked = "import polarkv_client, sys, pydantic; print(sys.customized, pydantic.VERSION)"
    path = os.pathsep.join((str(own), str(injected / "python")))
    assert run(python, "-c", asked, PYTHONPATH=path).stdout.split() == ["True", HOST_PYDANTIC]


def test_a_python_that_is_too_old_is_told_so(injected: Path, tmp_path: Path) -> None:
    python = environment_of("3.10", tmp_path / "venv")
    done = run(python, "-c", "import polarkv_client", PYTHONPATH=str(injected / "python"))
    assert done.returncode == 1
    assert "polarkv_client needs Python 3.11 or newer and this is 3.10: use an image" in done.stderr


def test_a_python_without_libraries_is_told_so(injected: Path, tmp_path: Path) -> None:
    python = environment_of("3.12", tmp_path / "venv")
    shutil.rmtree(injected / "libraries" / "cp312")
    done = run(python, "-c", "import polarkv_client", PYTHONPATH=str(injected / "python"))
    assert done.returncode == 1
    assert "has no msgspec, pydantic_core, xxhash for Python 3.12" in done.stderr
    assert "it brings them for 3.11, 3.12, 3.13, 3.14" in done.stderr


def test_an_old_library_of_the_engine_is_used_and_named(injected: Path, tmp_path: Path) -> None:
    python = environment_of("3.12", tmp_path / "venv", "click==8.0.4")
    asked = "import logging; logging.basicConfig(); import polarkv_client, click; print(click.__version__)"
    done = run(python, "-c", asked, PYTHONPATH=str(injected / "python"))
    assert done.stdout.strip() == "8.0.4"
    assert "this environment's click is 8.0.4; polarkv_client is made for 8.1 or newer" in done.stderr


def test_a_volume_that_is_full_or_missing_fails_with_the_reason(bundle: Path, tmp_path: Path) -> None:
    gone = tmp_path / "gone" / "further"
    gone.parent.touch()
    done = run(sys.executable, "-m", "polarkv_client.install", gone, "--bundle", bundle)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: the client library cannot be copied to {gone}: ")
    done = run(sys.executable, "-m", "polarkv_client.install", tmp_path, "--bundle", tmp_path)
    assert "no bundle is there; scripts/client_bundle.sh builds one" in done.stderr
