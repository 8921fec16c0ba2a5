"""The compiled half of the same-host path: a payload copied and checked in one pass (``move.c``).

It is built with the package where a C compiler is at hand, and is a matter of speed only: where :data:`compiled` is
None, :data:`missing` says why, and transports copy with system calls and hash with the xxhash library, which agrees.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import xxhash

from polarkv_client.buffers import Views, address_of

LIBRARY_NAME = "move.so"
LEAST_BYTES = 4096  # less is not worth the calls; of 240 bytes or fewer XXH3-64 is another function
_VERSION = 2


class _Run(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("size_bytes", ctypes.c_uint64))


class _Library:
    """The functions of ``move.c``. ctypes lets go of the interpreter's lock while one runs."""

    def __init__(self, path: Path) -> None:
        loaded = ctypes.CDLL(str(path))
        if loaded.polarkv_move_version() != _VERSION:
            raise OSError(f"{path} was built from other sources: install the package again")
        state, address, runs, number = ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(_Run), ctypes.c_uint64
        self.start = loaded.polarkv_hash_start
        self.start.argtypes, self.start.restype = (state, number), None
        self.gather = loaded.polarkv_gather
        self.gather.argtypes, self.gather.restype = (state, address, runs, ctypes.c_size_t), None
        self.scatter = loaded.polarkv_scatter
        self.scatter.argtypes, self.scatter.restype = (state, runs, ctypes.c_size_t, address), None
        self.finish = loaded.polarkv_hash_finish
        self.finish.argtypes, self.finish.restype = (state,), number
        self.gather_all, self.scatter_all = loaded.polarkv_gather_all, loaded.polarkv_scatter_all
        for several in (self.gather_all, self.scatter_all):
            several.argtypes, several.restype = (address, ctypes.c_size_t, address), None
        hash_bytes = loaded.polarkv_hash_bytes
        hash_bytes.restype = ctypes.c_size_t
        self.hash_bytes = int(hash_bytes())


class Move:
    """One payload on its way, given in order, in as many steps as the caller likes; and its checksum (XXH3-64).

    ``total_bytes`` is the payload's length, at least :data:`LEAST_BYTES`. Addresses are of mapped memory: nothing here
    can check them.
    """

    __slots__ = ("_library", "_state")

    def __init__(self, total_bytes: int) -> None:
        self._library = _library()
        self._state = ctypes.create_string_buffer(self._library.hash_bytes)
        self._library.start(self._state, total_bytes)

    def scatter(self, address: int, views: Views) -> None:
        """Copy what lies at ``address`` into ``views``. What is hashed is what was written."""
        runs = _runs(views)
        self._library.scatter(self._state, runs, len(runs), address)

    def gather(self, views: Views, address: int) -> None:
        """Copy ``views`` to ``address``, one after the other. What is hashed is what was written."""
        runs = _runs(views)
        self._library.gather(self._state, address, runs, len(runs))

    def checksum(self) -> int:
        """The whole payload's, once all of it has been moved."""
        return int(self._library.finish(self._state))


Payload = tuple[int, int, Views]  # the address in a slot, the length in bytes, and the caller's views of so many


def gather_all(payloads: Sequence[Payload]) -> list[int]:
    """Copy the views of several whole payloads to their addresses, in one call; their checksums.

    Each is at least :data:`LEAST_BYTES` long. For short ones a call of its own costs as much as the copy.
    """
    return _move_all(_library().gather_all, payloads)


def scatter_all(payloads: Sequence[Payload]) -> list[int]:
    """As :func:`gather_all`, from the addresses into the views."""
    return _move_all(_library().scatter_all, payloads)


def _move_all(move: Callable[[int, int, int], None], payloads: Sequence[Payload]) -> list[int]:
    table, runs = array("Q"), array("Q")  # struct polarkv_payload and struct polarkv_run
    for address, size_bytes, views in payloads:
        table.extend((address, size_bytes, len(views), 0))
        for view in views:
            runs.append(address_of(view))
            runs.append(view.nbytes)
    move(table.buffer_info()[0], len(payloads), runs.buffer_info()[0])
    return table[3::4].tolist()


def _library() -> _Library:
    if compiled is None:
        raise RuntimeError(f"the compiled half is not there: {missing}")
    return compiled


def _runs(views: Iterable[memoryview]) -> ctypes.Array[_Run]:
    found = [_Run(address_of(view), view.nbytes) for view in views]
    return (_Run * len(found))(*found)


def _load() -> tuple[_Library | None, str]:
    path = Path(__file__).with_name(LIBRARY_NAME)
    if not path.exists():
        return None, "it was not built: no C compiler was found when the package was installed"
    try:
        return _Library(path), ""
    except (OSError, AttributeError) as error:
        return None, str(error)


def _agrees() -> bool:
    """Whether a copy comes out right, with the checksum that everybody else computes."""
    source = bytes(range(256)) * 17 + b"unaligned"
    target = bytearray(len(source))
    move = Move(len(source))
    move.gather([memoryview(source)[:1000], memoryview(source)[1000:]], address_of(memoryview(target)))
    together = bytearray(len(source))
    wanted = xxhash.xxh3_64_intdigest(source)
    payload: Payload = (address_of(memoryview(target)), len(source), [memoryview(together)])
    return target == source and move.checksum() == wanted and scatter_all([payload]) == [wanted] and together == source


compiled, missing = _load()
if compiled is not None and not _agrees():
    compiled, missing = None, "its checksums are not XXH3-64's on this processor"
