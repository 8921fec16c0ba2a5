"""The engines' own environments and the tests' models, kept in the user's cache directory."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from bench.installing import cache_root, ensure, is_installed, run

ROOT = Path(__file__).parents[3]
ENGINES = ("vllm", "sglang", "lmcache")
MODELS = ("llama", "qwen3", "mla", "mla-dense", "llama-100m")
CACHE = cache_root("engines")
# An engine whose environment lies over another's.
_BASES = {"lmcache": "vllm"}
_INSTALL = ROOT / "scripts/engine_venv.sh"
_LISTS = ROOT / "tests/engines/requirements"
_MAKE_MODELS = Path(__file__).parent / "make_models.py"
_INSTALL_S = 1800.0
# Engines ask hubs and report usage when they may.
_QUIET = {
    "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "DO_NOT_TRACK": "1", "VLLM_NO_USAGE_STATS": "1",
    "LMCACHE_TRACK_USAGE": "false", "TOKENIZERS_PARALLELISM": "false",
}  # fmt: skip


@dataclass(frozen=True)
class Environment:
    """An engine's environment. Its folder's name says what is in it, so it never changes and clones share it."""

    name: str

    @property
    def folder(self) -> Path:
        """Where it is, or will be."""
        files = [_INSTALL, _LISTS / "torch.txt", _LISTS / f"{self.name}.txt"]
        if self.name in _BASES:
            files.append(_LISTS / f"{_BASES[self.name]}.txt")
        return CACHE / f"{self.name}-{_key(files)}"

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / "bin/python"

    @property
    def is_built(self) -> bool:
        """Whether it is there, whole."""
        return is_installed(self.folder)

    def build(self) -> None:
        """Build it where it is not cached: minutes and gigabytes the first time."""
        base = Environment(_BASES[self.name]) if self.name in _BASES else None
        if base is not None:
            base.build()
        arguments = [str(base.folder)] if base is not None else []
        python = str(Path(sys.base_prefix) / "bin/python3")  # the project's own, by which the folder is named

        def install(folder: Path) -> None:
            run([str(_INSTALL), self.name, str(folder), *arguments], ROOT, {"PYTHON": python}, _INSTALL_S)

        ensure(self.folder, install)

    def variables(self, *paths: Path, **more: str) -> dict[str, str]:
        """Variables for a process in it: client and ``paths`` importable, nothing of the project's own environment."""
        foreign = ("POLARKV_", "PYTHON", "VIRTUAL_ENV", "PYTEST_")
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
        inherited["PATH"] = f"{self.folder / 'bin'}{os.pathsep}{inherited.get('PATH', os.defpath)}"
        search = os.pathsep.join(str(path) for path in (ROOT / "client", *paths))
        return {**inherited, **_QUIET, "PYTHONPATH": search, **more}


def models(environment: Environment) -> Path:
    """The folder that holds one for each of :data:`MODELS`, made with the libraries of ``environment`` if missing."""

    def make(folder: Path) -> None:
        run([str(environment.python), str(_MAKE_MODELS), str(folder)], ROOT, environment.variables(), _INSTALL_S)

    return ensure(CACHE / f"models-{_key([_MAKE_MODELS, _LISTS / 'torch.txt'])}", make)


def _key(files: Iterable[Path]) -> str:
    digest = hashlib.sha256(f"{sys.version} {sys.base_prefix}".encode())
    for path in files:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]
