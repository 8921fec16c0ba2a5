"""Peers: other stores, each in an environment and processes of its own, at their best documented settings."""
