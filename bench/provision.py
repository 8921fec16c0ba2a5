"""Installs peers once, each in an environment of its own under the user's cache directory."""

from __future__ import annotations

import ctypes.util
import fcntl
import os
import platform
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.remote import WorkerSpec
from bench.subject import SubjectError

MOONCAKE_VERSION = "0.3.13.post1"
REDIS_VERSION = "7"
INSTALL_SECONDS = 600.0
# What Debian's packages need beside a plain system.
REDIS_PACKAGES = ("redis-tools", "libjemalloc2", "liblua5.1-0", "liblzf1", "lua-bitop", "lua-cjson")
VERBS_PACKAGES = ("libibverbs1", "libnl-3-200", "libnl-route-3-200")


def cache_root() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "polarkv" / "bench"


def spec(name: str) -> WorkerSpec:
    """How to start the worker of `name`; installs what it needs. SubjectError says why it cannot."""
    if name.startswith("mooncake"):
        return _mooncake(name)
    if name.startswith("redis"):
        return _redis(name)
    return WorkerSpec(name, sys.executable)


def _mooncake(name: str) -> WorkerSpec:
    def install(directory: Path) -> None:
        venv.create(directory / "venv", with_pip=True, clear=True)
        pip = [str(directory / "venv/bin/python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        _run([*pip, f"mooncake-transfer-engine-non-cuda=={MOONCAKE_VERSION}"])
        if ctypes.util.find_library("ibverbs") is None:
            _extract_debs(VERBS_PACKAGES, directory / "debs")

    directory = _ensure(f"mooncake-{MOONCAKE_VERSION}", install)
    environment = {"LD_LIBRARY_PATH": _library_path(directory / "debs")} if (directory / "debs").exists() else {}
    return WorkerSpec(name, str(directory / "venv/bin/python"), environment, isolated=True)


def _redis(name: str) -> WorkerSpec:
    found = shutil.which("redis-server")
    if found:
        return WorkerSpec(name, sys.executable, {"REDIS_SERVER": found}, isolated=True)

    def install(directory: Path) -> None:
        _extract_debs(REDIS_PACKAGES, directory / "debs")
        binaries = directory / "debs/usr/bin"
        # One program under several names; the package redis-server only adds this link and the service.
        if not (binaries / "redis-server").exists():
            (binaries / "redis-server").symlink_to("redis-check-rdb")

    directory = _ensure(f"redis-{REDIS_VERSION}", install)
    environment = {
        "REDIS_SERVER": str(directory / "debs/usr/bin/redis-server"),
        "LD_LIBRARY_PATH": _library_path(directory / "debs"),
    }
    return WorkerSpec(name, sys.executable, environment, isolated=True)


def _ensure(name: str, install: Callable[[Path], None]) -> Path:
    """Install under a lock, once: a directory without its marker is an interrupted installation and is made again."""
    root = cache_root()
    root.mkdir(parents=True, exist_ok=True)
    directory = root / name
    with (root / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (directory / "complete").exists():
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir()
            install(directory)
            (directory / "complete").touch()
    return directory


def _extract_debs(packages: Sequence[str], target: Path) -> None:
    """Unpack without installing: needs no root, changes nothing on the system."""
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        raise SubjectError(f"needs {', '.join(packages)}: install them with this system's package manager")
    target.mkdir(parents=True)
    _run(["apt-get", "download", "-o", "APT::Sandbox::User=root", *packages], target)
    for archive in sorted(target.glob("*.deb")):
        _run(["dpkg", "-x", str(archive), str(target)])
        archive.unlink()


def _library_path(root: Path) -> str:
    triplet = f"{platform.machine()}-linux-gnu"
    return f"{root}/usr/lib/{triplet}:{root}/lib/{triplet}"


def _run(command: Sequence[str], directory: Path | None = None) -> None:
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False)
    if done.returncode != 0:
        words = (done.stderr or done.stdout).strip().splitlines()
        raise SubjectError(f"{' '.join(command[:3])} failed: {words[-1] if words else done.returncode}")
