"""Whether another end's address can be sent to, asked of the kernel in a way that stops nobody else.

To join a queue pair the kernel asks the network who has the address, and waits a second where nobody has. Both
bindings hold Python's lock for that long. So it is asked beforehand, with a queue pair of its own that is never used,
made and joined by libibverbs itself through ctypes, which lets the lock go. It is the kernel's own question, over the
routing table and in the network namespace of the device; what the answer says stays in the kernel's table, and the
queue pair that counts is joined without waiting.

The only file that loads libibverbs by itself. The structures are those of its binary interface, IBVERBS_1.1.
"""

from __future__ import annotations

import ctypes
import ipaddress
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from polarkv_client import errors
from polarkv_client.transport.verbs import devices, seam

MOST_ASKED = 32  # at once, by one process
_MTU = 1  # 256 bytes: every port has that
_RELIABLE, _TO_INIT, _TO_READY = 2, 1, 2
# Which fields count: state, P_Key index, port, access rights; state, address, MTU, other end's number and first packet,
# reads, timer.
_INIT_FIELDS = 1 << 0 | 1 << 4 | 1 << 5 | 1 << 3
_READY_FIELDS = 1 << 0 | 1 << 7 | 1 << 8 | 1 << 20 | 1 << 12 | 1 << 17 | 1 << 15
_u8, _u16, _u32, _int, _pointer = ctypes.c_uint8, ctypes.c_uint16, ctypes.c_uint32, ctypes.c_int, ctypes.c_void_p


class _Address(ctypes.Structure):
    """``ibv_ah_attr``, which begins with an ``ibv_global_route``."""

    _fields_ = (
        ("gid", ctypes.c_uint64 * 2), ("flow", _u32), ("gid_index", _u8), ("hop_limit", _u8), ("traffic_class", _u8),
        ("lid", _u16), ("service", _u8), ("path_bits", _u8), ("static_rate", _u8), ("is_global", _u8), ("port", _u8),
    )  # fmt: skip


class _Room(ctypes.Structure):
    """``ibv_qp_cap``."""

    _fields_ = (("send", _u32), ("receive", _u32), ("send_parts", _u32), ("receive_parts", _u32), ("inline", _u32))


class _Wanted(ctypes.Structure):
    """``ibv_qp_attr``."""

    _fields_ = (
        ("state", _int), ("now", _int), ("mtu", _int), ("migration", _int), ("q_key", _u32), ("receive_psn", _u32),
        ("send_psn", _u32), ("number", _u32), ("access", _u32), ("room", _Room), ("address", _Address),
        ("other_address", _Address), ("p_key_index", _u16), ("other_p_key_index", _u16), ("drain_event", _u8),
        ("draining", _u8), ("reads_out", _u8), ("reads_in", _u8), ("not_ready_timer", _u8), ("port", _u8),
        ("timeout", _u8), ("retries", _u8), ("not_ready_retries", _u8), ("other_port", _u8), ("other_timeout", _u8),
        ("rate_limit", _u32),
    )  # fmt: skip


class _Made(ctypes.Structure):
    """``ibv_qp_init_attr``."""

    _fields_ = (
        ("context", _pointer), ("send_queue", _pointer), ("receive_queue", _pointer), ("shared", _pointer),
        ("room", _Room), ("kind", _int), ("all_signaled", _int),
    )  # fmt: skip


class _CannotAsk(Exception):
    """Something that has nothing to do with the address."""


def reach(device: str, gid_index: int, towards: bytes, deadline: float) -> None:
    """Have the kernel know the way from a RoCE device's address to another, ``towards`` (a GID, 16 bytes).

    Returns as well where that cannot be asked: joining the queue pair then says why, or does without.

    Raises:
        Unavailable: nobody has that address, or who has it did not say so before ``deadline`` (time.monotonic()).
    """
    if devices.is_infiniband(device):
        return
    shown = ipaddress.IPv6Address(towards)
    what = f"{device}: {shown.ipv4_mapped or shown}"
    fix = "is that host up, and does a route lead there from this device's network interface?"
    if not _turns.acquire(timeout=max(0.0, deadline - time.monotonic())):
        raise errors.Unavailable(f"{what} could not be asked for in time: {MOST_ASKED} other addresses are")
    asked = _Asked(device, gid_index, towards, _turns.release)
    if not asked.over.wait(max(0.0, deadline - time.monotonic())):
        raise errors.Unavailable(f"{what} has not answered the question who has it in time: {fix}")
    if asked.number:
        raise seam.VerbsError(f"{what} cannot be sent to: {os.strerror(asked.number)}: {fix}", asked.number)


