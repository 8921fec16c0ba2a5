"""The spec of a ``PolarKVCluster``: every field's description is what ``kubectl explain pkv.spec`` shows."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, ClassVar

from pydantic import Field

from polarkv_client.states import DrainMode
from polarkv_operator.api.autoscaling import AutoscalingSpec
from polarkv_operator.api.base import ApiModel, Rule
from polarkv_operator.api.cache_nodes import CacheNodesSpec, Retention
from polarkv_operator.api.parts import (
    DiskSize,
    Image,
    LocalReference,
    ObjectName,
    Percent,
    PodTemplate,
    Resources,
    Seconds,
    SecretReference,
)
from polarkv_operator.api.security import InjectionSpec, MonitoringSpec, SecuritySpec


class MetadataStoreType(StrEnum):
    """Where the manager writes metadata behind."""

    SQLITE = "SQLite"
    POSTGRESQL = "PostgreSQL"
    MYSQL = "MySQL"
    NONE = "None"


_NOT_SQLITE = "self.type != 'SQLite' || oldSelf.type != 'SQLite'"
_ANEW = "or set type None, delete the claim CLUSTER-metadata, and set type SQLite again"
_SERVERS = (MetadataStoreType.POSTGRESQL, MetadataStoreType.MYSQL)


class PullPolicy(StrEnum):
    """When the kubelet pulls an image."""

    ALWAYS = "Always"
    IF_NOT_PRESENT = "IfNotPresent"
    NEVER = "Never"


def _secret_as_needed(store: MetadataStoreSpec) -> bool:
    return (store.type in _SERVERS) == (store.secret_ref is not None)


class MetadataStoreSpec(ApiModel):
    """The manager's database: written behind, never waited for, never the truth."""

    type: MetadataStoreType = Field(
        MetadataStoreType.SQLITE,
        description="SQLite: a file on a volume of the manager's own. PostgreSQL, MySQL: a server named by "
        "secretRef. None: pins, recency and quotas are forgotten with the manager.",
    )
    secret_ref: SecretReference | None = Field(
        None,
        description="Secret with the database's URL, postgresql://USER:PASSWORD@HOST/NAME or "
        "mysql://USER:PASSWORD@HOST/NAME. For PostgreSQL and MySQL only.",
    )
    volume_size: DiskSize = Field(
        "2Gi", validate_default=True, description="Size of SQLite's volume. It grows; it cannot be made smaller."
    )
    storage_class_name: ObjectName | None = Field(
        None, description="Storage class of SQLite's volume; without it, the default one."
    )
    rules: ClassVar = (
        Rule(
            "(self.type in ['PostgreSQL', 'MySQL']) == has(self.secretRef)",
            "secretRef goes with types PostgreSQL and MySQL, and only with them: set both or neither",
            _secret_as_needed,
            "secretRef",
        ),
        Rule(
            f"{_NOT_SQLITE} || has(self.storageClassName) == has(oldSelf.storageClassName) && "
            "(!has(self.storageClassName) || self.storageClassName == oldSelf.storageClassName)",
            f"storageClassName cannot be changed: the volume stays in the class it was made in; {_ANEW}",
            field="storageClassName",
        ),
        Rule(
            f"{_NOT_SQLITE} || "
            "quantity(string(self.volumeSize)).compareTo(quantity(string(oldSelf.volumeSize))) >= 0",
            f"volumeSize cannot be lowered: volumes only grow; {_ANEW}",
            field="volumeSize",
        ),
    )


class ManagerSpec(ApiModel):
    """The manager: metadata, grants, tiering. It never holds a cached byte."""

    replicas: Annotated[int, Field(ge=0, le=1)] = Field(
        1, description="1, or 0 to stop the manager; every lookup is a miss until it is back."
    )
    resources: Resources = Field(
        default_factory=Resources,
        description="Compute resources. Memory left out follows from cache.maxKeys.",
    )
    metadata_store: MetadataStoreSpec = Field(
        default_factory=MetadataStoreSpec, description="Where metadata is written behind, for faster restarts."
    )
    pod_template: PodTemplate = Field(default_factory=PodTemplate, description="What to lay over the manager's pod.")


class Watermarks(ApiModel):
    """How full a tier may be before room is made."""

    memory: Percent = Field(90, description="With offloadAhead off: copy to disk once this much memory is used.")
    disk: Percent = Field(98, description="Delete the files unused for longest once this much disk is used.")


