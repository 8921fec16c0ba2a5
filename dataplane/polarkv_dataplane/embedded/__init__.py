"""The embedded cluster: a supervisor that runs manager, slab servers and disk servers as processes of one machine."""

from polarkv_dataplane.embedded.cluster import Cluster
from polarkv_dataplane.embedded.settings import UpSettings
from polarkv_dataplane.embedded.starter import StartFailed

__all__ = ["Cluster", "StartFailed", "UpSettings"]
