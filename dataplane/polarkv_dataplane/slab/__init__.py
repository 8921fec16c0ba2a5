"""Slab server: owns a cache node's memory and serves it over TCP and, on the same machine, by its descriptor."""
