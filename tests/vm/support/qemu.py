"""A guest with Debian's own kernel, in qemu: every instruction is emulated, whatever the machine could do."""

from __future__ import annotations

import lzma
import os
import shutil
import stat
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench.installing import InstallError, ensure, extract_debs, library_path, run, suite
from tests.vm.support import programs

INIT = Path(__file__).with_name("init-qemu.sh")
# Enough for the numerical libraries that tests import, and no more to emulate than that.
CPU = "qemu64,+ssse3,+sse4.1,+sse4.2,+popcnt,+cx16"
ACCELERATOR = "tcg,thread=multi,tb-size=512"
# The suite runs two guests side by side; emulation's other threads take what is left.
PROCESSORS = 1
ONE_PROCESSOR = False
# Before the root is there; the others are loaded from it.
EARLY_MODULES = ("9pnet_virtio", "9p", "overlay", "virtio_pci")
QEMU_PACKAGES = (
    "qemu-system-x86", "qemu-system-common", "qemu-system-data", "seabios", "busybox-static",
    "libcapstone4", "libdaxctl1", "libfdt1", "libfuse3-3", "libndctl6", "libpmem1", "libslirp0", "libvdeplug2",
    "librdmacm1", "libibverbs1", "libnl-3-200", "libnl-route-3-200", "libpixman-1-0", "libpng16-16", "libjpeg62-turbo",
    "libgnutls30", "libsasl2-2", "libseccomp2", "libnuma1", "libglib2.0-0", "libbpf1", "liburing2", "libnettle8",
    "libhogweed6", "libaio1", "libp11-kit0", "libidn2-0", "libunistring2", "libtasn1-6", "libffi8", "libelf1",
    "libkmod2",
)  # fmt: skip
KERNEL_METAPACKAGE = "linux-image-amd64"
_XZ = b"\xfd7zXZ\x00"
_ELF = b"\x7fELF"


def layers() -> list[Path]:
    """What lies over the machine's root: the tools, and the kernel's modules."""
    _qemu()
    return [programs.tools(), _kernel() / "root"]


def disks(count: int) -> list[str]:
    """The names of so many disks in the guest."""
    return [f"/dev/vd{chr(ord('a') + index)}" for index in range(count)]


def arguments(share: Path, images: Sequence[Path], memory_bytes: int) -> list[str]:
    """The command that boots."""
    qemu, kernel = _qemu(), _kernel()
    exports = {"machine": (Path("/"), True), "share": (share, False)}
    exports |= {f"layer{number}": (path, True) for number, path in enumerate(layers(), start=1)}
    command = [
        f"{qemu}/usr/bin/qemu-system-x86_64", "-L", f"{qemu}/usr/share/qemu", "-L", f"{qemu}/usr/share/seabios",
        "-nodefaults", "-no-user-config", "-no-reboot", "-display", "none",
        "-machine", "q35,sata=off,smbus=off,usb=off,vmport=off", "-accel", ACCELERATOR, "-cpu", CPU,
        "-smp", str(PROCESSORS), "-m", f"{memory_bytes >> 20}M", "-serial", "stdio",
        "-kernel", f"{kernel}/vmlinux", "-initrd", f"{kernel}/initramfs",
        "-append", "console=ttyS0 quiet panic=-1 nokaslr mitigations=off tsc=reliable no_timer_check audit=0 "
        "raid=noautodetect net.ifnames=0 rdinit=/init",
    ]  # fmt: skip
    for name, (path, read_only) in exports.items():
        options = f"local,id={name},path={path},security_model=none,multidevs=remap"
        command += ["-fsdev", options + (",readonly=on" if read_only else "")]
        command += ["-device", f"virtio-9p-pci,fsdev={name},mount_tag={name}"]
    for number, image in enumerate(images):
        command += ["-drive", f"if=none,id=disk{number},file={image},format=raw,cache=writeback"]
        command += ["-device", f"virtio-blk-pci,drive=disk{number}"]
    return command


def environment(memory_bytes: int) -> dict[str, str]:
    """The environment of that command."""
    return {**os.environ, "LD_LIBRARY_PATH": library_path(_qemu())}


def _qemu() -> Path:
    target = programs.cached("qemu", " ".join(QEMU_PACKAGES), suite())
    return ensure(target, lambda folder: extract_debs(QEMU_PACKAGES, folder / "root")) / "root"


def _kernel() -> Path:
    """The folder of the kernel: ``vmlinux``, ``initramfs``, and ``root``, which has the modules for the guest."""
    target = programs.cached("kernel", KERNEL_METAPACKAGE, *EARLY_MODULES, INIT.read_text(encoding="utf-8"))
    return ensure(target, _unpack_kernel)


def _unpack_kernel(folder: Path) -> None:
    found = run(["apt-cache", "depends", "--important", KERNEL_METAPACKAGE]).split()
    packages = [word for word in found if word.startswith("linux-image-") and word != KERNEL_METAPACKAGE]
    if not packages:
        raise InstallError(f"needs {KERNEL_METAPACKAGE}: run apt-get update, on Debian 12")
    root = folder / "root"
    extract_debs([packages[0], "kmod"], root)
    (modules,) = (root / "lib/modules").iterdir()
    _kmod(folder, "depmod", "-b", str(root), modules.name)
    _make_initramfs(folder, modules.name)
    (folder / "vmlinux").write_bytes(_unpacked_image(root / "boot" / f"vmlinuz-{modules.name}"))
    programs.fold(root)


def _kmod(folder: Path, name: str, *arguments: str) -> str:
    """Run kmod under a name by which it knows what to do: the package's own links hold once it is installed."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        link = Path(place) / name
        link.symlink_to(folder / "root/bin/kmod")
        return run([str(link), *arguments], environment={"LD_LIBRARY_PATH": library_path(_qemu())})


def _make_initramfs(folder: Path, version: str) -> None:
    root, busybox = folder / "root", _qemu() / "bin/busybox"
    paths: list[Path] = []
    for name in EARLY_MODULES:
        lines = _kmod(folder, "modprobe", "-d", str(root), "-S", version, "--show-depends", name).splitlines()
        paths += [Path(line.split()[1]) for line in lines if line.startswith("insmod ")]
    with tempfile.TemporaryDirectory(dir=folder) as name:
        tree = Path(name)
        (tree / "bin").mkdir()
        (tree / "modules").mkdir()
        shutil.copy(busybox, tree / "bin/busybox")
        shutil.copy(INIT, tree / "init")
        (tree / "init").chmod(stat.S_IRWXU)
        ordered = list(dict.fromkeys(paths))
        for path in ordered:
            shutil.copy(path, tree / "modules")
        (tree / "modules/order").write_text("".join(f"{path.name}\n" for path in ordered), encoding="ascii")
        packed = f"cd {tree} && {busybox} find . | {busybox} cpio -o -H newc >{folder}/initramfs"
        run(["sh", "-euc", packed])


def _unpacked_image(image: Path) -> bytes:
    """The kernel inside of a bootable image: an emulated processor takes seconds to unpack it."""
    packed = image.read_bytes()
    place = packed.find(_XZ)
    while place >= 0:
        try:
            kernel = lzma.LZMADecompressor(lzma.FORMAT_XZ).decompress(packed[place:])
        except lzma.LZMAError:
            kernel = b""
        if kernel.startswith(_ELF):
            return kernel
        place = packed.find(_XZ, place + 1)
    raise InstallError(f"{image.name} holds no kernel packed by xz")
