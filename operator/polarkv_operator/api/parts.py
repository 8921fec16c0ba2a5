"""Small shapes that several parts of the spec share."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field, StringConstraints, WithJsonSchema

from polarkv_operator.api.base import ApiModel, Rule
from polarkv_operator.api.quantity import AtLeast, Quantity

DnsLabel = Annotated[str, StringConstraints(min_length=1, max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")]
ObjectName = Annotated[
    str, StringConstraints(min_length=1, max_length=253, pattern=r"^[a-z0-9]([-.a-z0-9]*[a-z0-9])?$")
]
ShortText = Annotated[str, StringConstraints(min_length=1, max_length=253)]
Image = Annotated[str, StringConstraints(min_length=1, max_length=512, pattern=r"^[^\s]+$")]
Label = Annotated[str, StringConstraints(max_length=63, pattern=r"^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$")]
# Of labels, annotations and resources alike: a name, maybe after a domain.
LabelName = Annotated[
    str,
    StringConstraints(
        min_length=1,
        max_length=317,
        pattern=r"^([a-z0-9]([-.a-z0-9]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$",
    ),
]
AnyObject = Annotated[dict[str, Any], WithJsonSchema({"type": "object", "x-kubernetes-preserve-unknown-fields": True})]
Percent = Annotated[int, Field(ge=1, le=100)]
Seconds = Annotated[int, Field(ge=1, le=86_400)]
DiskSize = Annotated[Quantity, AtLeast("64Mi")]
MemorySize = Annotated[Quantity, AtLeast("16Mi")]
BytesPerSecond = Annotated[Quantity, AtLeast("1k")]
# Not 0: to the manager that is no limit.
Quota = Annotated[Quantity, AtLeast("1")]


def _requests_fit(resources: Resources) -> bool:
    return all(
        name not in resources.limits or amount.value <= resources.limits[name].value
        for name, amount in resources.requests.items()
    )


class Resources(ApiModel):
    """Compute resources of a container."""

    requests: Annotated[dict[LabelName, Quantity], Field(max_length=16)] = Field(
        default_factory=dict, description="What the container is promised, such as cpu: 500m."
    )
    limits: Annotated[dict[LabelName, Quantity], Field(max_length=16)] = Field(
        default_factory=dict, description="What it may use at most."
    )
    rules: ClassVar = (
        Rule(
            "!has(self.requests) || !has(self.limits) || self.requests.all(name, !(name in self.limits) || "
            "quantity(string(self.requests[name])).compareTo(quantity(string(self.limits[name]))) <= 0)",
            "a request is larger than its limit: raise the limit or lower the request",
            _requests_fit,
            "requests",
        ),
    )


class TemplateMetadata(ApiModel):
    """Labels and annotations."""

    labels: Annotated[dict[LabelName, Label], Field(max_length=64)] = Field(
        default_factory=dict, description="Labels to add. The operator's own win."
    )
    annotations: Annotated[dict[LabelName, str], Field(max_length=64)] = Field(
        default_factory=dict, description="Annotations to add. The operator's own win."
    )


class PodTemplate(ApiModel):
    """What to lay over the pods that the operator builds."""

    metadata: TemplateMetadata = Field(default_factory=TemplateMetadata, description="Labels and annotations to add.")
    spec: AnyObject = Field(
        default_factory=dict,
        description="Part of a pod's spec, merged strategically: lists of named things (containers, volumes, env) by "
        "their names, other lists replaced. For tolerations, nodeSelector, priorityClassName, sidecars.",
    )


class LocalReference(ApiModel):
    """The name of an object in the cluster's namespace."""

    name: ObjectName = Field(description="Name of the object, in the namespace of the cluster.")


class SecretReference(LocalReference):
    """One key of a Secret in the cluster's namespace."""

    key: ShortText = Field("url", description="Key in the Secret's data.")
