"""The object itself: ``PolarKVCluster`` of ``polarkv.io/v1alpha1``, and the one way from data to it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field, ValidationError

from polarkv_operator.api.base import ApiModel, Rule
from polarkv_operator.api.errors import SpecInvalid, from_pydantic
from polarkv_operator.api.spec import PolarKVClusterSpec
from polarkv_operator.api.status import PolarKVClusterStatus

GROUP = "polarkv.io"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "PolarKVCluster"
PLURAL = "polarkvclusters"
SINGULAR = "polarkvcluster"
SHORT_NAME = "pkv"
# Pods are named <cluster>-cache-<ordinal>, and the StatefulSet's revision label adds eleven characters.
MOST_NAME_CHARACTERS = 40
_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")


class ObjectMeta(ApiModel):
    """What of the metadata the operator reads."""

    name: str
    namespace: str
    uid: str = ""
    generation: int = 0
    resource_version: str = ""
    deletion_timestamp: str | None = None
    labels: dict[str, str] = Field(default_factory=dict)
    annotations: dict[str, str] = Field(default_factory=dict)


class PolarKVCluster(ApiModel):
    """A shared KV cache for LLM inference: memory and cloud disks paired on each cache node."""

    metadata: ObjectMeta
    spec: PolarKVClusterSpec = Field(description="What the cluster should be.")
    status: PolarKVClusterStatus | None = Field(None, description="What the operator saw last.")
    rules: ClassVar = (
        Rule(
            f"size(self.metadata.name) <= {MOST_NAME_CHARACTERS} && "
            "self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
            f"the name must be at most {MOST_NAME_CHARACTERS} lower-case letters, digits and '-', and begin with a "
            "letter: it becomes part of host names and labels",
            lambda cluster: _good_name(cluster.metadata.name),
            "metadata.name",
        ),
    )

    @property
    def name(self) -> str:
        """Its name."""
        return self.metadata.name

    @property
    def namespace(self) -> str:
        """Its namespace."""
        return self.metadata.namespace


def _good_name(name: str) -> bool:
    return len(name) <= MOST_NAME_CHARACTERS and _NAME.fullmatch(name) is not None


def parse(body: Mapping[str, Any]) -> PolarKVCluster:
    """Read a cluster as the API server (or a file) has it. Defaults are filled in; the status is not read.

    Raises:
        SpecInvalid: names the first field that is wrong, its value and the fix.
    """
    for name, wanted in (("apiVersion", API_VERSION), ("kind", KIND)):
        if body.get(name) != wanted:
            raise SpecInvalid(name, body.get(name), f"use {wanted}")
    try:
        return PolarKVCluster.model_validate({name: body[name] for name in ("metadata", "spec") if name in body})
    except ValidationError as error:
        raise from_pydantic(error) from None
