"""What `polarkv doctor` looks at for RDMA: devices, links, addresses, libraries, limits."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

from polarkv_client import errors
from polarkv_client.cli.findings import Finding, Level, has_capability
from polarkv_client.settings_cli import show_size
from polarkv_client.transport.verbs import bindings, devices, seam

_CAP_IPC_LOCK = 14
_MUCH_BYTES = 1 << 40  # no pool is larger: a limit beyond it limits nothing


def rdma_findings(
    sysfs: Path = devices.SYSFS, files: Path = devices.DEVICE_FILES, choice: bindings.Choice | None = None
) -> Iterator[Finding]:
    """Everything about RDMA. Without a device that is one line: TCP and shared memory are used then, which is no fault.

    Args:
        sysfs, files: where the kernel shows devices, and their files.
        choice: the binding to ask devices by; without it, what :func:`bindings.choose` finds.
    """
    seen = devices.seen(sysfs=sysfs)
    if not seen:
        yield Finding("rdma", Level.OK, "no devices: TCP and shared memory are used")
        yield _memlock(needed=False)
        return
    choice = choice or bindings.choose()
    for device in seen:
        yield _link(device, sysfs)
        yield _address(device)
        yield _file(device, files)
    yield _library(choice)
    if choice.binding is not None:
        for device in seen:
            yield _limits(choice.binding, device.name)
    yield _memlock(needed=True)


def _link(device: devices.Seen, sysfs: Path) -> Finding:
    check, found = f"rdma {device.name}", f"port {device.state}, {device.link or 'link layer unknown'}"
    if device.state == devices.ACTIVE:
        return Finding(check, Level.OK, found)
    interfaces = devices.interfaces(device.name, sysfs)
    fix = (
        f"bring the link up: ip link set {interfaces[0]} up (and look at the cable and the switch's port)"
        if interfaces
        else "bring the link up: see 'rdma link'; on InfiniBand a subnet manager must run"
    )
    return Finding(check, Level.WARN, found, fix)


def _address(device: devices.Seen) -> Finding:
    check = f"rdma {device.name} GID"
    try:
        gid = devices.pick_gid(device, None)
    except errors.Unavailable as error:
        fix = "ip address add ADDRESS/PREFIX dev INTERFACE, or set rdma_gid_index (transport.gidIndex) to one of these"
        return Finding(check, Level.WARN, str(error).partition(": give")[0], fix)
    return Finding(check, Level.OK, f"{gid.number}: {gid.text} ({gid.kind or 'InfiniBand'})")


def _file(device: devices.Seen, files: Path) -> Finding:
    check = f"rdma {device.name} file"
    if not device.file:
        return Finding(check, Level.WARN, "the kernel gives programs none", "modprobe ib_uverbs")
    path = files / device.file
    if not path.exists():
        fix = (
            f"in Kubernetes name the device plugin's resource (transport.resourceName); docker run --device {path}; on "
            "the machine itself: modprobe ib_uverbs"
        )
        return Finding(check, Level.WARN, f"{path} is not there", fix)
    if not os.access(path, os.R_OK | os.W_OK):
        return Finding(check, Level.WARN, f"{path} may not be used by user {os.geteuid()}", f"chmod 666 {path}")
    return Finding(check, Level.OK, str(path))


def _library(choice: bindings.Choice) -> Finding:
    if choice.binding is not None:
        return Finding("rdma library", Level.OK, f"{choice.binding.name} {choice.binding.version}")
    missing = "; ".join(f"{name}: {why}" for name, why in choice.missing.items())
    return Finding("rdma library", Level.WARN, f"no binding of libibverbs ({missing})", bindings.FIX)


def _limits(binding: seam.Binding, name: str) -> Finding:
    """Whether the device can be opened, which takes its provider's library, and how much it registers at once."""
    check = f"rdma {name} provider"
    try:
        device = binding.open(name)
    except errors.Unavailable as error:
        fix = (
            "install the library of its provider (Debian: apt-get install ibverbs-providers; for a cloud's device the "
            "cloud's own package), and see that its file may be used"
        )
        return Finding(check, Level.WARN, str(error), fix)
    limits = device.limits
    device.close()
    found = (
        f"opens; registers {show_size(limits.region_bytes)} at once, {limits.regions} times; "
        f"{limits.queue_pairs} queue pairs"
    )
    if limits.region_bytes * limits.regions < _MUCH_BYTES:
        most = show_size(limits.region_bytes * limits.regions)
        return Finding(check, Level.WARN, found, f"use cache nodes with less memory than {most}, or more devices")
    return Finding(check, Level.OK, found)


def _memlock(*, needed: bool) -> Finding:
    """How much memory may be locked: RDMA registers, and so locks, the whole pool."""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY or has_capability(_CAP_IPC_LOCK):
        limit = "unlimited" if soft == resource.RLIM_INFINITY else f"{show_size(soft)}, lifted by IPC_LOCK"
        return Finding("memlock", Level.OK, limit)
    found = f"{show_size(soft)} (hard limit {'unlimited' if hard == resource.RLIM_INFINITY else show_size(hard)})"
    if not needed:
        return Finding("memlock", Level.OK, f"{found}; only RDMA needs more")
    fix = "ulimit -l unlimited (or LimitMEMLOCK=infinity; in Kubernetes the IPC_LOCK capability)"
    return Finding("memlock", Level.WARN, found, fix)