class _Asked:
    """One question, in a thread of its own, which the kernel keeps for a second at most.

    Not a daemon: a process that ends waits for it, so that no thread is in libibverbs when the rest is closed.
    """

    def __init__(self, device: str, gid_index: int, towards: bytes, ended: Callable[[], None]) -> None:
        self.number = 0  # of the error
        self.over = threading.Event()
        self._ended = ended
        thread = threading.Thread(target=self._run, args=(device, gid_index, towards), name=f"polarkv-reach-{device}")
        try:
            thread.start()
        except RuntimeError:  # no more threads
            self.over.set()
            ended()

    def _run(self, device: str, gid_index: int, towards: bytes) -> None:
        try:
            self.number = _ask(device, gid_index, towards)
        except _CannotAsk:
            pass
        finally:
            self._ended()
            self.over.set()


def _ask(device: str, gid_index: int, towards: bytes) -> int:
    """0, or the error's number. Raises _CannotAsk."""
    with _queue_pair(device) as (modify, pair):
        wanted = _Wanted(state=_TO_INIT, port=devices.PORT)
        if modify(pair, wanted, _INIT_FIELDS):
            raise _CannotAsk
        wanted = _Wanted(state=_TO_READY, mtu=_MTU, number=1, not_ready_timer=seam.NOT_READY_TIMER)
        address = wanted.address
        ctypes.memmove(address.gid, towards, len(towards))
        address.gid_index, address.hop_limit = gid_index, seam.HOP_LIMIT
        address.is_global, address.port = 1, devices.PORT
        return modify(pair, wanted, _READY_FIELDS)


@contextmanager
def _queue_pair(device: str) -> Iterator[tuple[Callable[[object, _Wanted, int], int], object]]:
    """What modifies a queue pair, and one of a device that was opened for it alone. Raises _CannotAsk."""
    try:
        library = ctypes.CDLL("libibverbs.so.1", use_errno=True)  # the bindings have loaded it: this finds theirs
    except OSError as error:
        raise _CannotAsk from error
    with ExitStack() as closing:

        def made(name: str, undo: str, *arguments: object) -> ctypes.c_void_p:
            call, back = getattr(library, name), getattr(library, undo)
            call.restype = _pointer
            found = _pointer(call(*arguments))
            if found.value is None:
                raise _CannotAsk
            closing.callback(back, found)
            return found

        context = _open(library, device, closing)
        domain = made("ibv_alloc_pd", "ibv_dealloc_pd", context)
        queue = made("ibv_create_cq", "ibv_destroy_cq", context, 1, None, None, 0)
        room = _Room(send=1, receive=1, send_parts=1, receive_parts=1)
        asked = _Made(send_queue=queue, receive_queue=queue, room=room, kind=_RELIABLE)
        pair = made("ibv_create_qp", "ibv_destroy_qp", domain, ctypes.byref(asked))
        yield lambda pair, wanted, fields: int(library.ibv_modify_qp(pair, ctypes.byref(wanted), fields)), pair


def _open(library: ctypes.CDLL, name: str, closing: ExitStack) -> ctypes.c_void_p:
    count = _int()
    library.ibv_get_device_list.restype = ctypes.POINTER(_pointer)
    library.ibv_get_device_name.restype = ctypes.c_char_p
    library.ibv_open_device.restype = _pointer
    listed = library.ibv_get_device_list(ctypes.byref(count))
    try:
        for place in range(count.value if listed else 0):
            device = _pointer(listed[place])
            if library.ibv_get_device_name(device) == name.encode():
                context = _pointer(library.ibv_open_device(device))
                if context.value is not None:
                    closing.callback(library.ibv_close_device, context)
                    return context
        raise _CannotAsk
    finally:
        if listed:
            library.ibv_free_device_list(listed)


_turns = threading.BoundedSemaphore(MOST_ASKED)


def _begin_anew() -> None:
    """A child by fork has none of its parent's threads, which would have given their turns back."""
    global _turns  # noqa: PLW0603 (a lock cannot be told to begin anew)
    _turns = threading.BoundedSemaphore(MOST_ASKED)


os.register_at_fork(after_in_child=_begin_anew)
