"""The manager: metadata only, never KV bytes. ``core`` decides, ``shell`` does."""
