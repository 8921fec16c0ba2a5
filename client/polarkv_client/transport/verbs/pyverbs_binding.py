"""The seam by pyverbs, rdma-core's own binding, as distributions package it. The only file that imports it.

A virtual environment does not see the system's packages: it is then looked for where Debian puts it. pyverbs does not
say which descriptor a channel has; it is found by looking what was opened.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import ipaddress
import logging
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from polarkv_client.protocol.messages import QueuePair
from polarkv_client.transport.verbs import seam
from polarkv_client.transport.verbs.seam import Access, Completion, Limits, Port, VerbsError, Work

_SYSTEM = Path("/usr/lib/python3/dist-packages/pyverbs")
_CHANNEL = "anon_inode:[infinibandevent]"
_channels = threading.Lock()


def _find() -> None:
    """Make the system's pyverbs importable, and nothing else of what lies beside it."""
    if importlib.util.find_spec("pyverbs") is not None or not _SYSTEM.is_dir():
        return
    spec = importlib.util.spec_from_file_location(
        "pyverbs", _SYSTEM / "__init__.py", submodule_search_locations=[str(_SYSTEM)]
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["pyverbs"] = module
    spec.loader.exec_module(module)


# Importing it sets the program's own logging up, which is not for it to do.
_root = logging.getLogger()
_before = _root.handlers[:], _root.level
_find()

from pyverbs import addr, cq, device, enums, mr, pd, qp, wr  # noqa: E402
from pyverbs.pyverbs_error import PyverbsError  # noqa: E402

_root.handlers[:], _root.level = _before


@contextlib.contextmanager
def _translated(what: str) -> Iterator[None]:
    try:
        yield
    except PyverbsError as error:
        raise VerbsError(f"{what}: {error}", max(getattr(error, "error_code", 0), 0)) from error


class _Region(seam.Region):
    def __init__(self, region: Any, address: int) -> None:
        self._region = region
        self.address, self.size_bytes = address, int(region.length)
        self.lkey, self.rkey = int(region.lkey), int(region.rkey)

    def close(self) -> None:
        with _translated("taking a registration back"):
            self._region.close()


def _open_channels() -> set[int]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}") == _CHANNEL:
                found.add(int(name))
    return found


class _Completions(seam.Completions):
    def __init__(self, context: Any, most: int, events: bool) -> None:
        self._channel: Any = None
        self.descriptor = -1
        if events:
            with _channels:
                before = _open_channels()
                self._channel = cq.CompChannel(context)
                opened = _open_channels() - before
            if len(opened) != 1:
                self._channel.close()
                raise VerbsError("pyverbs: the channel's descriptor cannot be told")
            (self.descriptor,) = opened
        self.queue = cq.CQ(context, most, None, self._channel, 0)

    def arm(self) -> None:
        self.queue.req_notify()

    def take_event(self) -> None:
        self._channel.get_cq_event(self.queue)
        self.queue.ack_events(1)

    def poll(self, most: int) -> Sequence[Completion]:
        count, found = self.queue.poll(most)
        return [Completion(int(each.wr_id), int(each.status)) for each in found[:count]] if count else ()

    def close(self) -> None:
        with _translated("closing a completion queue"):
            self.queue.close()
            if self._channel is not None:
                self._channel.close()


class _Pair(seam.Pair):
    def __init__(self, pair: Any, port: int) -> None:
        self._pair = pair
        self._port = port
        self.number = int(pair.qp_num)

    def connect(self, gid_index: int, mine: QueuePair, theirs: QueuePair, access: Access) -> None:
        wanted = qp.QPAttr(port_num=self._port)
        wanted.qp_access_flags = int(access)
        wanted.dest_qp_num = theirs.number
        wanted.path_mtu = min(mine.mtu, theirs.mtu)
        wanted.rq_psn, wanted.sq_psn = theirs.psn, mine.psn
        wanted.max_dest_rd_atomic = mine.reads
        wanted.max_rd_atomic = min(mine.reads, theirs.reads)
        wanted.min_rnr_timer = seam.NOT_READY_TIMER
        wanted.timeout, wanted.retry_cnt, wanted.rnr_retry = seam.ACK_TIMEOUT, seam.RETRIES, seam.NOT_READY_RETRIES
        route = addr.GlobalRoute(
            dgid=addr.GID(ipaddress.IPv6Address(theirs.gid).exploded), sgid_index=gid_index, hop_limit=seam.HOP_LIMIT
        )
        wanted.ah_attr = addr.AHAttr(port_num=self._port, is_global=1, dlid=theirs.lid, gr=route)
        with _translated("connecting a queue pair"):
            self._pair.to_rts(wanted)

    def post(self, works: Sequence[Work]) -> None:
        with _translated("posting"):
            for work in works:
                request = wr.SendWR(
                    wr_id=work.number,
                    opcode=int(work.opcode),
                    num_sge=1,
                    sg=[wr.SGE(work.address, work.size_bytes, work.lkey)],
                    send_flags=enums.IBV_SEND_SIGNALED if work.signaled else 0,
                )
                request.set_wr_rdma(work.rkey, work.remote_address)
                self._pair.post_send(request)

    def close(self) -> None:
        with _translated("destroying a queue pair"):
            self._pair.close()


class _Device(seam.Device):
    def __init__(self, name: str) -> None:
        with _translated(f"opening {name}"):
            self._context = device.Context(name=name)
            try:
                self._domain = pd.PD(self._context)
                most = self._context.query_device()
            except PyverbsError:
                self._context.close()
                raise
        self.name = name
        self.limits = Limits(most.max_mr_size, most.max_mr, most.max_qp, most.max_qp_wr, most.max_qp_rd_atom)

    def port(self, number: int) -> Port:
        with _translated(f"asking {self.name} for its port {number}"):
            found = self._context.query_port(number)
        return Port(found.state == enums.IBV_PORT_ACTIVE, int(found.active_mtu), int(found.lid))

    def register(self, address: int, size_bytes: int, access: Access) -> seam.Region:
        with _translated(f"registering {size_bytes} bytes with {self.name}"):
            return _Region(mr.MR(self._domain, size_bytes, int(access), address=address), address)

    def completions(self, most: int, *, events: bool) -> seam.Completions:
        with _translated(f"making a completion queue of {self.name}"):
            return _Completions(self._context, most, events)

    def pair(self, completions: seam.Completions, port: int, queued: int) -> seam.Pair:
        assert isinstance(completions, _Completions)
        asked = qp.QPInitAttr(
            qp_type=enums.IBV_QPT_RC,
            scq=completions.queue,
            rcq=completions.queue,
            sq_sig_all=0,  # its default is another
            cap=qp.QPCap(max_send_wr=queued, max_recv_wr=1, max_send_sge=1, max_recv_sge=1),
        )
        with _translated(f"making a queue pair of {self.name}"):
            return _Pair(qp.QP(self._domain, asked), port)

    def close(self) -> None:
        with _translated(f"closing {self.name}"):
            self._domain.close()
            self._context.close()


class PyverbsBinding(seam.Binding):
    """See :class:`seam.Binding`. It does not say which version it is: that of rdma-core."""

    name = "pyverbs"
    version = "of rdma-core"

    def open(self, name: str) -> seam.Device:
        return _Device(name)
