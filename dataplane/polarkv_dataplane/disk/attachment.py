"""A disk server's hold on its slab server's memory: the mapping, and the connection that shows that the slab lives."""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import time

from polarkv_client.errors import ProtocolError, Unavailable
from polarkv_client.protocol.messages import Op, SlabAttach, SlabAttached
from polarkv_client.protocol.wire import HEAD, Frame, decode_body, decode_head, encode_frame, raise_failure
from polarkv_dataplane.runtime.stream import receive_into, wait_readable

_CONNECT_S, _ANSWER_S = 1.0, 5.0


class Attachment:
    """A slab server's memory, mapped. ``view`` is usable until :meth:`close`."""

    def __init__(self, sock: socket.socket, memory: mmap.mmap, attached: SlabAttached) -> None:
        self._sock = sock
        self._map = memory
        self.view = memoryview(memory)
        self.pool = attached.pool
        self.number = attached.number
        self.incarnation = attached.incarnation
        self.size_bytes = attached.memory_bytes

    @classmethod
    def open(cls, path: str, node_token: str) -> Attachment:
        """Attach to the slab server that listens at ``path``.

        Raises:
            Unavailable: nobody answers there, or not in time. Unauthorized, Refused: as the slab server says.
        """
        with contextlib.ExitStack() as undo:
            sock = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            try:
                sock.settimeout(_CONNECT_S)
                sock.connect(path)
                frame, fds = _ask(sock, SlabAttach(token=node_token))
            except (OSError, EOFError) as error:
                raise Unavailable(f"slab server at {path}: {error}") from error
            for fd in fds:
                undo.callback(os.close, fd)
            raise_failure(frame)
            attached = decode_body(frame.body, SlabAttached)
            if not fds or os.fstat(fds[0]).st_size < attached.memory_bytes:
                raise ProtocolError("the slab server's answer came without its memory's descriptor")
            attachment = cls(sock, mmap.mmap(fds[0], attached.memory_bytes), attached)
            os.close(fds[0])  # the mapping has its own
            undo.pop_all()
            return attachment

    def lost(self, wait_s: float) -> bool:
        """Wait up to ``wait_s`` for the end of the slab server's connection; return whether it ended."""
        if not wait_readable(self._sock, wait_s):
            return False
        try:
            return not self._sock.recv(1, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        """Unmap. No operation may be under way."""
        self._sock.close()
        self.view.release()
        with contextlib.suppress(BufferError):  # a slice is still held by an error's traceback: unmapped when it goes
            self._map.close()


def _ask(sock: socket.socket, request: SlabAttach) -> tuple[Frame, list[int]]:
    """One request and its answer, with the descriptors that came along."""
    sock.sendall(encode_frame(Op.SLAB_ATTACH, 1, request))
    sock.settimeout(_ANSWER_S)
    first, fds, _, _ = socket.recv_fds(sock, HEAD.size, 1, socket.MSG_CMSG_CLOEXEC)
    try:
        sock.settimeout(None)
        deadline = time.monotonic() + _ANSWER_S
        head = bytearray(HEAD.size)
        head[: len(first)] = first
        receive_into(sock, memoryview(head)[len(first) :], deadline)
        op, request_id, length_bytes, status = decode_head(head)
        body = bytearray(length_bytes)
        receive_into(sock, memoryview(body), deadline)
        return Frame(op, request_id, status, bytes(body)), fds
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
