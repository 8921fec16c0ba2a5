"""The programs of a Kubernetes: built once from the Go module beside this package, or unpacked from Debian's packages.

Both are kept under the user's cache directory, under a name that says what decides their contents: every clone on this
machine finds them. Nothing is installed on the system, and no service of a package starts.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import tempfile
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from bench.installing import (
    InstallError,
    alone,
    cache_root,
    ensure,
    extract_debs,
    is_installed,
    library_path,
    run,
    suite,
)

MODULE = Path(__file__).parents[1]
CACHE = cache_root("cluster")
# The API server alone is nine CPU minutes of compiling.
BUILD_SECONDS = 2400.0
UNUSED_DAYS = 30

PACKAGES = {
    "etcd": ("etcd-server",),
    "containers": (
        "containerd", "runc", "containernetworking-plugins",
        "nftables", "libnftables1", "libnftnl11", "libmnl0", "libjansson4", "libedit2", "libbsd0",
        "conntrack", "libnetfilter-conntrack3", "libnfnetlink0",
        "iptables", "libip4tc2", "libip6tc2", "libxtables12",
    ),
    "images": (
        "buildah", "golang-github-containers-common", "golang-github-containers-image", "libgpgme11", "libassuan0",
        "libgpg-error0", "libsubid4", "libdevmapper1.02.1", "mmdebstrap", "busybox-static",
    ),
}  # fmt: skip


@cache
def tools() -> dict[str, str]:
    """Name of each program that the Go module lists as a tool -> its package."""
    text = (MODULE / "go.mod").read_text(encoding="utf-8")
    listed = re.search(r"^tool \(\n(.*?)^\)", text, re.MULTILINE | re.DOTALL)
    assert listed, "go.mod names its tools in one block"
    return {line.rsplit("/", 1)[1]: line for line in listed[1].split()}


@cache
def kubernetes_version() -> str:
    """The one version of all of Kubernetes' programs, such as ``v1.36.3``."""
    found = re.search(r"^\tk8s\.io/kubernetes (v[\d.]+)", (MODULE / "go.mod").read_text(encoding="utf-8"), re.MULTILINE)
    assert found, "go.mod requires k8s.io/kubernetes"
    return found[1]


@cache
def _link_flags() -> str:
    """Without these the programs say that they are v0.0.0, which helm and kubectl take for incompatible."""
    version = kubernetes_version()
    major, minor, _ = version.removeprefix("v").split(".")
    name = "k8s.io/component-base/version"
    return f"-s -w -X {name}.gitVersion={version} -X {name}.gitMajor={major} -X {name}.gitMinor={minor}"


@cache
def _built() -> Path:
    key = hashlib.sha256()
    for part in ((MODULE / "go.mod").read_bytes(), (MODULE / "go.sum").read_bytes(), _link_flags().encode()):
        key.update(part)
    key.update(platform.machine().encode())
    return CACHE / f"kubernetes-{kubernetes_version()}-{key.hexdigest()[:12]}"


def is_built(*names: str) -> bool:
    """Whether :func:`build` of these would find all of them in the cache."""
    return all((_built() / name).exists() for name in names)


def build(*names: str) -> Path:
    """Return the directory that holds these programs; compile those which are not there yet, all in one go.

    Two builders wait for each other; an interrupted build leaves nothing that looks finished.
    Raises InstallError without Go, or with what the compiler said last.
    """
    target = _built()
    if is_built(*names):
        os.utime(target)
        return target
    if shutil.which("go") is None:
        raise InstallError(f"needs Go (see {MODULE.name}/go.mod) to build {', '.join(names)}: install it")
    with alone(target):
        target.mkdir(exist_ok=True)
        missing = [name for name in names if not is_built(name)]
        if not missing:
            return target
        with tempfile.TemporaryDirectory(dir=target.parent, prefix="build-") as fresh:
            command = ["go", "build", "-trimpath", "-ldflags", _link_flags(), "-o", f"{fresh}/"]
            command += [tools()[name] for name in missing]
            environment = {"CGO_ENABLED": "0", "GOFLAGS": "-mod=readonly -buildvcs=false"}
            run(command, MODULE, environment, BUILD_SECONDS)
            for name in missing:
                (Path(fresh) / name).rename(target / name)
    _forget_unused(target)
    return target


def _forget_unused(current: Path) -> None:
    """Half a gigabyte a version: what no clone has asked for in a month goes."""
    for other in current.parent.glob("kubernetes-v*"):
        if other.is_dir() and other != current and time.time() - other.stat().st_mtime > UNUSED_DAYS * 86400:
            shutil.rmtree(other, ignore_errors=True)


def _unpacked(group: str) -> Path:
    key = hashlib.sha256(" ".join((*PACKAGES[group], platform.machine(), suite())).encode()).hexdigest()[:12]
    return CACHE / f"debian-{group}-{key}"


def is_unpacked(group: str) -> bool:
    """Whether :func:`unpack` would find the group in the cache."""
    return is_installed(_unpacked(group))


def unpack(group: str) -> Path:
    """Return the root under which a group of Debian packages is unpacked. InstallError where that cannot be."""
    return ensure(_unpacked(group), lambda directory: extract_debs(PACKAGES[group], directory / "root")) / "root"


def environment(roots: Sequence[Path], *folders: Path) -> dict[str, str]:
    """The environment in which programs of these roots and folders find each other and their libraries."""
    inside = [root / part for root in roots for part in ("usr/sbin", "usr/bin", "sbin", "bin")]
    search = [*map(str, (*folders, *inside)), os.environ.get("PATH", os.defpath)]
    libraries = [library_path(root) for root in roots]
    return {**os.environ, "PATH": ":".join(search), "LD_LIBRARY_PATH": ":".join(libraries)}
