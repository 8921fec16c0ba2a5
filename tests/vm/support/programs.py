"""The guest's kernel and tools: built or unpacked once, kept under the user's cache directory, installed nowhere.

A directory's name says what decides its contents, and a file in it says that it is whole: an interrupted build is made
again. Two builders wait for each other.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import tempfile
from pathlib import Path

from bench.installing import InstallError, cache_root, ensure, extract_debs, library_path, run, suite

CACHE = cache_root("vm")
CONFIG = Path(__file__).with_name("kernel.config")
VERSION = "6.1"
# About seven minutes of one processor, on a machine that has other things to do as well.
BUILD_SECONDS = 3600.0

BUILD_PACKAGES = (f"linux-source-{VERSION}", "flex", "bison", "m4", "libfl2", "libsigsegv2", "bc", "xz-utils")
# What tests use in the guest, each with those of its libraries that a small Debian does not have.
GUEST_PACKAGES = (
    "iproute2", "libbpf1", "libelf1", "libmnl0", "libtirpc3", "libxtables12",
    "rdma-core", "ibverbs-utils", "ibverbs-providers", "libibverbs1", "librdmacm1", "libnl-3-200", "libnl-route-3-200",
    "python3-pyverbs", "perftest", "libibumad3", "libpci3",
    "mdadm", "e2fsprogs", "libext2fs2", "libss2", "logsave",
)  # fmt: skip
# The package's folder of Python modules would bring whatever else Debian has there before the project's own.
BINDINGS = Path("usr/lib/polarkv-vm/python")


def cached(kind: str, *parts: str) -> Path:
    """Where a thing lies whose contents are decided by these words, and by this machine's kind."""
    key = hashlib.sha256("\0".join((*parts, platform.machine())).encode()).hexdigest()[:12]
    return CACHE / f"{kind}-{key}"


def kernel() -> Path:
    """Return User-Mode Linux as a program, with the options of ``kernel.config``; on first use it is built.

    Raises InstallError where there is no compiler or no source package, or with what the compiler said last.
    """
    target = cached(f"uml-{VERSION}", CONFIG.read_text(encoding="utf-8"), " ".join(BUILD_PACKAGES))
    return ensure(target, _build_kernel) / "linux"


def _build_kernel(target: Path) -> None:
    missing = [name for name in ("gcc", "make", "strip", "tar") if shutil.which(name) is None]
    if platform.machine() != "x86_64":
        raise InstallError(f"User-Mode Linux {VERSION} runs on x86_64 alone, this machine is {platform.machine()}")
    if missing:
        raise InstallError(f"needs {', '.join(missing)} to build a kernel: install gcc, make, binutils and tar")
    with tempfile.TemporaryDirectory(dir=target, prefix="build-") as name:
        folder = Path(name)
        tools = folder / "tools"
        extract_debs(BUILD_PACKAGES, tools)
        environment = {
            "PATH": f"{tools}/usr/bin:{os.environ.get('PATH', os.defpath)}",
            "LD_LIBRARY_PATH": library_path(tools),
            "M4": f"{tools}/usr/bin/m4",
            "BISON_PKGDATADIR": f"{tools}/usr/share/bison",
            "ARCH": "um",
            "SUBARCH": platform.machine(),
            "KCONFIG_ALLCONFIG": str(CONFIG),
        }
        run(["tar", "-xf", f"{tools}/usr/src/linux-source-{VERSION}.tar.xz"], folder, environment)
        source = folder / f"linux-source-{VERSION}"
        run(["make", "-s", "allnoconfig"], source, environment)
        _check_config((source / ".config").read_text(encoding="utf-8"))
        run(["make", "-s", f"-j{os.cpu_count() or 1}", "linux"], source, environment, BUILD_SECONDS)
        run(["strip", "-o", str(target / "linux"), str(source / "linux")])


def _check_config(resulting: str) -> None:
    """An option that depends on another which is not set is dropped without a word."""
    wanted = {line for line in CONFIG.read_text(encoding="utf-8").splitlines() if line.startswith("CONFIG_")}
    dropped = sorted(wanted - set(resulting.splitlines()))
    if dropped:
        raise InstallError(f"{CONFIG.name}: linux {VERSION} drops {', '.join(dropped)}: add what they depend on")


def tools() -> Path:
    """Return a folder to lay over the guest's root: RDMA's libraries and tools, ``mdadm``, ``ip``, ``mkfs``."""
    return ensure(cached("tools", " ".join(GUEST_PACKAGES), suite()), _unpack_tools) / "root"


def bindings() -> Path:
    """Return the folder for PYTHONPATH, in the guest, from which ``pyverbs`` alone is imported."""
    return Path("/") / BINDINGS


def _unpack_tools(target: Path) -> None:
    root = target / "root"
    extract_debs(GUEST_PACKAGES, root)
    fold(root)
    (root / BINDINGS).mkdir(parents=True)
    (root / BINDINGS / "pyverbs").symlink_to("/usr/lib/python3/dist-packages/pyverbs")


def fold(root: Path) -> None:
    """Make unpacked packages fit over a root where these folders are links: they would hide all that is there."""
    for name in ("bin", "sbin", "lib"):
        if (root / name).is_dir():
            shutil.copytree(root / name, root / "usr" / name, symlinks=True, dirs_exist_ok=True)
            shutil.rmtree(root / name)
