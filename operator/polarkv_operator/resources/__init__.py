"""What a cluster consists of, as plain objects: pure builders, cluster in, objects out; nothing here talks."""

from __future__ import annotations
