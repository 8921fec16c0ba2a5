"""Images for the test cluster, without a registry: the project's from ``images/Containerfile``, and what it stands on.

The Containerfile starts from a public image that cannot be fetched everywhere. A stand-in is made of Debian's packages
and given the public name, so that the very same file is built here and by a user. Archives are kept in the user's cache
directory under a name that says what went into them.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.installing import InstallError, alone, cache_root, ensure, run, suite
from tests.cluster.support import programs
from tests.cluster.support.settings import PAUSE_IMAGE

ROOT = Path(__file__).parents[3]
CONTAINERFILE = ROOT / "images" / "Containerfile"
# A cluster that the user names gets it from `make kind-cluster`, or from a registry under another name.
PROJECT_IMAGE = os.environ.get("POLARKV_TEST_IMAGE", "docker.io/polarkv/polarkv:test")
ARCHIVES = programs.CACHE / "images"
KEPT = 4
# What the Containerfile copies.
SOURCES = (
    "client",
    "dataplane",
    "operator",
    "scripts",
    "images",
    "pyproject.toml",
    "constraints.txt",
    "README.md",
    "LICENSE",
)
BASE_PACKAGES = (
    "python3", "python3-venv", "python3-pip", "dash", "coreutils", "ca-certificates",
    # What the Containerfile would fetch for arrays, were it not there.
    "mdadm", "e2fsprogs", "mount", "util-linux",
)  # fmt: skip
# What the packages' scripts would do, for as much as an image of Python needs; "$1" is its root.
FINISH = r"""
cd "$1"
printf 'root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n' >etc/passwd
printf 'root:x:0:\nnogroup:x:65534:\n' >etc/group
echo 'hosts: files dns' >etc/nsswitch.conf
mkdir -p proc sys dev run root usr/local/bin etc/ssl/certs
chmod 1777 tmp
cat usr/share/ca-certificates/mozilla/*.crt >etc/ssl/certs/ca-certificates.crt
ln -s /usr/bin/python3 usr/local/bin/python3
ln -s /usr/bin/python3 usr/local/bin/python
ln -s /usr/bin/pip3 usr/local/bin/pip
rm -rf usr/lib/python3*/EXTERNALLY-MANAGED usr/share/doc usr/share/man usr/share/locale
rm -rf var/cache/apt/* var/lib/apt/lists/*
"""
# Inside the build, pip and uv find everything in what is mounted: it needs no network.
PIP_CONFIG = "[global]\nno-index = true\nfind-links = /wheels\n"
UV_CONFIG = 'offline = true\ncache-dir = "/uv-cache"\n'


@dataclass(frozen=True)
class Builder:
    """buildah with a store of its own, which is gone afterwards."""

    store: Path
    root: Path

    def __call__(self, *arguments: str, timeout_s: float = 600.0) -> str:
        # Its helpers start with an empty environment: they find their libraries only where a system has them.
        layered = f'mount -t overlay -o lowerdir={self.root}/usr:/usr overlay /usr && exec "$0" "$@"'
        command = ["unshare", "--mount", "sh", "-c", layered, "buildah"]
        command += [f"--root={self.store}/layers", f"--runroot={self.store}/run", "--storage-driver=overlay"]
        command += [f"--registries-conf={self.root}/etc/containers/registries.conf", *arguments]
        return run(command, ROOT, {"TMPDIR": str(self.store)}, timeout_s).strip()

    @property
    def policy(self) -> str:
        return f"--signature-policy={self.root}/etc/containers/policy.json"

    def commit(self, name: str, content: Path, inside: str, entry: tuple[str, ...] = ()) -> None:
        """Make an image of one layer: a file, or a root as a tar archive."""
        container = self("from", self.policy, "scratch")
        self("add", "--quiet", container, str(content), inside)
        if entry:
            words = ", ".join(f'"{word}"' for word in entry)
            self("config", f"--entrypoint=[{words}]", container)
        self("commit", "--quiet", self.policy, container, name)

    def save(self, name: str, archive: Path) -> None:
        """Write an image to an archive that containerd imports."""
        self("push", "--quiet", self.policy, name, f"docker-archive:{archive}:{name}")


@contextmanager
def builder() -> Iterator[Builder]:
    """Give a builder until the block ends."""
    ARCHIVES.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ARCHIVES, prefix="build-", ignore_cleanup_errors=True) as folder:
        yield Builder(Path(folder), programs.unpack("images"))


def base_image() -> str:
    """The name of the public image that the Containerfile starts from."""
    found = re.search(r"^ARG BASE=(\S+)$", CONTAINERFILE.read_text(encoding="utf-8"), re.MULTILINE)
    assert found, "the Containerfile names its base"
    return found[1]


def base_root() -> Path:
    """Return the root of the stand-in for the public image, as a tar archive; make it on first use."""
    key = _key(*BASE_PACKAGES, FINISH, suite())
    return ensure(programs.CACHE / f"base-{key}", _bootstrap) / "root.tar"


def _bootstrap(directory: Path) -> None:
    places = [Path("/etc/apt/sources.list"), *sorted(Path("/etc/apt/sources.list.d").glob("*.sources"))]
    sources = [str(path) for path in places if path.exists() and path.stat().st_size]
    if not sources:
        raise InstallError("no apt sources to make images from: Debian 12 or newer is needed, or KUBECONFIG")
    finish = directory / "finish"
    finish.write_text(f"#!/bin/sh\nset -eu\n{FINISH}", encoding="utf-8")
    finish.chmod(0o755)
    command = ["mmdebstrap", "--mode=root", "--variant=extract", f"--include={','.join(BASE_PACKAGES)}"]
    command += ['--aptopt=APT::Sandbox::User "root"', f"--extract-hook={finish}", suite()]
    run([*command, str(directory / "root.tar"), *sources], directory, programs.environment([programs.unpack("images")]))


def archives() -> list[Path]:
    """Return archives of all that the cluster's pods run: the project's image, its base, and what holds a pod."""
    return [project(), _cached("base", _key(str(base_root())), _build_base), _pause()]


def project() -> Path:
    """Return the archive of the project's image; build it when anything that goes into it has changed."""
    return _cached("polarkv", _key(_sources(), base_root().parent.name), _build_project)


def _pause() -> Path:
    return _cached("pause", _key(PAUSE_IMAGE, suite()), _build_pause)


def _build_base(build: Builder, archive: Path) -> None:
    build.commit(base_image(), base_root(), "/")
    build.save(base_image(), archive)


def _build_pause(build: Builder, archive: Path) -> None:
    # A pod's namespaces live as long as this process, which is never asked to do anything.
    build.commit(PAUSE_IMAGE, build.root / "bin" / "busybox", "/busybox", ("/busybox", "sleep", "2147483647"))
    build.save(PAUSE_IMAGE, archive)


def _build_project(build: Builder, archive: Path) -> None:
    build.commit(base_image(), base_root(), "/")
    mounts = build.store / "mounts"
    wheels = mounts / "wheels"
    wheels.mkdir(parents=True)
    (mounts / "pip.conf").write_text(PIP_CONFIG, encoding="utf-8")
    (mounts / "uv.toml").write_text(UV_CONFIG, encoding="utf-8")
    tools = {name: _version(name) for name in ("uv", "zig")}
    uv = cache_root("tools") / f"uv-{tools['uv']}" / "bin"
    wanted = [f"uv=={tools['uv']}", f"ziglang=={tools['zig']}"]
    run([str(uv / "python"), "-m", "pip", "download", "--quiet", "--no-deps", *wanted], wheels)
    _fill_uv_cache(uv / "uv", mounts)
    volumes = {wheels: "/wheels:ro", mounts / "pip.conf": "/etc/pip.conf:ro", mounts / "uv.toml": "/etc/uv/uv.toml:ro"}
    volumes[cache_root("uv")] = "/uv-cache:rw"
    build(
        "build", "--isolation=chroot", build.policy, "--pull-never", "--quiet",
        f"--file={CONTAINERFILE}", f"--tag={PROJECT_IMAGE}",
        *(f"--volume={outside}:{inside}" for outside, inside in volumes.items()), str(ROOT),
    )  # fmt: skip
    build.save(PROJECT_IMAGE, archive)


def _version(tool: str) -> str:
    found = re.search(rf"^ARG {tool.upper()}_VERSION=(\S+)$", CONTAINERFILE.read_text(encoding="utf-8"), re.MULTILINE)
    assert found, f"the Containerfile names the version of {tool}"
    return found[1]


def _fill_uv_cache(uv: Path, scratch: Path) -> None:
    """Fetch what the build will ask for: the same packages, by the same program, here where there may be a network."""
    environment = {"UV_CACHE_DIR": str(cache_root("uv")), "UV_PYTHON_DOWNLOADS": "never"}
    extras = [word for extra in ("dataplane", "postgres", "mysql", "operator", "rdma") for word in ("--extra", extra)]
    command = [str(uv), "pip", "install", "--quiet", "--target", str(scratch / "fetched"), "--no-build"]
    command += ["--python-version=3.11", "--constraint=constraints.txt", "--requirements=pyproject.toml", *extras]
    run(command, ROOT, environment)
    run([str(uv), "build", "--quiet", "--wheel", "--out-dir", str(scratch / "built"), str(ROOT)], ROOT, environment)
    if (bundle := ROOT / "scripts" / "client_bundle.py").exists():
        run([sys.executable, str(bundle), str(scratch / "bundle"), "--uv", str(uv)], ROOT, environment)


def _key(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def _sources() -> str:
    """A digest of everything that the Containerfile copies."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *SOURCES]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=30).stdout
    digest = hashlib.sha256()
    for name in sorted(set(filter(None, names.split("\0")))):
        if (path := ROOT / name).is_file():
            digest.update(f"{name}\0{os.access(path, os.X_OK)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def _cached(name: str, key: str, make: Callable[[Builder, Path], None]) -> Path:
    archive = ARCHIVES / f"{name}-{key}.tar"
    with alone(ARCHIVES / name):
        if not archive.exists():
            with builder() as build:
                fresh = build.store / archive.name
                make(build, fresh)
                fresh.rename(archive)
    os.utime(archive)
    for old in sorted(ARCHIVES.glob(f"{name}-*.tar"), key=lambda path: path.stat().st_mtime)[:-KEPT]:
        old.unlink(missing_ok=True)
    return archive
