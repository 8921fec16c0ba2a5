"""The spec of autoscaling: a target for the bandwidth that each cache node serves, and how fast to follow it."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from polarkv_operator.api.base import ApiModel, Rule
from polarkv_operator.api.parts import BytesPerSecond, Percent

# Above any number of cache nodes (``cache_nodes.MOST_CACHE_NODES``).
_Nodes = Annotated[int, Field(ge=1, le=512)]
_Window = Annotated[int, Field(ge=0, le=86_400)]


class TargetBandwidth(ApiModel):
    """What each cache node should serve on average: a share of its network, or a rate."""

    utilization_percent: Percent | None = Field(
        None, description="Percent of nodeBaseline. Scale on the baseline of the instance, not on its burst."
    )
    node_baseline: BytesPerSecond | None = Field(
        None, description="Baseline network bandwidth of a cache node, in bytes per second, such as 312M."
    )
    bytes_per_second: BytesPerSecond | None = Field(None, description="Bytes per second, such as 250M.")
    rules: ClassVar = (
        Rule(
            "has(self.utilizationPercent) != has(self.bytesPerSecond)",
            "set either utilizationPercent or bytesPerSecond",
            lambda target: (target.utilization_percent is None) != (target.bytes_per_second is None),
        ),
        Rule(
            "has(self.utilizationPercent) == has(self.nodeBaseline)",
            "utilizationPercent is a share of nodeBaseline: set both or neither",
            lambda target: (target.utilization_percent is None) == (target.node_baseline is None),
            "nodeBaseline",
        ),
    )

    @property
    def per_node_bytes_per_second(self) -> float:
        """The target, whichever way it was written."""
        if self.bytes_per_second is not None:
            return float(self.bytes_per_second.value)
        assert self.utilization_percent is not None and self.node_baseline is not None
        return float(self.node_baseline.value) * self.utilization_percent / 100


class ScalingUp(ApiModel):
    """How fast cache nodes join."""

    stabilization_window_seconds: _Window = Field(
        0, description="Add cache nodes only as far as they were needed throughout this time. 0: at once."
    )
    max_nodes: _Nodes = Field(4, description="Most cache nodes to add in one step.")
    period_seconds: _Window = Field(60, description="Time between two steps.")


class ScalingDown(ApiModel):
    """How fast cache nodes leave. Each takes its share of the memory tier with it."""

    stabilization_window_seconds: _Window = Field(
        1800, description="Remove cache nodes only as far as none more was needed throughout this time."
    )
    max_nodes: _Nodes = Field(1, description="Most cache nodes to remove in one step.")
    period_seconds: _Window = Field(60, description="Time between two steps.")


class Behavior(ApiModel):
    """How fast to follow the target."""

    scale_up: ScalingUp = Field(default_factory=ScalingUp, description="How fast cache nodes join.")
    scale_down: ScalingDown = Field(default_factory=ScalingDown, description="How fast cache nodes leave.")
    tolerance_percent: Annotated[int, Field(ge=0, le=100)] = Field(
        10, description="How far from the target the bandwidth may be before anything is done."
    )
    metrics_timeout_seconds: Annotated[int, Field(ge=1, le=3600)] = Field(
        60, description="How old the manager's figures may be. Nothing is decided on older ones."
    )


class AutoscalingSpec(ApiModel):
    """Scale the cache nodes on the bandwidth they serve."""

    min_replicas: _Nodes = Field(1, description="Fewest cache nodes.")
    max_replicas: _Nodes = Field(description="Most cache nodes.")
    target_bandwidth: TargetBandwidth = Field(
        description="What each cache node should serve on average: a share of its network, or a rate."
    )
    behavior: Behavior = Field(default_factory=Behavior, description="How fast to follow the target.")
    rules: ClassVar = (
        Rule(
            "self.minReplicas <= self.maxReplicas",
            "minReplicas is larger than maxReplicas: swap them or raise maxReplicas",
            lambda scaling: scaling.min_replicas <= scaling.max_replicas,
            "minReplicas",
        ),
    )
