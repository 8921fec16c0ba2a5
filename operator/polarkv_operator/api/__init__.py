"""The Kubernetes API of PolarKV, group ``polarkv.io``: models that the operator reads and the CRD is generated from."""

from __future__ import annotations

from polarkv_operator.api.cluster import GROUP, KIND, PLURAL, VERSION, PolarKVCluster, parse
from polarkv_operator.api.errors import SpecInvalid
from polarkv_operator.api.quantity import Quantity

__all__ = ["GROUP", "KIND", "PLURAL", "VERSION", "PolarKVCluster", "Quantity", "SpecInvalid", "parse"]
