"""The seam by ``ibverbs`` (PyPI), a wheel that loads the system's libibverbs. The only file that imports it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import ibverbs
from ibverbs import enums

from polarkv_client.protocol.messages import QueuePair
from polarkv_client.transport.verbs import seam
from polarkv_client.transport.verbs.seam import Access, Completion, Limits, Opcode, Port, VerbsError, Work

_SIGNALED = int(enums.SendFlags.SIGNALED)
_OPCODES = {Opcode.WRITE: enums.WROpcode.RDMA_WRITE, Opcode.READ: enums.WROpcode.RDMA_READ}


@contextlib.contextmanager
def _translated(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:  # their VerbsError is one
        raise VerbsError(f"{what}: {error.strerror or error}", error.errno or 0) from error


class _Region(seam.Region):
    def __init__(self, region: Any) -> None:
        self._region = region
        self.address, self.size_bytes = int(region.addr), int(region.length)
        self.lkey, self.rkey = int(region.lkey), int(region.rkey)

    def close(self) -> None:
        with _translated("taking a registration back"):
            self._region.close()


class _Completions(seam.Completions):
    def __init__(self, context: Any, most: int, events: bool) -> None:
        self._channel = context.create_comp_channel() if events else None
        try:
            self.queue = context.create_cq(most, channel=self._channel)
        except OSError:
            if self._channel is not None:
                self._channel.close()
            raise
        self.descriptor = int(self._channel.fd) if self._channel is not None else -1

    def arm(self) -> None:
        self.queue.req_notify()

    def take_event(self) -> None:
        assert self._channel is not None
        self._channel.get_cq_event().ack_events(1)

    def poll(self, most: int) -> Sequence[Completion]:
        return [Completion(int(found.wr_id), int(found.status)) for found in self.queue.poll(most)]

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
        remote = ibverbs.QPInfo(theirs.number, theirs.psn, theirs.lid, theirs.gid, self._port, theirs.mtu)
        with _translated("connecting a queue pair"):
            self._pair.to_init(self._port, int(access))
            self._pair.to_rtr(
                remote,
                sgid_index=gid_index,
                mtu=min(mine.mtu, theirs.mtu),
                hop_limit=seam.HOP_LIMIT,
                min_rnr_timer=seam.NOT_READY_TIMER,
                max_dest_rd_atomic=mine.reads,
            )
            self._pair.to_rts(
                mine.psn,
                timeout=seam.ACK_TIMEOUT,
                retry_cnt=seam.RETRIES,
                rnr_retry=seam.NOT_READY_RETRIES,
                max_rd_atomic=min(mine.reads, theirs.reads),
            )

    def post(self, works: Sequence[Work]) -> None:
        requests = [
            ibverbs.SendWR(
                wr_id=work.number,
                sg_list=[ibverbs.SGE(work.address, work.size_bytes, work.lkey)],
                opcode=_OPCODES[work.opcode],
                send_flags=_SIGNALED if work.signaled else 0,
                remote_addr=work.remote_address,
                rkey=work.rkey,
            )
            for work in works
        ]
        with _translated("posting"):
            self._pair.post_send(requests)

    def close(self) -> None:
        with _translated("destroying a queue pair"):
            self._pair.close()


class _Device(seam.Device):
    def __init__(self, name: str) -> None:
        with _translated(f"opening {name}"):
            found = next((device for device in ibverbs.get_device_list() if device.name == name), None)
            if found is None:
                raise VerbsError(f"libibverbs has no device {name}: is its provider's library installed?")
            self._context = found.open()
            try:
                self._domain = self._context.alloc_pd()
                most = self._context.query_device()
            except OSError:
                self._context.close()
                raise
        self.name = name
        self.limits = Limits(
            int(most.max_mr_size), int(most.max_mr), int(most.max_qp), int(most.max_qp_wr), int(most.max_qp_rd_atom)
        )

    def port(self, number: int) -> Port:
        with _translated(f"asking {self.name} for its port {number}"):
            found = self._context.query_port(number)
        active = int(found.state) == int(enums.PortState.ACTIVE)
        return Port(active, int(found.active_mtu), int(found.lid))

    def register(self, address: int, size_bytes: int, access: Access) -> seam.Region:
        with _translated(f"registering {size_bytes} bytes with {self.name}"):
            return _Region(self._domain.reg_mr(address, size_bytes, int(access)))

    def completions(self, most: int, *, events: bool) -> seam.Completions:
        with _translated(f"making a completion queue of {self.name}"):
            return _Completions(self._context, most, events)

    def pair(self, completions: seam.Completions, port: int, queued: int) -> seam.Pair:
        assert isinstance(completions, _Completions)
        with _translated(f"making a queue pair of {self.name}"):
            asked = ibverbs.QPInitAttr(
                send_cq=completions.queue,
                recv_cq=completions.queue,
                qp_type=ibverbs.QPType.RC,
                max_send_wr=queued,
                max_recv_wr=1,
            )
            return _Pair(self._domain.create_qp(asked), port)

    def close(self) -> None:
        with _translated(f"closing {self.name}"):
            self._domain.close()
            self._context.close()


class IbverbsBinding(seam.Binding):
    """See :class:`seam.Binding`."""

    name = "ibverbs"

    def __init__(self) -> None:
        self.version = str(ibverbs.__version__)

    def open(self, name: str) -> seam.Device:
        return _Device(name)
