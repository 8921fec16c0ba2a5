"""Kubernetes quantities, parsed in this one place: ``64Gi``, ``500m``, ``1e9``, ``1024``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import ROUND_CEILING, Decimal
from typing import Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

# As the API server accepts them, without a sign: nothing here can be negative.
PATTERN = r"^([0-9]+|[0-9]+\.[0-9]*|\.[0-9]+)(n|u|m|k|Ki|[MGTPE]i?|[eE][-+]?[0-9]{1,2})?$"
MOST_CHARACTERS = 32
_MOST = Decimal(2**63 - 1)
_FORM = re.compile(PATTERN)
_FACTORS = {
    "n": Decimal("1e-9"), "u": Decimal("1e-6"), "m": Decimal("1e-3"), "": Decimal(1), "k": Decimal(10**3),
    **{letter: Decimal(10 ** (3 * power)) for power, letter in enumerate("MGTPE", 2)},
    **{f"{letter}i": Decimal(1024**power) for power, letter in enumerate("KMGTPE", 1)},
}  # fmt: skip


@dataclass(frozen=True)
class Quantity:
    """A quantity: the text as it was written, and its value. Equal when written alike; compare ``value`` for size."""

    text: str
    value: Decimal

    @classmethod
    def parse(cls, given: object) -> Quantity:
        """Read a quantity from text or a whole number.

        Raises:
            ValueError: it is neither, or beyond 2^63 - 1.
        """
        if isinstance(given, Quantity):
            return given
        text = str(given) if isinstance(given, int) and not isinstance(given, bool) else given
        if not isinstance(text, str) or len(text) > MOST_CHARACTERS or (match := _FORM.fullmatch(text)) is None:
            raise ValueError("write a quantity: a number with a unit, such as 64Gi, 500m or 1G")
        number, unit = match[1], match[2] or ""
        value = Decimal(number) * _FACTORS[unit] if unit in _FACTORS else Decimal(number + unit)
        if value > _MOST:
            raise ValueError("it is more than a quantity can hold (2^63 - 1): use less")
        return cls(text, value)

    @property
    def bytes(self) -> int:
        """The value as a whole number of bytes, rounded up."""
        return int(self.value.to_integral_value(ROUND_CEILING))

    def __str__(self) -> str:
        return self.text

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            cls.parse, serialization=core_schema.plain_serializer_function_ser_schema(str)
        )

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        # The only form of a union that a structural schema may have.
        return {"x-kubernetes-int-or-string": True, "anyOf": [{"type": "integer"}, {"type": "string"}],
                "pattern": PATTERN, "maxLength": MOST_CHARACTERS}  # fmt: skip


@dataclass(frozen=True)
class AtLeast:
    """A lower bound of a quantity, beside its type in ``Annotated``; holds here and in the API server."""

    least: str

    def check(self, given: Quantity) -> Quantity:
        """Return ``given`` unless it is too small."""
        if given.value < Quantity.parse(self.least).value:
            raise ValueError(f"use at least {self.least}")
        return given

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self.check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        rule = f"quantity(string(self)).compareTo(quantity('{self.least}')) >= 0"
        validations = [{"rule": rule, "message": f"use at least {self.least}"}]
        return {**handler(schema), "x-kubernetes-validations": validations}


def of_bytes(size_bytes: int) -> str:
    """A number of bytes as the shortest exact quantity in binary units."""
    for power, letter in reversed(list(enumerate("KMGTPE", 1))):
        if size_bytes and size_bytes % 1024**power == 0:
            return f"{size_bytes // 1024**power}{letter}i"
    return str(size_bytes)
