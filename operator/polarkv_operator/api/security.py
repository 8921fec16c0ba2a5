"""The spec of secrets, tenants, network access, injection and monitoring."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, ClassVar

from pydantic import Field, StringConstraints

from polarkv_operator.api.base import ApiModel, Rule
from polarkv_operator.api.parts import AnyObject, DnsLabel, Image, Label, LabelName, Quota

DEFAULT_TENANT = "default"


class TenantSpec(ApiModel):
    """A user of the cache with a token of its own."""

    name: Annotated[DnsLabel, StringConstraints(max_length=40)] = Field(
        description="Name of the tenant. Its token is in the Secret <cluster>-client, under this name."
    )
    quota: Quota | None = Field(None, description="Most bytes that it may keep in the cache; without it, no limit.")


class NetworkPolicySpec(ApiModel):
    """Who may reach the pods, where the cluster's network enforces policies."""

    enabled: bool = Field(True, description="Make NetworkPolicies.")
    clients: Annotated[list[AnyObject], Field(max_length=32)] = Field(
        default_factory=list,
        description="NetworkPolicy peers (podSelector, namespaceSelector, ipBlock) that may be clients; without any, "
        "all pods may, and their tokens decide.",
    )
    monitoring: Annotated[list[AnyObject], Field(max_length=32)] = Field(
        default_factory=list,
        description="NetworkPolicy peers that may read metrics and the admin API, besides the operator; without any, "
        "all pods may, and the admin API asks for its token.",
    )


class SecuritySpec(ApiModel):
    """Secrets, tenants, and who may reach the pods."""

    secrets_generation: Annotated[int, Field(ge=1, le=2**31 - 1)] = Field(
        1,
        description="Raise it to have every secret and token made anew. Memory copies are lost, files are kept, and "
        "clients miss until they have their new token.",
    )
    tenants: Annotated[
        list[TenantSpec],
        Field(min_length=1, max_length=256, json_schema_extra={
            "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"],
            "default": [{"name": DEFAULT_TENANT}],
        }),
    ] = Field(
        default_factory=lambda: [TenantSpec(name=DEFAULT_TENANT)],
        description="Users of the cache, each with a token and maybe a quota. Keep apart by salt those who must not "
        "see each other's chunks.",
    )  # fmt: skip
    network_policy: NetworkPolicySpec = Field(
        default_factory=NetworkPolicySpec,
        description="Who may reach the pods, where the cluster's network enforces policies.",
    )
    rules: ClassVar = (
        Rule(
            "self.secretsGeneration >= oldSelf.secretsGeneration",
            "secretsGeneration cannot be lowered: old secrets are gone; raise it to make new ones",
            field="secretsGeneration",
        ),
        Rule(
            "self.tenants.all(tenant, self.tenants.exists_one(other, other.name == tenant.name))",
            "two tenants have one name: give each its own",
            lambda security: len({tenant.name for tenant in security.tenants}) == len(security.tenants),
            "tenants",
        ),
    )


class InjectionSpec(ApiModel):
    """What pods get that carry the label polarkv.io/inject with this cluster's name."""

    enabled: bool = Field(True, description="Whether pods get anything.")
    image: Image | None = Field(
        None, description="Image that the client library is copied from; without it, the cluster's."
    )
    tenant: DnsLabel = Field(DEFAULT_TENANT, description="Tenant whose token they get; one of security.tenants.")


class LogLevel(StrEnum):
    """Least severe log lines to write."""

    DEBUG = "Debug"
    INFO = "Info"
    WARNING = "Warning"
    ERROR = "Error"


class PodMonitorSpec(ApiModel):
    """A PodMonitor for the Prometheus operator; made where its CRD is installed."""

    enabled: bool = Field(True, description="Make one where its CRD is installed.")
    interval_seconds: Annotated[int, Field(ge=1, le=3600)] = Field(30, description="How often to read metrics.")
    labels: Annotated[dict[LabelName, Label], Field(max_length=64)] = Field(
        default_factory=dict, description="Labels by which your Prometheus selects its monitors."
    )


class MonitoringSpec(ApiModel):
    """Metrics and logs."""

    log_level: LogLevel = Field(LogLevel.INFO, description="Least severe log lines that manager and servers write.")
    pod_monitor: PodMonitorSpec = Field(
        default_factory=PodMonitorSpec,
        description="A PodMonitor for the Prometheus operator; made where its CRD is installed.",
    )
