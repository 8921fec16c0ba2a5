"""Programs that are not the project's, kept under the user's cache directory: installed once, without root."""

from __future__ import annotations

import fcntl
import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

INSTALL_SECONDS = 600.0
LAST_LINES = 5


class InstallError(RuntimeError):
    """Something cannot be installed here; says what, and what would help."""


def cache_root(part: str) -> Path:
    """Where one part of the project keeps what it installed, for every clone on this machine."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "polarkv" / part


@contextmanager
def alone(directory: Path) -> Iterator[None]:
    """Keep other processes out of a directory that is being made; ends with the block or with the process."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with directory.with_name(f"{directory.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def is_installed(directory: Path) -> bool:
    """Whether :func:`ensure` has finished there."""
    return (directory / "complete").exists()


def ensure(directory: Path, install: Callable[[Path], None]) -> Path:
    """Install under a lock, once: a directory without its marker is an interrupted installation and is made again."""
    with alone(directory):
        if not is_installed(directory):
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir()
            install(directory)
            (directory / "complete").touch()
    return directory


def extract_debs(packages: Sequence[str], target: Path) -> None:
    """Unpack without installing: needs no root, changes nothing on the system."""
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        raise InstallError(f"needs {', '.join(packages)}: install them with this system's package manager")
    target.mkdir(parents=True)
    run(["apt-get", "download", "-o", "APT::Sandbox::User=root", *packages], target)
    for archive in sorted(target.glob("*.deb")):
        run(["dpkg", "-x", str(archive), str(target)])
        archive.unlink()


@cache
def suite() -> str:
    """The name of this machine's Debian release; empty where there is none."""
    release = Path("/etc/os-release")
    return platform.freedesktop_os_release().get("VERSION_CODENAME", "") if release.exists() else ""


def library_path(root: Path) -> str:
    """The value of LD_LIBRARY_PATH for programs unpacked under ``root``."""
    triplet = f"{platform.machine()}-linux-gnu"
    return f"{root}/usr/lib/{triplet}:{root}/lib/{triplet}"


def run(
    command: Sequence[str],
    directory: Path | None = None,
    environment: Mapping[str, str] | None = None,
    timeout_s: float = INSTALL_SECONDS,
) -> str:
    """Run a command and return what it printed; InstallError ends with its last words."""
    done = subprocess.run(
        command,
        cwd=directory,
        env=None if environment is None else {**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    if done.returncode != 0:
        words = (done.stderr or done.stdout).strip().splitlines()[-LAST_LINES:]
        raise InstallError(f"{' '.join(command[:3])} failed: {' | '.join(words) or done.returncode}")
    return done.stdout