class CacheSpec(ApiModel):
    """How the cache behaves."""

    chunk_tokens: Annotated[int, Field(ge=1, le=65_536)] = Field(
        256, description="Tokens of a chunk. Engines round it to whole blocks of theirs."
    )
    read_lease_seconds: Annotated[int, Field(ge=1, le=3600)] = Field(5, description="How long a read may take.")
    write_ticket_seconds: Annotated[int, Field(ge=1, le=3600)] = Field(4, description="How long a store may take.")
    quarantine_seconds: Annotated[int, Field(ge=0, le=3600)] = Field(
        1, description="How long memory rests after a grant that did not end cleanly."
    )
    watermarks_percent: Watermarks = Field(
        default_factory=Watermarks, description="How full a tier may be, in percent, before room is made."
    )
    offload_ahead: bool = Field(
        True, description="Copy chunks to disk before memory is short, so that eviction and drains are cheap."
    )
    max_keys: Annotated[int, Field(ge=1000, le=100_000_000)] = Field(
        1_000_000, description="Most entries that the manager remembers, 400 bytes of memory each."
    )


class ScaleDownSpec(ApiModel):
    """How cache nodes leave."""

    drain_timeout_seconds: Seconds = Field(
        600, description="How long a cache node may take to copy its memory to disk; after it the rest is dropped."
    )
    volume_retention: Retention = Field(
        Retention.RETAIN,
        description="What becomes of the volumes of cache nodes that left, and of all when the cluster is deleted. "
        "Retain: they stay, cost money, and serve again when the cache node returns. Delete: they go.",
    )


class RolloutSpec(ApiModel):
    """How changes reach running cache nodes: one at a time, drained first, each Active before the next."""

    paused: bool = Field(False, description="Leave running cache nodes as they are.")
    drain_mode: DrainMode = Field(
        DrainMode.FLUSH, description="Flush: copy memory to disk first, which keeps the cache. Discard: drop it."
    )
    drain_timeout_seconds: Seconds = Field(
        600, description="How long that may take for one cache node; after it the rest is dropped."
    )
    ready_timeout_seconds: Seconds = Field(
        600, description="How long a new cache node may take to become Active before the cluster is Degraded."
    )


class PolarKVClusterSpec(ApiModel):
    """A shared KV cache: one manager and a set of cache nodes, each with memory and the disks paired with it."""

    image: Image | None = Field(
        None, description="Image of manager and cache nodes; without it, the one of the operator's release."
    )
    image_pull_policy: PullPolicy = Field(PullPolicy.IF_NOT_PRESENT, description="When the image is pulled.")
    image_pull_secrets: Annotated[list[LocalReference], Field(max_length=16)] = Field(
        default_factory=list, description="Secrets for pulling the image."
    )
    manager: ManagerSpec = Field(
        default_factory=ManagerSpec, description="The manager: metadata, grants, tiering. It never holds a cached byte."
    )
    cache_nodes: CacheNodesSpec = Field(description="The cache nodes: memory, and the disks paired with it.")
    cache: CacheSpec = Field(default_factory=CacheSpec, description="How the cache behaves.")
    autoscaling: AutoscalingSpec | None = Field(
        None,
        description="Scale the cache nodes on the bandwidth they serve. Leave it out where an HPA or KEDA scales them.",
    )
    scale_down: ScaleDownSpec = Field(default_factory=ScaleDownSpec, description="How cache nodes leave.")
    rollout: RolloutSpec = Field(
        default_factory=RolloutSpec, description="How changes reach running cache nodes: one at a time, drained first."
    )
    injection: InjectionSpec = Field(
        default_factory=InjectionSpec,
        description="What pods get that carry the label polarkv.io/inject with this cluster's name.",
    )
    security: SecuritySpec = Field(
        default_factory=SecuritySpec, description="Secrets, tenants, and who may reach the pods."
    )
    monitoring: MonitoringSpec = Field(default_factory=MonitoringSpec, description="Metrics and logs.")
    rules: ClassVar = (
        Rule(
            "self.security.tenants.exists(tenant, tenant.name == self.injection.tenant)",
            "injection.tenant is none of security.tenants: name one of them",
            lambda spec: any(tenant.name == spec.injection.tenant for tenant in spec.security.tenants),
            "injection.tenant",
        ),
    )
