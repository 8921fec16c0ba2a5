"""Measures machine limits, PolarKV and peers in one interleaved run. `docs/performance.md` says how to read it."""
