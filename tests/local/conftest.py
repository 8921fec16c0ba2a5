"""Fixtures of the tests that run real processes."""

from __future__ import annotations
