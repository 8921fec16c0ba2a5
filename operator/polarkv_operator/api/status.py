"""The status of a ``PolarKVCluster``: what the operator saw last, written by it alone."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from polarkv_client.states import NodeState
from polarkv_operator.api.base import ApiModel
from polarkv_operator.api.parts import ShortText


class ConditionType(StrEnum):
    """The conditions of a cluster."""

    READY = "Ready"
    PROGRESSING = "Progressing"
    DEGRADED = "Degraded"
    MANAGER_AVAILABLE = "ManagerAvailable"
    SPEC_VALID = "SpecValid"
    RDMA_READY = "RDMAReady"


class ConditionStatus(StrEnum):
    """Whether a condition holds."""

    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class Condition(ApiModel):
    """One thing that is or is not so, since when, and why."""

    type: ConditionType = Field(description="What is or is not so.")
    status: ConditionStatus = Field(description="Whether it is so.")
    reason: ShortText = Field(description="Why, in one word.")
    message: Annotated[str, Field(max_length=32_768)] = Field(description="Why, for people, with what to do.")
    last_transition_time: str = Field(
        description="When the status last changed.", json_schema_extra={"format": "date-time"}
    )
    observed_generation: Annotated[int, Field(ge=0)] = Field(0, description="Generation of the spec that it speaks of.")


class CacheNodeStatus(ApiModel):
    """A cache node as the manager sees it."""

    name: ShortText = Field(description="Its pod's name.")
    state: NodeState | None = Field(None, description="Its state; without it, the manager does not know it.")
    message: str | None = Field(None, description="What it waits for, if anything.")


class AutoscalingStatus(ApiModel):
    """What autoscaling decided last."""

    desired_replicas: Annotated[int, Field(ge=0)] = Field(description="How many cache nodes it wants.")
    reason: ShortText = Field(description="Why, in one word.")
    message: str = Field(description="Why, with the figures.")
    last_scale_time: str | None = Field(
        None, description="When it last changed the number.", json_schema_extra={"format": "date-time"}
    )
    pending_replicas: int | None = Field(None, description="How many it would want if the need lasts.")
    pending_since: str | None = Field(
        None, description="Since when the need is there.", json_schema_extra={"format": "date-time"}
    )
    figures_time: str | None = Field(
        None, description="When the manager's figures were last seen, roughly: a gap starts the window anew.",
        json_schema_extra={"format": "date-time"},
    )  # fmt: skip


class PolarKVClusterStatus(ApiModel):
    """What the operator saw last."""

    observed_generation: Annotated[int, Field(ge=0)] | None = Field(
        None, description="Generation of the spec that all of this speaks of."
    )
    conditions: Annotated[
        list[Condition],
        Field(json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]}),
    ] = Field(
        default_factory=list,
        description="Ready, Progressing, Degraded, ManagerAvailable, SpecValid, RDMAReady.",
    )
    endpoint: str | None = Field(None, description="Where clients find the manager.")
    replicas: Annotated[int, Field(ge=0)] | None = Field(None, description="Cache nodes that have a pod.")
    ready_replicas: Annotated[int, Field(ge=0)] | None = Field(None, description="Cache nodes that are Active.")
    selector: str | None = Field(None, description="Selects the pods of the cache nodes; for autoscalers.")
    nodes: str | None = Field(None, description="Cache nodes Active of those wanted, such as 3/4.")
    served_bytes_per_second: Annotated[int, Field(ge=0)] | None = Field(
        None, description="Bytes per second that all cache nodes together serve to readers.",
        json_schema_extra={"format": "int64"},
    )  # fmt: skip
    served: str | None = Field(None, description="The same for people, such as 1.2GB/s.")
    cache_nodes: Annotated[
        list[CacheNodeStatus],
        Field(json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]}),
    ] = Field(default_factory=list, description="Each cache node as the manager sees it.")
    autoscaling: AutoscalingStatus | None = Field(None, description="What autoscaling decided last.")
    image: str | None = Field(None, description="Image that all pods run.")
    secrets_generation: int | None = Field(None, description="Generation of the secrets in use.")
