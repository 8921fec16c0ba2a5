"""Base of the API's models, and rules that hold in the API server (as CEL) and here (as Python) with one text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, model_validator
from pydantic.alias_generators import to_camel
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError


@dataclass(frozen=True)
class Rule:
    """A rule over one object of the spec.

    ``cel`` is what the API server evaluates; ``holds`` says the same of a model. A rule about a change (``oldSelf``)
    has no ``holds``: only the API server sees both states. ``field`` is the path below the object that is at fault.
    """

    cel: str
    message: str
    holds: Callable[[Any], bool] | None = None
    field: str = ""

    def schema(self) -> dict[str, str]:
        """As the CRD has it."""
        rule = {"rule": self.cel, "message": self.message}
        # The API server knows of no field below the metadata.
        if self.field and not self.field.startswith("metadata."):
            rule["fieldPath"] = f".{self.field}"
        return rule


class ApiModel(BaseModel):
    """Part of an object. Fields are camelCase outside; unknown ones are the API server's to prune and warn about."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, frozen=True, extra="ignore")
    rules: ClassVar[tuple[Rule, ...]] = ()

    @model_validator(mode="after")
    def _obey(self) -> Self:
        for rule in type(self).rules:
            if rule.holds is not None and not rule.holds(self):
                below = tuple(rule.field.split(".")) if rule.field else ()
                context = {"message": rule.message, "below": below, "value": _at(self, below)}
                raise PydanticCustomError("rule", "{message}", context)
        return self

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        schema = handler(core)
        if cls.rules:
            handler.resolve_ref_schema(schema)["x-kubernetes-validations"] = [rule.schema() for rule in cls.rules]
        return schema

    def to_object(self) -> dict[str, Any]:
        """As plain data for the API server: camelCase, without what is not set."""
        return self.model_dump(by_alias=True, exclude_none=True, mode="json")


def _at(model: BaseModel, below: tuple[str, ...]) -> object:
    value: Any = model.model_dump(by_alias=True, exclude_none=True, mode="json")
    for name in below:
        value = value.get(name, "nothing") if isinstance(value, dict) else value
    return value


def unchanged(name: str, reason: str) -> Rule:
    """A field that cannot change once the cluster is there, and why."""
    return Rule(f"self.{name} == oldSelf.{name}", f"{name} cannot be changed: {reason}", field=name)
