"""The parts of a pod that injection reads, checked: whatever else a pod has passes by untouched."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from polarkv_operator.api.quantity import Quantity


class _Part(BaseModel):
    # Strict: a number where the API has text is no pod, and editing it would be guessing.
    model_config = ConfigDict(
        strict=True, frozen=True, extra="ignore", alias_generator=to_camel, hide_input_in_errors=True
    )


_AnyPart = TypeVar("_AnyPart", bound=_Part)


class Variable(_Part):
    """An environment variable."""

    name: str
    value: str | None = None
    value_from: dict[str, Any] | None = None


class Mount(_Part):
    """A volume in a container."""

    name: str
    mount_path: str


class Container(_Part):
    """A container or init container."""

    name: str
    image: str | None = None
    command: list[str] | None = None
    args: list[str] | None = None
    env: list[Variable] | None = None
    env_from: list[Any] | None = None
    volume_mounts: list[Mount] | None = None
    resources: Any = None

    def request(self, name: str) -> Quantity | None:
        """How much of a resource it is promised, or may use at most where only that is said; None: neither."""
        for group in ("requests", "limits"):
            try:
                return Quantity.parse(self.resources[group][name])
            except (KeyError, TypeError, ValueError):
                continue
        return None

    def variable(self, name: str) -> Variable | None:
        """The variable of that name that counts: of several, the last."""
        return next((variable for variable in reversed(self.env or ()) if variable.name == name), None)


class Volume(_Part):
    """A volume of the pod."""

    name: str
    empty_dir: dict[str, Any] | None = None


class SecretReference(_Part):
    """A Secret by name."""

    name: str | None = None


class SecurityContext(_Part):
    """What holds for every container that does not say otherwise."""

    run_as_user: int | None = None


class OperatingSystem(_Part):
    """What the pod is made for."""

    name: str


class Spec(_Part):
    """The pod's spec."""

    containers: list[Container] = Field(min_length=1)
    init_containers: list[Container] | None = None
    volumes: list[Volume] | None = None
    image_pull_secrets: list[SecretReference] | None = None
    security_context: SecurityContext | None = None
    host_network: bool | None = None
    dns_policy: str | None = None
    os: OperatingSystem | None = None


class Owner(_Part):
    """Who made the pod."""

    api_version: str
    kind: str
    name: str
    uid: str
    controller: bool | None = None


class Metadata(_Part):
    """The pod's metadata."""

    name: str | None = None
    generate_name: str | None = None
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    owner_references: list[Owner] | None = None

    @property
    def controller(self) -> Owner | None:
        """The owner that manages the pod."""
        return next((owner for owner in self.owner_references or () if owner.controller), None)


class Pod(_Part):
    """A pod as injection sees it."""

    metadata: Metadata
    spec: Spec


def read(document: object) -> Pod:
    """A checked view of a pod.

    Raises:
        ValueError: names the first field that is not what the API says, and what it should be.
    """
    return _read(Pod, document)


def read_metadata(document: object) -> Metadata | None:
    """A checked view of what a pod's metadata says, or None where it cannot be read."""
    try:
        return _read(Metadata, document.get("metadata") if isinstance(document, dict) else None)
    except ValueError:
        return None


def _read(model: type[_AnyPart], document: object) -> _AnyPart:
    try:
        return model.model_validate(document)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or "the pod"
        raise ValueError(f"{place}: {first['msg'][:200]}") from None
