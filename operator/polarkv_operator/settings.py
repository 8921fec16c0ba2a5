"""Settings of the operator. In its pod they come from the environment, as the chart sets it."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class OperatorSettings(BaseModel):
    """What an operator is told at its start."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    image: str = Field(description="Image of clusters that name none: the one of this release.")
    namespace: str = Field(default="polarkv-system", description="Namespace of the operator itself, and of its Lease.")
    watch_namespace: str = Field(default="", description="The one namespace to look after; empty: all of them.")
    lease_name: str = Field(default="polarkv-operator", description="Lease that says which operator acts.")
    identity: str = Field(
        default="", description="Who this operator is in the Lease; empty: its host name (the pod's) and process id."
    )
    workers: int = Field(default=4, ge=1, le=64, description="Clusters looked at at a time.")
    resync_seconds: int = Field(default=60, ge=1, le=3600, description="How often every cluster is looked at anyway.")
    health_port: int = Field(default=8080, ge=0, le=65535, description="Port of /healthz; 0 turns it off.")
