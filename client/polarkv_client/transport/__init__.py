"""Ways to move bytes between the caller's buffers and a cache node's memory: one contract, several implementations."""
