"""The Unix socket: hands out the pool's descriptor, and stays open as the sign that this slab server lives."""

from __future__ import annotations

import hmac
import socket
import time

from polarkv_client.errors import PolarKVError, ProtocolError, Unauthorized
from polarkv_client.protocol.messages import Op, SlabAttach, SlabAttached
from polarkv_client.protocol.wire import decode_body, encode_failure, encode_frame
from polarkv_dataplane.runtime.counters import Counters
from polarkv_dataplane.runtime.session import Life
from polarkv_dataplane.runtime.stream import read_frame, set_send_timeout, wait_readable
from polarkv_dataplane.slab.life import Gate
from polarkv_dataplane.slab.pool import Pool
from polarkv_dataplane.slab.tcp import say_and_close

_FRAME_S = 5.0
_MAX_REQUEST_BYTES = 4 << 20


class Handout:
    """Serves attachments on Unix connections."""

    def __init__(self, pool: Pool, gate: Gate, node_token: str, counters: Counters) -> None:
        self._pool = pool
        self._gate = gate
        self._node_token = node_token
        self._counters = counters

    def serve(self, sock: socket.socket) -> None:
        """Serve one connection until it ends. Raises as ``TcpPath.serve``."""
        set_send_timeout(sock, _FRAME_S)
        while True:
            while not wait_readable(sock, 60.0):
                pass
            try:
                frame = read_frame(sock, time.monotonic() + _FRAME_S, _MAX_REQUEST_BYTES)
            except ProtocolError as error:
                say_and_close(sock, encode_failure(0, 0, error))
                raise
            try:
                if frame.op != Op.SLAB_ATTACH:
                    raise ProtocolError(f"op {frame.op} is not served here: this socket hands out memory")
                life = self._admit(decode_body(frame.body, SlabAttach))
            except PolarKVError as error:
                sock.sendall(encode_failure(frame.op, frame.request_id, error))
                if isinstance(error, ProtocolError):
                    raise
                continue
            answer = SlabAttached(self._pool.id, life.number, life.incarnation, self._pool.size_bytes)
            data = encode_frame(frame.op, frame.request_id, answer)
            sent = socket.send_fds(sock, [data], [self._pool.fd])
            sock.sendall(data[sent:])
            self._counters.add("polarkv_slab_attachments_total")

    def _admit(self, request: SlabAttach) -> Life:
        life = self._gate.life
        if request.token:
            if not hmac.compare_digest(request.token.encode(), self._node_token.encode()):
                raise Unauthorized("the node token is wrong: slab and disk server must have the same secret_file")
            return life
        self._gate.admit(request.grant, None)
        return life
