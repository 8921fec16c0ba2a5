"""What is simulated: every assumption is a field here, with its unit, so that a report can list them all."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

from polarkv_client.cli.trace import BLOCK_TOKENS
from polarkv_client.errors import ConfigurationError
from polarkv_client.layout import HEADER_BYTES, MAX_PAYLOAD_BYTES, stride_bytes
from polarkv_dataplane.planner.search import Fleet
from polarkv_dataplane.planner.shapes import Shape

GIB = 1 << 30


class Organisation(StrEnum):
    """How memory and disks of the machines are used."""

    MEMORY = "memory"  # a pool of memory; what has no room is dropped
    DISK = "disk"  # a pool of disks: every load reads a disk, every store writes one
    PAIRED = "paired"  # memory over the disks of the same machine
    GLOBAL = "global"  # memory over disks of any machine: offloads and loads cross the network


# Dense BF16 of one GPU, TFLOPS, as vendors print it without sparsity.
GPU_TFLOPS = {"h20": 148.0, "h100": 989.0, "h200": 989.0, "h800": 989.0, "a100": 312.0, "l40s": 362.0}


@dataclass(frozen=True)
class Hardware:
    """The cluster. Rates are bytes/s of one machine and one direction, sizes bytes of one machine."""

    nodes: int
    memory_bytes: int
    disk_bytes: int
    network_bytes_per_s: float
    disk_bytes_per_s: float
    cost_month: float = 0.0
    currency: str = ""

    @classmethod
    def of(cls, fleet: Fleet, *, disk_burst: bool = False) -> Hardware:
        """What a planned fleet has. Disks at the machines' baseline unless told otherwise: a trace outlasts a burst."""
        path = fleet.machine.instance.disk_bytes_per_s(burst=disk_burst, io_bytes=fleet.terms.io_bytes)
        return cls(
            fleet.nodes,
            fleet.machine.memory_mib << 20,
            fleet.disks * fleet.bought.gib * GIB,
            fleet.machine.network,
            fleet.disk_bytes_per_s_if(path) / fleet.nodes,
            fleet.cost,
            fleet.market.currency,
        )


@dataclass(frozen=True)
class Engines:
    """What computes. All engines are alike; one prefills one prompt at a time, first ready, first served."""

    count: int = 4
    gpus: int = 8
    tflops: float = GPU_TFLOPS["h20"]
    utilization: float = 0.5
    flops_per_token: float = 4.4e10
    attention_flops: float = 0.0  # for one token and one token before it
    prefill_tokens_per_s: float = 0.0  # measured; 0: by the figures above
    network_bytes_per_s: float = 25e9

    @classmethod
    def of(cls, shape: Shape, count: int, **others: Any) -> Engines:
        """For a model of the table."""
        base = shape.flops_per_token(0)
        return cls(count, flops_per_token=base, attention_flops=shape.flops_per_token(1) - base, **others)

    def prefill_s(self, tokens: int, before: int) -> float:
        """Seconds to compute ``tokens`` that follow ``before`` others."""
        if self.prefill_tokens_per_s:
            return tokens / self.prefill_tokens_per_s
        pairs = tokens * before + tokens * tokens / 2
        flops = tokens * self.flops_per_token + pairs * self.attention_flops
        return flops / (self.gpus * self.tflops * 1e12 * self.utilization)


@dataclass(frozen=True)
class Scenario:
    """One run.

    Args:
        block_bytes: KV of a block of the trace (512 tokens), over all ranks.
        stripes: parts of a block, one a rank, each on a machine of its own.
        inflight_bytes: what one client moves at a time; every rank has a client.
        load_deadline_s: a load or store that takes longer ends with what it has.
        call_s: one exchange with the manager. disk_latency_s: from asking a disk to its first byte.
        concurrency: 0: requests come at their time stamps, ``speed`` times as fast; else so many at once, one after
            the other, whatever the time stamps say.
        spread_s: time stamps are this coarse; requests of one are spread evenly over it.
        loads_first: disks do loads before offloads that wait; False: in the order in which they were asked.
        gate: skip loads that would take longer than computing, as the client does.
        passes: how often the trace is gone through; figures are those of the last time.
    """

    organisation: Organisation
    hardware: Hardware
    engines: Engines
    block_bytes: int
    stripes: int = 1
    inflight_bytes: int = 256 << 20
    load_deadline_s: float = 5.0
    call_s: float = 0.001
    disk_latency_s: float = 0.001
    concurrency: int = 0
    speed: float = 1.0
    spread_s: float = 3.0
    loads_first: bool = False
    gate: bool = False
    passes: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        where = f"{self.organisation} cluster"
        if not 0 < self.block_bytes <= MAX_PAYLOAD_BYTES:
            fix = f"a block is of {BLOCK_TOKENS} tokens and has 1 to {MAX_PAYLOAD_BYTES} bytes: use less KV a token"
            raise ConfigurationError("block_bytes", self.block_bytes, fix)
        if self.hardware.nodes < 1 or self.engines.count < 1 or self.passes < 1 or self.stripes < 1:
            raise ConfigurationError(where, "0", "use at least one node, engine, pass and stripe")
        if self.speed <= 0:
            raise ConfigurationError("speed", self.speed, "use a positive factor")
        uses_disks = self.organisation is not Organisation.MEMORY
        for name, amount, used in (
            ("network_bytes_per_s", self.hardware.network_bytes_per_s, True),
            ("disk_bytes_per_s", self.hardware.disk_bytes_per_s, uses_disks),
            ("disk_bytes", self.hardware.disk_bytes, uses_disks),
        ):
            if used and amount <= 0:
                raise ConfigurationError(f"{where}: {name}", amount, "its machines need some")
        needed = self.hardware.disk_bytes if self.organisation is Organisation.DISK else self.hardware.memory_bytes
        if needed < stride_bytes(self.block_bytes):
            raise ConfigurationError(
                where, f"{needed} bytes a node", f"a node must hold a block of {self.block_bytes + HEADER_BYTES} bytes"
            )

    @property
    def stripes_used(self) -> int:
        """A block has no more parts than there are machines."""
        return min(self.stripes, self.hardware.nodes)

    @property
    def window_blocks(self) -> int:
        """Blocks that one request moves at a time: clients start on another part while they are below their limit."""
        return 1 + self.inflight_bytes * self.stripes // self.block_bytes

    def with_organisation(self, organisation: Organisation, hardware: Hardware) -> Scenario:
        """The same on another cluster."""
        return replace(self, organisation=organisation, hardware=hardware)

    def assumptions(self) -> dict[str, Any]:
        """Every field, flat, for reports."""
        flat: dict[str, Any] = {}
        for name, value in asdict(self).items():
            if isinstance(value, dict):
                flat |= {f"{name}.{inner}": number for inner, number in value.items()}
            else:
                flat[name] = str(value) if isinstance(value, StrEnum) else value
        return flat
