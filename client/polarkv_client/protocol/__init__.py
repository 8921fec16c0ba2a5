"""What travels between client, manager and cache nodes: frames, messages, grants."""
