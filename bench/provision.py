"""Installs peers once, each in an environment of its own under the user's cache directory."""

from __future__ import annotations

import ctypes.util
import shutil
import sys
import venv
from pathlib import Path

from bench.installing import InstallError, cache_root, ensure, extract_debs, library_path, run
from bench.remote import WorkerSpec
from bench.subject import SubjectError

MOONCAKE_VERSION = "0.3.13.post1"
REDIS_VERSION = "7"
# What Debian's packages need beside a plain system.
REDIS_PACKAGES = ("redis-tools", "libjemalloc2", "liblua5.1-0", "liblzf1", "lua-bitop", "lua-cjson")
VERBS_PACKAGES = ("libibverbs1", "libnl-3-200", "libnl-route-3-200")


def spec(name: str) -> WorkerSpec:
    """How to start the worker of `name`; installs what it needs. SubjectError says why it cannot."""
    try:
        if name.startswith("mooncake"):
            return _mooncake(name)
        if name.startswith("redis"):
            return _redis(name)
    except InstallError as error:
        raise SubjectError(str(error)) from error
    return WorkerSpec(name, sys.executable)


def _mooncake(name: str) -> WorkerSpec:
    def install(directory: Path) -> None:
        venv.create(directory / "venv", with_pip=True, clear=True)
        pip = [str(directory / "venv/bin/python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        run([*pip, f"mooncake-transfer-engine-non-cuda=={MOONCAKE_VERSION}"])
        if ctypes.util.find_library("ibverbs") is None:
            extract_debs(VERBS_PACKAGES, directory / "debs")

    directory = ensure(cache_root("bench") / f"mooncake-{MOONCAKE_VERSION}", install)
    environment = {"LD_LIBRARY_PATH": library_path(directory / "debs")} if (directory / "debs").exists() else {}
    return WorkerSpec(name, str(directory / "venv/bin/python"), environment, isolated=True)


def _redis(name: str) -> WorkerSpec:
    found = shutil.which("redis-server")
    if found:
        return WorkerSpec(name, sys.executable, {"REDIS_SERVER": found}, isolated=True)

    def install(directory: Path) -> None:
        extract_debs(REDIS_PACKAGES, directory / "debs")
        binaries = directory / "debs/usr/bin"
        # One program under several names; the package redis-server only adds this link and the service.
        if not (binaries / "redis-server").exists():
            (binaries / "redis-server").symlink_to("redis-check-rdb")

    directory = ensure(cache_root("bench") / f"redis-{REDIS_VERSION}", install)
    environment = {
        "REDIS_SERVER": str(directory / "debs/usr/bin/redis-server"),
        "LD_LIBRARY_PATH": library_path(directory / "debs"),
    }
    return WorkerSpec(name, sys.executable, environment, isolated=True)
