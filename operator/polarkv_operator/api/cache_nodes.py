"""The spec of the cache nodes: how many, their memory, their disks, how bytes travel."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, ClassVar

from pydantic import Field

from polarkv_operator.api.base import ApiModel, Rule, unchanged
from polarkv_operator.api.parts import DiskSize, LabelName, MemorySize, ObjectName, PodTemplate, Resources, ShortText
from polarkv_operator.api.quantity import Quantity

# Ordinals have three digits then, and pods' host names stay within 63 characters.
MOST_CACHE_NODES = 512
_GREATER = "quantity(string({a})).compareTo(quantity(string({b})))"


class HugePages(StrEnum):
    """Size of the pages that the memory tier is made of."""

    NONE = "None"
    TWO_MI = "2Mi"
    ONE_GI = "1Gi"


class Layout(StrEnum):
    """How the volumes of a cache node are used together."""

    RAID0 = "RAID0"
    JBOD = "JBOD"


class TransportMode(StrEnum):
    """How bytes travel between cache nodes and engines."""

    AUTO = "Auto"
    RDMA = "RDMA"
    TCP = "TCP"


class Spread(StrEnum):
    """Whether two cache nodes may share a machine."""

    REQUIRED = "Required"
    PREFERRED = "Preferred"


class Retention(StrEnum):
    """What becomes of volumes that nobody uses."""

    RETAIN = "Retain"
    DELETE = "Delete"


def _whole_pages(memory: MemorySpec) -> bool:
    page = 1 if memory.huge_pages is HugePages.NONE else Quantity.parse(memory.huge_pages.value).bytes
    return memory.size.bytes % page == 0


class MemorySpec(ApiModel):
    """The memory tier of each cache node: the bandwidth of the cache."""

    size: MemorySize = Field(
        description="Memory that each cache node serves, such as 64Gi. What the servers need themselves comes on top."
    )
    huge_pages: HugePages = Field(
        HugePages.NONE,
        description="Take the memory from pages of this size that the machine has reserved. None: plain pages.",
    )
    rules: ClassVar = (
        Rule(
            "self.hugePages == 'None' || quantity(string(self.size)).isInteger() && "
            "quantity(string(self.size)).asInteger() % quantity(self.hugePages).asInteger() == 0",
            "size is no multiple of hugePages: use whole pages",
            _whole_pages,
            "size",
        ),
    )


class StorageSpec(ApiModel):
    """The disk tier of each cache node: the capacity of the cache."""

    layout: Layout = Field(
        Layout.JBOD,
        description="JBOD: a file system on each volume, chunks spread by key; needs no privilege. RAID0: one file "
        "system striped over all volumes, assembled by a privileged container beside the servers.",
    )
    volumes_per_node: Annotated[int, Field(ge=1, le=32)] = Field(1, description="Volumes of each cache node.")
    volume_size: DiskSize = Field(description="Size of each volume, such as 320Gi.")
    storage_class_name: ObjectName | None = Field(
        None, description="Storage class of the volumes; without it, the default one."
    )
    rules: ClassVar = (
        unchanged("layout", "the volumes that are there are formatted for it; make a new cluster beside this one"),
        unchanged("volumesPerNode", "chunks are spread over the volumes that are there; make a new cluster beside it"),
        Rule(
            "has(self.storageClassName) == has(oldSelf.storageClassName) && "
            "(!has(self.storageClassName) || self.storageClassName == oldSelf.storageClassName)",
            "storageClassName cannot be changed: volumes stay in the class they were made in; make a new cluster",
            field="storageClassName",
        ),
        Rule(
            f"self.layout != 'RAID0' || {_GREATER.format(a='self.volumeSize', b='oldSelf.volumeSize')} == 0",
            "volumeSize cannot be changed under RAID0: an array cannot use members that grew; make a new cluster",
            field="volumeSize",
        ),
        Rule(
            f"{_GREATER.format(a='self.volumeSize', b='oldSelf.volumeSize')} >= 0",
            "volumeSize cannot be lowered: volumes only grow; make a new cluster",
            field="volumeSize",
        ),
    )


def _rdma_has_device(transport: TransportSpec) -> bool:
    return transport.mode is not TransportMode.RDMA or transport.resource_name is not None


class TransportSpec(ApiModel):
    """How bytes travel between cache nodes and engines."""

    mode: TransportMode = Field(
        TransportMode.AUTO,
        description="Auto: RDMA where both ends have it, TCP elsewhere. RDMA: nothing else. TCP: never RDMA.",
    )
    resource_name: LabelName | None = Field(
        None, description="Extended resource of the RDMA device plugin, such as rdma/hca_shared_devices_a."
    )
    resource_count: Annotated[int, Field(ge=1, le=16)] = Field(
        1, description="How many of that resource each cache node asks for."
    )
    device_name: ShortText | None = Field(None, description="RDMA device to use, such as mlx5_0; without it, chosen.")
    gid_index: Annotated[int, Field(ge=0, le=255)] | None = Field(
        None, description="GID to use; without it the RoCE v2 entry with the pod's IPv4 address."
    )
    rules: ClassVar = (
        Rule(
            "self.mode != 'RDMA' || has(self.resourceName)",
            "mode RDMA needs the device's resource: set resourceName, such as rdma/hca_shared_devices_a",
            _rdma_has_device,
            "resourceName",
        ),
    )


class CacheNodeResources(ApiModel):
    """Compute resources of the two servers of a cache node."""

    slab: Resources = Field(
        default_factory=Resources,
        description="The slab server's. Memory is beside the memory tier, which is added to it.",
    )
    disk: Resources = Field(default_factory=Resources, description="The disk server's.")


class CacheNodesSpec(ApiModel):
    """The cache nodes: memory, and the disks paired with it."""

    replicas: Annotated[int, Field(ge=0, le=MOST_CACHE_NODES)] = Field(
        3, description="How many cache nodes. With autoscaling: how many to begin with."
    )
    memory: MemorySpec = Field(description="The memory tier of each cache node: the bandwidth of the cache.")
    storage: StorageSpec = Field(description="The disk tier of each cache node: the capacity of the cache.")
    transport: TransportSpec = Field(
        default_factory=TransportSpec, description="How bytes travel between cache nodes and engines."
    )
    resources: CacheNodeResources = Field(
        default_factory=CacheNodeResources, description="Compute resources of the two servers of a cache node."
    )
    spread: Spread = Field(
        Spread.PREFERRED,
        description="Whether two cache nodes may share a machine, and with it its network. Required: never.",
    )
    pod_template: PodTemplate = Field(
        default_factory=PodTemplate, description="What to lay over the pods of the cache nodes."
    )
