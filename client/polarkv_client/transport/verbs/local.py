"""This machine's RDMA devices as one client uses them: opened once, shared by its transports to all cache nodes.

What is open is held here, by the module, until it is closed: the bindings crash when the garbage collector, or the end
of the interpreter, comes upon an open device, queue pair or registration in an order of its own. What a program forgot
to close is closed before it ends.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Protocol

from polarkv_client import errors
from polarkv_client.endpoints import RdmaPort
from polarkv_client.protocol.messages import QueuePair
from polarkv_client.transport.verbs import bindings, devices, neighbours, seam
from polarkv_client.transport.verbs.registrations import Registrations


class Closes(Protocol):
    """Something made of a device that must be closed before it."""

    def close(self) -> None:
        """A second call does nothing."""


class LocalDevice:
    """An opened device, its address, and the registrations on it. Closed when its last user has let go."""

    def __init__(self, device: seam.Device, gid: devices.Gid, registered_bytes: int) -> None:
        self.device = device
        self.gid = gid
        self.port_number = devices.PORT
        self.registrations = Registrations(device, registered_bytes)
        self._lock = threading.Lock()
        self._users = 1
        self._made: set[Closes] = set()
        _open.add(self)

    @property
    def name(self) -> str:
        """The kernel's name for it."""
        return self.device.name

    def describe(self, pair: seam.Pair) -> QueuePair:
        """One of its queue pairs, for the other end.

        Raises:
            Unavailable: its port is down.
        """
        return self.device.describe(pair, self.port_number, self.gid.raw)

    def reach(self, towards: bytes, deadline: float) -> None:
        """See :func:`neighbours.reach`, from this device's address."""
        neighbours.reach(self.name, self.gid.number, towards, deadline)

    def hold(self, made: Closes) -> None:
        """Something was made of it that lives until :meth:`let_go`. Raises Unavailable: it has been closed."""
        with self._lock:
            self._count()
            self._made.add(made)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """It stays open while the body runs. Raises Unavailable: it has been closed."""
        with self._lock:
            self._count()
        try:
            yield
        finally:
            self.release()

    @property
    def closed(self) -> bool:
        """Whether nothing can be made of it any more."""
        return self._users <= 0

    def _count(self) -> None:
        """One more user; the lock is held."""
        if self.closed:
            raise errors.Unavailable(f"{self.name} has been closed")
        self._users += 1

    def let_go(self, made: Closes) -> None:
        """That was closed."""
        with self._lock:
            self._made.discard(made)
        self.release()

    def release(self) -> None:
        """Its owner wants it closed: it is when nothing is held any more."""
        with self._lock:
            self._users -= 1
            last = not self._users
        if last:
            self.registrations.close()
            self.device.close()
            _open.discard(self)

    def close_now(self) -> None:
        """Close all that was made of it, and it."""
        for made in list(self._made):
            made.close()
        self.release()


_open: set[LocalDevice] = set()


def _close_all() -> None:
    for device in list(_open):
        with suppress(errors.PolarKVError):
            device.close_now()


def _leave_to_parent() -> None:
    """After a fork: a child that closed what it inherited would destroy its parent's queue pairs and registrations."""
    for device in _open:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(device))  # the bindings close what is collected, at the end too
    _open.clear()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_leave_to_parent)


class LocalDevices:
    """The devices that a client uses, opened when they are first asked for.

    ``names``: these; empty: every device whose link is up and that has an address for it.
    """

    def __init__(
        self,
        names: Sequence[str] = (),
        gid_index: int | None = None,
        registered_bytes: int = 1 << 30,
        binding: str = bindings.AUTO,
    ) -> None:
        self._wanted = binding
        self._names = tuple(names)
        self._gid_index = gid_index
        self._registered_bytes = registered_bytes
        self._lock = threading.Lock()
        self._opened: dict[str, LocalDevice] = {}
        self._closed = False
        self.binding = ""

    def open(self) -> list[LocalDevice]:
        """All that can be used now, by name.

        Raises:
            Unavailable: there is none; the text says what is missing and the fix.
        """
        with self._lock:
            if self._closed:
                raise errors.Unavailable("the client is closed")
            seen = {device.name: device for device in devices.seen(self._gid_index)}
            if not seen:
                raise errors.Unavailable("this machine has no RDMA device")
            binding = bindings.need(self._wanted)
            self.binding = f"{binding.name} {binding.version}"
            reasons, found = [], []
            for name in self._names or sorted(seen):
                try:
                    found.append(self._open(binding, name, seen.get(name)))
                except errors.Unavailable as error:  # one that is open stays so: its port may come up again
                    reasons.append(str(error))
        if not found:
            raise errors.Unavailable("; ".join(reasons))
        return found

    def _open(self, binding: seam.Binding, name: str, seen: devices.Seen | None) -> LocalDevice:
        if seen is None:
            raise errors.Unavailable(f"{name}: there is no such device")
        if seen.state != devices.ACTIVE:
            raise errors.Unavailable(f"{name}: its port is {seen.state}")
        gid = devices.pick_gid(seen, self._gid_index)
        old = self._opened.get(name)
        if old is not None and old.gid == gid:
            return old
        made = self._opened[name] = LocalDevice(binding.open(name), gid, self._registered_bytes)
        if old is not None:  # its address has changed
            old.release()
        return made

    def sweep(self, now: float) -> None:
        """Let go of registrations that nobody has used for a while."""
        for device in list(self._opened.values()):
            device.registrations.sweep(now)

    def close(self) -> None:
        """Close what nobody uses any more; the rest is closed by its last user."""
        with self._lock:
            self._closed = True
            opened, self._opened = self._opened, {}
        for device in opened.values():
            device.release()


def pair_rails(mine: Sequence[LocalDevice], theirs: Sequence[RdmaPort]) -> list[tuple[LocalDevice, RdmaPort]]:
    """Which device of this machine talks to which of a cache node's.

    The one that the routing table sends from, where it names one; else by order. Every device of either side is used.
    """
    if not mine or not theirs:
        return []
    rails: list[tuple[LocalDevice, RdmaPort]] = []
    for place, port in enumerate(theirs):
        source = devices.source_address(port.address)
        routed = next((device for device in mine if device.gid.text == source), None)
        rails.append((routed or mine[place % len(mine)], port))
    used = {device.name for device, _ in rails}
    for place, device in enumerate(mine):
        if device.name not in used:
            rails.append((device, theirs[place % len(theirs)]))
    return rails
